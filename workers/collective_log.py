"""The collectives that the loop thread enters, noted on the board. Knows nothing of torch."""

from __future__ import annotations

from threading import get_ident
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
        self._thread = get_ident()
        self._known: dict[tuple[object, ...], tuple[int, int, str]] = {}

    def enter(
        self,
        name: str,
        dtype: object = None,
        numel: int | None = None,
        operation: object = None,
        root: str | None = None,
    ) -> None:
        """Note that a collective of all ranks is entered.

        Args:
            name: one of `COLLECTIVES`.
            dtype: of its first tensor, as torch prints it.
            numel: that tensor's elements, where every rank's has as many.
            operation: the reduction's operator, as torch prints it.
            root: the rank that data comes from or goes to: "from 0", "to 0".
        """
        if get_ident() != self._thread:
            return
        key = (name, dtype, numel, operation, root)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            description = _describe(*key)
            known = self._known[key] = (signature(description), CODE_OF[name], description)
        mark, code, description = known
        board = self._board
        waited_ns, count, fingerprint = board.tally
        count += 1
        fingerprint = roll(fingerprint, mark, code)
        board.tally = (waited_ns, count, fingerprint)
        board.trail.append((board.moment[2], count, fingerprint, description))

    def begin_wait(self) -> tuple[Phase, int, int, int] | None:
        """Enter the phase COLLECTIVE.

        Returns:
            What `end_wait` needs.
        """
        if get_ident() != self._thread:
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


def _describe(name: str, dtype: object, numel: int | None, operation: object, root: str | None) -> str:
    words = [name]
    if dtype is not None:
        words.append(str(dtype).removeprefix("torch.") + ("" if numel is None else f"[{numel}]"))
    if operation is not None:
        words.append(str(operation).rpartition(".")[2])
    return " ".join(words if root is None else [*words, root])
