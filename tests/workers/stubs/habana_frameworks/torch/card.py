"""The card of this process, and the notes that a test reads."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Card:
    """At most one card, opened at its first use, exclusively, and then for good."""

    def __init__(self) -> None:
        self.module: int | None = None
        self._lock: int | None = None
        #: Work that nobody has waited for.
        self.busy = False

    def acquire(self) -> None:
        """Open the card that HLS_MODULE_ID names, read now and never again; without it the first one that is free."""
        if self.module is not None:
            return
        wanted = os.environ.get("HLS_MODULE_ID")
        for module in range(cards()) if wanted is None else [int(wanted)]:
            lock = os.open(directory() / f"card-{module}", os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self.module, self._lock = module, lock
            note(f"acquired {module}")
            return
        raise RuntimeError(f"synStatus 8 [Device not found]: device acquire failed, module {wanted or 'any'}")


def directory() -> Path:
    """Where locks and notes are."""
    return Path(os.environ["STUB_HPU_DIR"])


def cards() -> int:
    """How many cards this host pretends to have."""
    return int(os.environ.get("STUB_HPU_CARDS", "4"))


def note(text: str) -> None:
    """Leave a line for the test, under this process's rank."""
    with (directory() / f"notes-{os.environ.get('RANK', 'none')}").open("a") as notes:
        notes.write(text + "\n")


card = Card()
