"""How the ranks are doing: what they told, what was heard, what the kernel says, judged by `stepcast.bus.verdicts`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from stepcast.bus.errors import WorkerLost
from stepcast.bus.frames import parse_times
from stepcast.bus.liveness import Phase, RankLiveness, Silence
from stepcast.bus.publisher import Publisher
from stepcast.bus.verdicts import SLOW_SHARE, Verdict, Work, judge

from . import failures, procfs
from .config import ExecutorConfig
from .health import RankHealth
from .inbox import Inbox
from .launch.process import WorkerProcess
from .pending import PendingTable
from .step import Pending

#: Samples of a silent process that are kept; they are half a heartbeat interval apart.
_SAMPLES = 3
#: How often it is looked whether the connections of ranks on other hosts are there, in seconds.
_REMOTE_LOOK_S = 0.05
#: A connection that ends is restored within that time, unless the process at its other end has gone. Before a peer that
#: has raised because of it is blamed (`failure_grace_s`).
_ABSENCE_S = 0.3
#: A look may come that much early, and still be worth a sample.
_EARLY = 0.8

_log = logging.getLogger("stepcast.runtime")


class Vitals:
    """Judges the ranks of one group. The caller serialises.

    Args:
        config: the settings.
        inbox: what the ranks have told.
        publisher: what they have not answered.
        pending: the steps under way.
        read: samples a process by its id, at a reading of the clock.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        inbox: Inbox,
        publisher: Publisher,
        pending: PendingTable,
        read: Callable[[int, float], procfs.Sample | None] = procfs.read,
    ) -> None:
        self._interval_s = config.heartbeat_interval_s
        self._limit_s = config.unresponsive_timeout_s
        self._lost_limit_s = config.resolved_lost_timeout_s
        self._inbox = inbox
        self._publisher = publisher
        self._pending = pending
        self._read = read
        self._processes: Sequence[WorkerProcess] = ()
        ranks = range(config.world_size)
        self._pids = dict.fromkeys(ranks, 0)
        #: Some rank has not answered a heartbeat. While none has, a look costs nothing: it may come with each step.
        self._asking = False
        self._silences = [Silence(self._interval_s) for _ in ranks]
        self._samples: list[deque[procfs.Sample]] = [deque(maxlen=_SAMPLES) for _ in ranks]
        self._remote: Sequence[WorkerProcess] = ()
        self._absent_since: dict[int, float] = {}
        self._stuck: set[int] = set()
        self._red: set[int] = set()

    @property
    def oldest_heard(self) -> float:
        """The clock's reading when the rank was heard that has been silent for longest."""
        return min(told.last_heard for told in self._inbox.liveness)

    @property
    def look_s(self) -> float | None:
        """Seconds until the next look is due; None where every rank has answered, and is on this host."""
        look_s = self._silences[0].look_s if self._asking else None
        return min(look_s or _REMOTE_LOOK_S, _REMOTE_LOOK_S) if self._remote else look_s

    def watch(self, processes: Sequence[WorkerProcess]) -> None:
        """Take the ranks' processes, once they are started."""
        self._processes = processes
        self._remote = [process for process in processes if not process.is_local]
        self._pids.update({process.rank: process.pid for process in processes})

    def asked(self, now: float) -> None:
        """Note that a heartbeat was sent to all ranks."""
        self._asking = True
        for told, silence in zip(self._inbox.liveness, self._silences, strict=True):
            silence.asked(now, told.last_heard)

    def look(self, now: float) -> None:
        """Look at the ranks that leave heartbeats unanswered. All that has come was read.

        Args:
            now: the clock's reading.
        """
        if not self._asking:
            return
        for told, silence in zip(self._inbox.liveness, self._silences, strict=True):
            silence.look(now, told.last_heard)
        self._asking = any(silence.unanswered for silence in self._silences)
        for process in self._processes:
            if process.is_local:
                self._sample(process, now)

    def _sample(self, process: WorkerProcess, now: float) -> None:
        silence, samples = self._silences[process.rank], self._samples[process.rank]
        if not silence.unanswered:
            samples.clear()
            return
        last_at = samples[-1].at if samples else now - silence.silent_s
        if now - last_at >= _EARLY * silence.look_s and (sample := self._read(process.pid, now)) is not None:
            samples.append(sample)

    def find_lost(self, now: float) -> tuple[WorkerLost | None, bool]:
        """Judge who has been gone, stopped, unresponsive or silent for too long, and log who begins or ceases to be.

        Args:
            now: the clock's reading.

        Returns:
            The error that ends the group, None where no limit has passed; and whether it is for a process that may
            still be there, so that its stacks are wanted.
        """
        if self._remote and (absent := self._find_absent(now)) is not None:
            return absent, False
        silent = self._find_silent(now) if self._asking or self._red else None
        return silent, silent is not None

    def _find_absent(self, now: float) -> WorkerLost | None:
        for process in self._remote:
            rank = process.rank
            if rank in self._publisher.present:
                self._absent_since.pop(rank, None)
                continue
            since = self._absent_since.setdefault(rank, now)
            if now - since >= _ABSENCE_S:
                silent_for_s = now - self._inbox.liveness[rank].last_heard
                return failures.absent(process, str(self._inbox.phase(rank)), silent_for_s, now - since)
        return None

    def _find_silent(self, now: float) -> WorkerLost | None:
        for process in self._processes:
            rank = process.rank
            verdict = self.verdict(rank, now)
            if verdict not in (Verdict.STOPPED, Verdict.UNRESPONSIVE, Verdict.LOST):
                if rank in self._red:
                    self._red.discard(rank)
                    _log.info("rank %d (%s) goes on: %s", rank, process.place, verdict)
                continue
            silent_s = self._silences[rank].silent_s
            phase, detail = str(self._inbox.phase(rank)), self.detail(rank, verdict, now)
            if rank not in self._red:
                self._red.add(rank)
                message = "rank %d (%s) is %s in phase %s, and has answered no heartbeat for %.2f s: %s"
                _log.warning(message, rank, process.place, verdict, phase, silent_s, detail)
            if verdict is Verdict.LOST:
                if silent_s >= self._lost_limit_s:
                    return failures.silent(process, phase, silent_s, self._lost_limit_s)
            elif self._limit_s is not None and silent_s >= self._limit_s:
                return failures.unresponsive(process, phase, silent_s, self._limit_s, f"{verdict}: {detail}")
        return None

    def ranks(self, now: float) -> tuple[RankHealth, ...]:
        """Tell how every rank is doing, by what is known, without asking it."""
        return tuple(self._rank(rank, told, now) for rank, told in enumerate(self._inbox.liveness))

    def report(self, now: float) -> str:
        """Put into words how every rank is doing, for the error that ends the group; a rank that is stuck stays so."""
        verdicts = {rank: self.verdict(rank, now) for rank in self._pids}
        self._stuck.update(rank for rank, verdict in verdicts.items() if verdict is Verdict.STUCK)
        return "; ".join(
            f"rank {rank} is {verdict} ({self.detail(rank, verdict, now)})" for rank, verdict in verdicts.items()
        )

    def verdict(self, rank: int, now: float) -> Verdict:
        """Judge a rank.

        Args:
            rank: the rank.
            now: the clock's reading.
        """
        silence = self._silences[rank]
        silence.look(silence.looked_at, self._inbox.liveness[rank].last_heard)  # it may have been heard since
        verdict = judge(
            self._inbox.phase(rank),
            self._work(rank, now),
            silent=silence.is_silent,
            activity=procfs.activity(self._samples[rank]) if silence.unanswered else None,
            interval_s=self._interval_s,
            local=all(process.rank != rank for process in self._remote),
        )
        return Verdict.STUCK if rank in self._stuck and verdict is not Verdict.GONE else verdict

    def detail(self, rank: int, verdict: Verdict, now: float) -> str:
        """Put a verdict's reason into words.

        Args:
            rank: the rank.
            verdict: the verdict.
            now: the clock's reading.
        """
        silence, samples = self._silences[rank], self._samples[rank]
        words = describe(verdict, self._inbox.phase(rank), self._work(rank, now), self._phase_age_s(rank, now))
        if verdict is not Verdict.GONE and silence.unanswered and (silence.is_silent or verdict is Verdict.STOPPED):
            kernel = procfs.describe(samples, self._pids[rank])
            return kernel if verdict in (Verdict.STOPPED, Verdict.UNRESPONSIVE) else f"{words}; {kernel}"
        return words

    def _rank(self, rank: int, told: RankLiveness, now: float) -> RankHealth:
        verdict = self.verdict(rank, now)
        return RankHealth(
            rank=rank,
            pid=self._pids[rank],
            verdict=str(verdict),
            detail=self.detail(rank, verdict, now),
            phase=str(self._inbox.phase(rank)),
            phase_age_s=self._phase_age_s(rank, now),
            step=told.step,
            last_heard_s=now - told.last_heard,
            queue_depth=self._publisher.unanswered(rank),
        )

    def _work(self, rank: int, now: float) -> Work | None:
        entry = self._pending.under_way.get(self._publisher.acknowledged(rank) + 1)
        return None if entry is None else work_on(entry, rank, now, self._inbox.liveness[rank].phase_since)

    def _phase_age_s(self, rank: int, now: float) -> float:
        told = self._inbox.liveness[rank]
        work = self._work(rank, now) if told.phase is Phase.IDLE else None
        return now - told.phase_since if work is None else work.working_s


