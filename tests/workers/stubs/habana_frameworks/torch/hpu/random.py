"""The card's random numbers."""

from __future__ import annotations

from habana_frameworks.torch.card import note


def manual_seed(seed: int) -> None:
    """Seed the card."""
    note(f"seed {seed}")


def manual_seed_all(seed: int) -> None:
    """Seed every card, which is one."""
    manual_seed(seed)
