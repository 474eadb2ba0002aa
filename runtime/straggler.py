"""Which rank is slow, and why: from the times that come with every answer. Pure, and computed only when asked.

A rank's part of a step has three pieces: the way to it (until its loop had the message; from the publication, or from
the end of the step before where the rank was still at that), its own work, and what it waited in collectives. Ranks
that wait there wait for another: so the slow one is that whose way and own work together are the longest, and the
larger of its two leads over the others says why. Where it was kept from a processor for at least half of what it leads
by in all, that is why. Where no rank leads and yet all have waited, the collectives themselves are slow.

The driver's clock and the ranks' are the same one on one host (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from stepcast.bus.frames import Times, parse_times

_WORDS = {
    "bus": "has its messages {:.3g} ms later",
    "compute": "computes {:.3g} ms longer",
    "descheduled": "waits for a processor, and takes {:.3g} ms longer,",
    "collective": "wait in collectives for {:.3g} ms",
}
#: A lead that is smaller than this part of the step is no news.
_MIN_PART = 0.1
#: Nor is one that is smaller than this: it is the noise of a busy host.
_MIN_LEAD_S = 0.001
#: Fewer steps are not worth a line in the log: the first ones are slow for reasons of their own.
_MIN_STEPS = 16

_log = logging.getLogger("stepcast.runtime")


class Timed(NamedTuple):
    """A step that every rank has answered.

    Attributes:
        step: its id.
        published_at: the clock's reading when it was published, in seconds.
        times: for `parse_times`, by rank.
    """

    step: int
    published_at: float
    times: Mapping[int, bytes]


@dataclass(frozen=True)
class Straggler:
    """What holds the group up.

    Attributes:
        rank: the slow rank; None where the collectives are slow, and no rank more than the others.
        cause: "bus" (it had the messages late), "compute" (its own work takes longer), "descheduled" (it was kept from
            a processor) or "collective".
        lead_s: how much longer than for the median of the other ranks, a step; for "collective" what all have waited.
        steps: the number of steps that this was seen in.
        of: the number of steps looked at.
    """

    rank: int | None
    cause: str
    lead_s: float
    steps: int
    of: int

    def __str__(self) -> str:
        where = "the ranks" if self.rank is None else f"rank {self.rank}"
        return f"{where} {_WORDS[self.cause].format(self.lead_s * 1e3)} in {self.steps} of {self.of} steps"


def judge_step(
    published_at: float, times: Mapping[int, Times], before: Mapping[int, Times] | None = None
) -> Straggler | None:
    """Judge one step.

    Args:
        published_at: as in `Timed`.
        times: the ranks' times.
        before: their times of the step before.

    Returns:
        What held it up; None where nothing did, or where there is only one rank.
    """
    if len(times) < 2:  # noqa: PLR2004 - nobody to compare with
        return None
    free_at = {rank: (each.received_ns + each.compute_ns) / 1e9 for rank, each in (before or {}).items()}
    way = {rank: each.received_ns / 1e9 - max(published_at, free_at.get(rank, 0.0)) for rank, each in times.items()}
    work = {rank: (each.compute_ns - each.waited_ns) / 1e9 for rank, each in times.items()}
    waited = min(each.waited_ns for each in times.values()) / 1e9
    whole = max(way[rank] + each.compute_ns / 1e9 for rank, each in times.items())
    slowest = max(times, key=lambda rank: way[rank] + work[rank])
    leads = {"bus": _lead(way, slowest), "compute": _lead(work, slowest)}
    threshold = max(_MIN_LEAD_S, _MIN_PART * whole)
    cause = max(leads, key=lambda each: leads[each])
    queued = {rank: each.queued_ns / 1e9 for rank, each in times.items()}
    if 2 * _lead(queued, slowest) >= sum(leads.values()):
        cause = "descheduled"
    if sum(leads.values()) >= threshold:
        return Straggler(slowest, cause, sum(leads.values()), 1, 1)
    if waited >= max(threshold, whole / 2):
        return Straggler(None, "collective", waited, 1, 1)
    return None


def find_straggler(steps: Iterable[Timed]) -> Straggler | None:
    """Judge a window of steps.

    Args:
        steps: the steps.

    Returns:
        What held up most of them; None where nothing did.
    """
    judged, before = [], None
    for each in steps:
        times = _parsed(each.times)
        judged.append(judge_step(each.published_at, times, before))
        before = times
    found: dict[tuple[int | None, str], list[float]] = {}
    for one in judged:
        if one is not None:
            found.setdefault((one.rank, one.cause), []).append(one.lead_s)
    if not found:
        return None
    (rank, cause), leads = max(found.items(), key=lambda item: len(item[1]))
    if 2 * len(leads) <= len(judged):
        return None
    return Straggler(rank, cause, median(leads), len(leads), len(judged))


class StragglerWatch:
    """Logs what holds the group up: once when it begins, once when it has ceased.

    Args:
        interval_s: how often to look.
        find: tells what it is.
    """

    def __init__(self, interval_s: float, find: Callable[[], Straggler | None]) -> None:
        self._interval_s = interval_s
        self._find = find
        self._looked_at = -math.inf
        self._seen: tuple[int | None, str] | None = None
        self._told: tuple[int | None, str] | None = None

    def look(self, now: float) -> None:
        """Look, where it is time.

        Args:
            now: the clock's reading.
        """
        if now - self._looked_at < self._interval_s:
            return
        self._looked_at = now
        found = self._find()
        if found is not None and found.of < _MIN_STEPS:
            return
        before, self._seen = self._seen, None if found is None else (found.rank, found.cause)
        if self._seen != before or self._seen == self._told:  # what is seen once is no news
            return
        self._told = self._seen
        if found is None:
            _log.info("no rank holds the group up any more")
        else:
            _log.info("%s: the group goes at its pace", found)


def describe_waiting(missing: Iterable[int], phases: Mapping[int, str]) -> str:
    """Say for whom the ranks wait that have not answered a step.

    Args:
        missing: the ranks.
        phases: what each rank is doing.

    Returns:
        A clause for an error, with a comma before it; empty where it is not known.
    """
    waiting = [rank for rank in missing if phases[rank] == "collective"]
    others = [rank for rank in missing if phases[rank] != "collective"]
    if not waiting:
        return ""
    names = ", ".join(map(str, waiting))
    if others:
        return f", and rank {names} waits in a collective for rank {', '.join(map(str, others))}"
    return f", all that have not answered wait in a collective (rank {names})"


def _lead(values: Mapping[int, float], rank: int) -> float:
    return max(0.0, values[rank] - median(value for other, value in values.items() if other != rank))


def _parsed(times: Mapping[int, bytes]) -> dict[int, Times]:
    return {rank: parse_times(data) for rank, data in times.items()}
