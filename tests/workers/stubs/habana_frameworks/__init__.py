"""A stand-in for the package that drives Gaudi cards: its names, signatures, assertions and traps; no card.

Tensors that say they are on "hpu" are on the CPU, and the backend "hccl" is gloo, so that a group really computes. What
is taken over from the real package are the things on which code for it fails. Each is told where it stands. Two
variables belong to the stand-in: `STUB_HPU_DIR` is where the cards' locks and the ranks' notes are, and
`STUB_HPU_CARDS` how many cards there are.
"""
