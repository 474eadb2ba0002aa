"""What `Executor.health` tells: progress, rank by rank, and not only that the processes exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .straggler import Straggler


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """One rank.

    Attributes:
        rank: the rank.
        pid: its process id; 0 before it was started.
        verdict: how it is doing: "starting", "idle", "busy", "slow", "stuck", "stopped", "unresponsive", "gone" or
            "stopping".
        detail: the verdict's reason, in words.
        phase: what it said last that it was doing; "gone" where its process has ended.
        phase_age_s: seconds since it began that.
        step: the id of the step it works on, or worked on last; 0 before the first.
        last_heard_s: seconds since its last message.
        queue_depth: messages published that it has not answered.
    """

    rank: int
    pid: int
    verdict: str
    detail: str
    phase: str
    phase_age_s: float
    step: int
    last_heard_s: float
    queue_depth: int


@dataclass(frozen=True, kw_only=True)
class GroupHealth:
    """The group.

    Attributes:
        state: the group's state, such as "ready".
        ok: whether it takes steps, and every rank makes progress, or could. A long step within its limit is progress.
        failure: the text of the error that ended it; None where none did.
        epoch: the life of the group.
        published: messages published so far.
        in_flight: messages that some rank has not answered.
        in_flight_bytes: their bytes.
        straggler: the rank that held up most of the last steps, and why; None where none did.
        dropped: counts of dropped messages, and of refused connections, by reason.
        ranks: every rank.
        restarts: how often the group was restarted.
    """

    state: str
    ok: bool
    failure: str | None
    epoch: int
    published: int
    in_flight: int
    in_flight_bytes: int
    straggler: Straggler | None
    dropped: Mapping[str, int]
    ranks: tuple[RankHealth, ...]
    restarts: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Tell the same in plain values, as JSON holds them.

        Returns:
            The attributes by their names; `ranks` is a list of such dictionaries.
        """
        return {**asdict(self), "dropped": dict(self.dropped), "ranks": [asdict(rank) for rank in self.ranks]}