def work_on(entry: Pending, rank: int, now: float, phase_since: float) -> Work:
    """Tell what a rank works on.

    Args:
        entry: the oldest message that it has not answered.
        rank: the rank.
        now: the clock's reading.
        phase_since: its reading when the rank began what it does: it did something else before.
    """
    alone = entry.waiting == 1 << rank
    peers_s = max((parse_times(times).compute_ns for times in entry.times.values()), default=None) if alone else None
    return Work(
        age_s=now - entry.published_at,
        working_s=now - max(entry.published_at, phase_since),
        limit_s=entry.hard_limit.seconds,
        peers_s=None if peers_s is None else peers_s / 1e9,
    )


def describe(verdict: Verdict, phase: Phase, work: Work | None, phase_age_s: float) -> str:
    """Put the verdict on a rank that answers into words.

    Args:
        verdict: the verdict.
        phase: what the rank does.
        work: what it has not answered.
        phase_age_s: seconds since it began what it does.
    """
    if verdict is Verdict.GONE:
        return "its process has ended"
    words = f"in phase {phase} for {phase_age_s:.3g} s"
    if work is None:
        return words
    if work.is_past_limit:
        return f"{words}, past its limit of {work.limit_s:g} s"
    if work.is_near_limit:
        return f"{words}, over {SLOW_SHARE:.0%} of its limit of {work.limit_s:g} s"
    if verdict is Verdict.SLOW and work.peers_s is not None:
        return f"{words}, for which its peers took {work.peers_s:.3g} s at most"
    return words
