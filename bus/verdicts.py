"""What the driver makes of a rank: pure arithmetic on what it was told, what it has heard, and what the kernel says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .liveness import Phase

#: A step that has used up this share of its limit is slow.
SLOW_SHARE = 0.5
#: A rank is slow that takes this many times as long as the slowest of its peers, which have all answered.
SLOW_TIMES_PEERS = 3.0

_PARKED = frozenset({Phase.IDLE, Phase.PARKED})


class Verdict(Enum):
    """How a rank is doing."""

    STARTING = "starting"
    IDLE = "idle"  # it answers, and has nothing to do
    BUSY = "busy"  # at work, within its limits
    SLOW = "slow"  # at work, and late: `SLOW_SHARE`, `SLOW_TIMES_PEERS`, or kept from the processor
    STUCK = "stuck"  # past the limit that ends the group
    STOPPED = "stopped"  # by SIGSTOP or a debugger, says the kernel
    UNRESPONSIVE = "unresponsive"  # a process of this host that neither answers nor computes
    LOST = "lost"  # on another host, and silent
    GONE = "gone"  # the process has ended, says the kernel
    STOPPING = "stopping"

    @property
    def is_healthy(self) -> bool:
        """Whether such a rank makes progress, or could."""
        return self not in _UNHEALTHY

    def __str__(self) -> str:
        return self.value


#: Imports hold the interpreter's lock, and wait for the disk: `startup_timeout_s` judges a rank that starts.
_STAGES = {
    **dict.fromkeys((Phase.SPAWNING, Phase.STARTING, Phase.IMPORTING, Phase.LOADING), Verdict.STARTING),
    Phase.STOPPING: Verdict.STOPPING,
}
_UNHEALTHY = frozenset({Verdict.STUCK, Verdict.STOPPED, Verdict.UNRESPONSIVE, Verdict.LOST, Verdict.GONE})


class Activity(Enum):
    """What a process that does not answer is doing, as its kernel tells."""

    STOPPED = "stopped"
    RUNS = "runs"  # it uses a processor
    STARVED = "starved"  # it would, and gets none
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Work:
    """The oldest message that a rank has not answered.

    Attributes:
        age_s: seconds since its publication.
        working_s: seconds for which the rank can have worked on it.
        limit_s: the age past which the group ends.
        peers_s: seconds that the slowest other rank took; None where one has not answered either, or there is none.
    """

    age_s: float
    working_s: float
    limit_s: float
    peers_s: float | None = None

    @property
    def is_past_limit(self) -> bool:
        """Whether the group ends for it."""
        return self.age_s >= self.limit_s

    @property
    def is_near_limit(self) -> bool:
        """Whether it has used up `SLOW_SHARE` of its limit."""
        return self.age_s >= SLOW_SHARE * self.limit_s

    def is_behind_peers(self, interval_s: float) -> bool:
        """Whether it takes clearly longer than on any other rank.

        Args:
            interval_s: the heartbeat interval: what takes less is not worth a word.
        """
        return self.peers_s is not None and self.working_s >= max(interval_s, SLOW_TIMES_PEERS * self.peers_s)


def judge(
    phase: Phase, work: Work | None, *, silent: bool, activity: Activity | None, interval_s: float, local: bool = True
) -> Verdict:
    """Judge one rank.

    The kernel first: that a process has ended, or is stopped, is known and not guessed. Then its silence: a process of
    this host that does not answer, and still computes, runs code that holds the interpreter's lock; that is work. Then
    what it works on.

    Args:
        phase: what it does, as far as is known; GONE where the kernel has said so.
        work: what it has not answered; None where there is nothing.
        silent: whether it leaves heartbeats unanswered.
        activity: what the kernel says of a rank with unanswered heartbeats; None where it was not asked, or can't tell.
        interval_s: the heartbeat interval.
        local: whether its kernel is this one.
    """
    if phase is Phase.GONE:
        return Verdict.GONE
    if activity is Activity.STOPPED:
        return Verdict.STOPPED
    if work is not None and work.is_past_limit:
        return Verdict.STUCK
    if silent and not local:
        return Verdict.LOST
    return _STAGES.get(phase) or _judge_progress(phase, work, silent, activity, interval_s)


def _judge_progress(
    phase: Phase,
    work: Work | None,
    silent: bool,  # noqa: FBT001 - as in `judge`
    activity: Activity | None,
    interval_s: float,
) -> Verdict:
    if silent and activity not in (Activity.RUNS, Activity.STARVED):
        return Verdict.UNRESPONSIVE
    late = work is not None and (work.is_near_limit or work.is_behind_peers(interval_s))
    if late or (silent and activity is Activity.STARVED):
        return Verdict.SLOW
    return Verdict.IDLE if work is None and phase in _PARKED and not silent else Verdict.BUSY
