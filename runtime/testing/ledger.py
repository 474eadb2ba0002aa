"""The worker of the soak: an echo that also keeps a ledger, whose entries one rank can be made to refuse."""

from __future__ import annotations

from stepcast.workers.base import RankInfo
from stepcast.workers.echo import Echo

from .worker import InjectedFaultError


class Ledger(Echo):
    """Answers each step with the step itself."""

    def setup(self, rank: RankInfo) -> None:
        """Begin an empty ledger."""
        super().setup(rank)
        self._entries: list[int] = []

    def enter(self, number: int, refusing: int | None) -> None:
        """Enter a number.

        Args:
            number: the number.
            refusing: the rank that raises instead.

        Raises:
            InjectedFaultError: it was this rank.
        """
        if refusing == self.rank:
            raise InjectedFaultError(f"rank {self.rank} was told to refuse {number}")
        self._entries.append(number)

    def take_back(self, number: int, refusing: int | None) -> None:
        """Undo `enter`; same arguments.

        Raises:
            ValueError: it was not entered.
        """
        assert refusing != self.rank  # noqa: S101 - it has nothing to undo
        self._entries.remove(number)

    def entries(self) -> list[int]:
        """The numbers that were entered and not taken back."""
        return list(self._entries)
