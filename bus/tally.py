"""The tally of the collectives that a rank has entered for one message: how many, and which.

Ranks that run the same step must enter the same collectives in the same order. Each keeps a count and a fingerprint,
64 bits that are rolled on at each collective; two ranks with the same count and the same fingerprint have done the
same, but for a chance of one in 2**56:

    F(0) = 0
    F(n) = ((F(n-1) ^ S(n)) * 0x9E3779B97F4A7C15 mod 2**64), its lowest byte replaced by the collective's code

S(n) is the collective's signature: the first eight bytes, little-endian, of the BLAKE2b digest of its description, such
as ``all_reduce float32[1024] SUM`` or ``broadcast int64[2] from 0``. The code, a place in `COLLECTIVES`, tells who sees
a fingerprint which collective was the last.
"""

from __future__ import annotations

import hashlib

#: The collectives by their codes. A new one goes to the end.
COLLECTIVES = (
    "none",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
CODE_OF = {name: code for code, name in enumerate(COLLECTIVES)}

_MULTIPLIER = 0x9E3779B97F4A7C15
_HIGH_56_BITS = 0xFFFF_FFFF_FFFF_FF00


def signature(description: str) -> int:
    """Return a collective's signature.

    Args:
        description: what ranks must agree on.
    """
    return int.from_bytes(hashlib.blake2b(description.encode(), digest_size=8).digest(), "little")


def roll(fingerprint: int, signature: int, code: int) -> int:
    """Roll a fingerprint on.

    Args:
        fingerprint: the one before.
        signature: the collective's.
        code: the collective's.
    """
    return ((fingerprint ^ signature) * _MULTIPLIER & _HIGH_56_BITS) | code


def last_collective(fingerprint: int) -> str:
    """Name the collective that a fingerprint was rolled on by last.

    Args:
        fingerprint: the fingerprint.
    """
    code = fingerprint & 0xFF
    return COLLECTIVES[code] if code < len(COLLECTIVES) else f"collective {code}"
