"""`torch.hpu`. There is no `empty_cache` and no `_is_in_bad_fork`."""

from __future__ import annotations

import os
from typing import Any

import torch

from habana_frameworks.torch.card import card, cards, note

from . import random
from .random import manual_seed, manual_seed_all

__all__ = ["manual_seed", "manual_seed_all", "random"]

default_generators = (torch.Generator(),)
_GIB = 1 << 30


def is_available() -> bool:
    """Tell whether there is a card."""
    return device_count() > 0


def device_count() -> int:
    """Count the cards. Trap: makes a session with the driver, which a parent must not have when it forks."""
    note("device_count")
    return cards()


def is_initialized() -> bool:
    """Tell whether this process has its card."""
    return card.module is not None


def init() -> None:
    """Open the card."""
    card.acquire()


def current_device() -> int:
    """Trap: opens the card; and it is always 0."""
    card.acquire()
    return 0


def set_device(device: Any) -> None:
    """Trap: without an index it opens the first card that is free; with one it only writes HLS_MODULE_ID, if unset."""
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    if index is None:
        current_device()
    elif "HLS_MODULE_ID" not in os.environ:
        os.environ["HLS_MODULE_ID"] = str(index)


def synchronize() -> None:
    """Trap: takes no device. In lazy mode, it runs what was recorded, too."""
    note("synchronize")
    card.busy = False


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Trap: opens the card, as every question for memory."""
    card.acquire()
    return 90 * _GIB, 96 * _GIB
