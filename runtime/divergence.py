"""Whether ranks disagree on the collectives of a message. Pure: compares what they told.

Ranks that are only behind in the same sequence do not disagree: fingerprints are compared at equal counts alone. Ranks
do disagree where two fingerprints at the same count differ, and where one has answered the message after fewer
collectives than another has entered for it.

What can't be seen: the collectives of groups that not every rank is in, point-to-point messages, those of other threads
than the loop's, those of libraries that do not call torch.distributed, the data in the tensors, the sizes where the
ranks' parts may differ (all_gather, reduce_scatter, all_to_all, gather, scatter), which of two groups of all ranks a
collective was in, and how an asynchronous collective's wait is placed among the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepcast.bus.errors import Diverged
from stepcast.bus.frames import parse_times
from stepcast.bus.tally import last_collective


class Entered(NamedTuple):
    """A rank's tally after it has entered a collective.

    Attributes:
        number: collectives entered so far.
        fingerprint: which ones.
        description: the last one.
    """

    number: int
    fingerprint: int
    description: str


class DivergenceWatch:
    """What the ranks have told of the messages under way."""

    def __init__(self) -> None:
        #: By sequence number, then by rank: the last collectives entered, the newest first.
        self._trails: dict[int, dict[int, list[Entered]]] = {}

    def told(
        self,
        name: str,
        step: int,
        sequence: int,
        rank: int,
        trail: Sequence[Sequence[int | str]],
        answered: Mapping[int, bytes],
    ) -> Diverged | None:
        """Judge what a rank has told while it works on a message.

        Args:
            name: what errors call the message.
            step: its step id.
            sequence: its sequence number.
            rank: the rank.
            trail: its last collectives, the newest first: count, fingerprint, description.
            answered: the times, for `parse_times`, of the ranks that have answered the message.

        Returns:
            The error with which the group must end; None where the ranks agree, as far as is known.
        """
        if not trail:
            return None
        trails = self._trails.setdefault(sequence, {})
        mine = trails[rank] = [Entered(int(count), int(mark), str(text)) for count, mark, text in trail]
        finals = _finals(answered)
        disagree = any(_differ(mine, theirs) for other, theirs in trails.items() if other != rank) or any(
            mine[0].number > final.number or _differ(mine, [final]) for other, final in finals.items() if other != rank
        )
        return _diverged(name, step, trails, finals) if disagree else None

    def answers_differ(self, name: str, step: int, sequence: int, answered: Mapping[int, bytes]) -> Diverged:
        """Put into words that ranks have answered a message after different collectives.

        Args:
            name, step, sequence, answered: as in `told`.

        Returns:
            The error with which the group must end.
        """
        return _diverged(name, step, self._trails.get(sequence, {}), _finals(answered))

    def forget(self, oldest: int) -> None:
        """Forget the messages that every rank has answered.

        Args:
            oldest: the lowest sequence number that is still under way.
        """
        for sequence in [each for each in self._trails if each < oldest]:
            del self._trails[sequence]


def _finals(answered: Mapping[int, bytes]) -> dict[int, Entered]:
    finals = {}
    for rank, data in answered.items():
        times = parse_times(data)
        last = last_collective(times.fingerprint)
        finals[rank] = Entered(times.collectives, times.fingerprint, last)
    return finals


def _differ(one: Sequence[Entered], other: Sequence[Entered]) -> bool:
    marks = {each.number: each.fingerprint for each in one}
    return any(marks.get(each.number, each.fingerprint) != each.fingerprint for each in other)


def _diverged(name: str, step: int, trails: Mapping[int, Sequence[Entered]], finals: Mapping[int, Entered]) -> Diverged:
    last = {rank: trail[0] for rank, trail in trails.items()}
    last.update(
        (rank, final) for rank, final in finals.items() if rank not in last or last[rank].number != final.number
    )
    ranks = sorted(last)
    told = "; ".join(
        f"rank {rank} {'answered after' if rank in finals else 'has entered'} {last[rank].number}"
        + (f", the last {last[rank].description}" if last[rank].number else "")
        for rank in ranks
    )
    return Diverged(
        f"{name}: the ranks disagree on its collectives: {told}; have every rank enter the same collectives "
        "in the same order, whatever its rank and its data",
        step=step,
        counts={rank: last[rank].number for rank in ranks},
        last={rank: last[rank].description for rank in ranks},
    )
