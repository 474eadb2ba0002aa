"""The collectives that the loop thread enters, noted on the board. Knows nothing of torch."""

from __future__ import annotations

import threading
from time import monotonic_ns

from stepcast.bus.liveness import Phase
from stepcast.bus.tally import CODE_OF, roll, signature

from .board import Board

#: Descriptions are few, but for the sizes of prompts; past this many they are hashed anew.
_MAX_KNOWN = 4096


class CollectiveLog:
    """Counts the collectives of the thread that has made it, and the time that it waits in them.

    Those of other threads are left out: their place among the loop's own differs from rank to rank.

    Args:
        board: where the count is kept, and the phase while the thread waits.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._thread = threading.get_ident()
        self._known: dict[str, int] = {}

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread's collectives are counted."""
        return threading.get_ident() == self._thread

    def enter(self, name: str, details: str) -> None:
        """Note that a collective of all ranks is entered.

        Args:
            name: one of `COLLECTIVES`.
            details: what else ranks must agree on.
        """
        if not self.is_mine:
            return
        description = f"{name} {details}".rstrip()
        known = self._known.get(description)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[description] = signature(description)
        board = self._board
        waited_ns, count, fingerprint = board.tally
        count += 1
        fingerprint = roll(fingerprint, known, CODE_OF[name])
        board.tally = (waited_ns, count, fingerprint)
        board.trail.append((board.moment[2], count, fingerprint, description))

    def begin_wait(self) -> tuple[Phase, int, int, int] | None:
        """Enter the phase COLLECTIVE.

        Returns:
            What `end_wait` needs.
        """
        if not self.is_mine:
            return None
        board = self._board
        before = board.moment
        board.moment = (Phase.COLLECTIVE, monotonic_ns(), before[2], before[3])
        return before

    def end_wait(self, before: tuple[Phase, int, int, int] | None) -> None:
        """Go back to the phase before, and note the time.

        Args:
            before: what `begin_wait` has returned.
        """
        if before is None:
            return
        board = self._board
        waited_ns, count, fingerprint = board.tally
        board.tally = (waited_ns + monotonic_ns() - board.moment[1], count, fingerprint)
        board.moment = before
