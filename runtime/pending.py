"""Steps under way: who has answered, what the future gets, and when it is late.

Pure: no sockets, no threads, no clock of its own. The caller serialises, and calls `give_out` after it has let go of
its lock, since the futures' callbacks are the embedder's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.bus import codec
from stepcast.bus.errors import Diverged, ProtocolError, StepAborted, StepcastError, StepFailed, StepTimeout
from stepcast.bus.frames import TALLY_START

from .divergence import DivergenceWatch
from .step import Limit, Outcomes, Pending
from .straggler import Straggler, Timed, describe_waiting, find_straggler

#: How many of the last steps the search for a slow rank looks at.
_WINDOW = 64


class PendingTable:
    """All steps under way, resolved in the order in which they were published.

    Args:
        world_size: the number of ranks.
        failure_grace_s: after a rank raised, how long the others have to answer the same step.

    Attributes:
        carried: the failure that came after its own step's future was resolved; it fails the next one.
        to_resume: steps that failed and that every rank has answered: those on which they failed wait to be told.
        late: answers dropped because nobody waits for them any more.
        degraded: the last step that every rank has answered had failed on some rank.
        under_way: the messages that wait for answers, by sequence number.
        earliest: the clock's reading at which `expire` may have something to do; never later than when it has.
        outcomes: those that `give_out` will give out.
        give_out: as in `Outcomes`.
    """

    def __init__(self, world_size: int, failure_grace_s: float) -> None:
        self._everyone = (1 << world_size) - 1
        self._world_size = world_size
        self._failure_grace_s = failure_grace_s
        self.under_way: dict[int, Pending] = {}
        self._order: deque[Pending] = deque()
        self._outcomes = Outcomes()
        self.outcomes = self._outcomes.known
        self.give_out = self._outcomes.give_out
        self.earliest = math.inf
        self.carried: StepFailed | None = None
        #: Step, publication and times of the last steps, as in `Timed`: looked at only when somebody asks.
        self._answered_steps: deque[tuple[int, float, dict[int, bytes]]] = deque(maxlen=_WINDOW)
        self._divergence = DivergenceWatch()
        self._diverged: Diverged | None = None
        self.late = 0
        self.to_resume: list[int] = []
        self.degraded = False

    def __len__(self) -> int:
        return len(self.under_way)

    def answers_wanted(self) -> int:
        """How many answers are of use only together: those of the only step under way, where its outcome needs all."""
        if len(self.under_way) != 1:
            return 1
        (entry,) = self.under_way.values()
        return entry.waiting.bit_count() if entry.needs_all else 1

    def has_waiting(self) -> bool:
        """Whether some step's outcome has not been given out."""
        return bool(self._order)

    def add(self, entry: Pending) -> None:
        """Add a message that has just been published."""
        entry.waiting = self._everyone
        self.under_way[entry.sequence] = entry
        self._order.append(entry)
        limit_s = (entry.limit or entry.hard_limit).seconds  # the embedder's own is never the longer one
        self.earliest = min(self.earliest, entry.published_at + limit_s)

    def take_carried_failure(self) -> StepFailed:
        """Take the failure that came after its own step's future was resolved, where there is one.

        It fails the next step.
        """
        carried, self.carried = self.carried, None
        assert carried is not None  # noqa: S101 - the caller has looked
        return carried

    def result(self, rank: int, sequence: int, frames: Sequence[bytes | memoryview], times: bytes) -> None:
        """Note a RESULT.

        Args:
            rank: the rank.
            sequence: the message answered.
            frames: the answer, not yet decoded; empty where it was not wanted.
            times: when the rank worked on it, for `parse_times`.
        """
        entry = self.under_way.get(sequence)
        bit = 1 << rank
        if entry is None or not entry.waiting & bit:
            self.late += 1
            return
        entry.waiting ^= bit
        entry.times[rank] = times
        if entry.tally is None:
            entry.tally = times[TALLY_START:]
        elif not times.endswith(entry.tally):
            self._diverge(self._divergence.answers_differ(str(entry), entry.step, sequence, entry.times))
            return
        is_answer = rank == entry.answer_rank
        if frames and (is_answer or entry.gather):
            if entry.settled:
                self.late += 1
            else:
                try:
                    entry.answers[rank] = codec.decode(frames)
                except ProtocolError as problem:
                    entry.failure = entry.failure or _undecodable(entry, rank, problem)
        if is_answer or not entry.waiting:
            self._judge(entry, rank)

    def failed(self, rank: int, sequence: int, description: Sequence[str], now: float) -> None:
        """Note a FAILURE.

        Args:
            rank: the rank that raised.
            sequence: the message answered.
            description: the exception's type, text and traceback.
            now: the clock's reading.
        """
        entry = self._answered(rank, sequence)
        if entry is None:
            return
        if entry.failure is None:
            exception_type, text, trace = description
            entry.failure = StepFailed(
                f"{entry} failed on rank {rank}: {exception_type}: {text}\n\nrank {rank}: {trace}",
                step=entry.step,
                rank=rank,
                exception_type=exception_type,
                traceback=trace,
            )
            entry.ready = False  # an outcome that is not given out yet waits for every rank now
        else:
            entry.failure.failed_ranks += (rank,)
        entry.failed_at = min(entry.failed_at, now)
        self.earliest = min(self.earliest, *self._deadlines(entry))
        self._judge(entry, rank)

    def entered(self, rank: int, sequence: int, trail: Sequence[Sequence[int | str]]) -> None:
        """Note the collectives that a rank has entered for a message that it works on.

        Args:
            rank: the rank.
            sequence: the message.
            trail: as in `DivergenceWatch.told`.
        """
        entry = self.under_way.get(sequence)
        if entry is None or not entry.waiting >> rank & 1:
            return
        self._divergence.forget(next(iter(self.under_way)))
        error = self._divergence.told(str(entry), entry.step, sequence, rank, trail, entry.times)
        if error is not None:
            self._diverge(error)

    def answered_by(self, rank: int, last: int) -> int:
        """Tell up to which message a rank's answers have come, without a hole.

        Args:
            rank: the rank.
            last: the last message that it has answered.
        """
        bit = 1 << rank
        missing = (sequence for sequence, entry in self.under_way.items() if entry.waiting & bit)
        return min(last, next(missing, last + 1) - 1)

    def abort(self, step: int) -> bool:
        """Give a step the outcome `StepAborted`.

        Args:
            step: the step's id.

        Returns:
            False where the step is not under way any more.
        """
        for entry in self._order:
            if entry.step == step and not (entry.ready or entry.settled):
                self._settle(entry, None, StepAborted(f"{entry} was aborted", step=step))
                self._flush()
                return True
        return False

    def next_deadline(self) -> float | None:
        """The clock's reading at which `expire` may have something to do; never later than when it has."""
        return self.earliest if self.under_way else None

    def straggler(self) -> Straggler | None:
        """What held up most of the last steps, if anything did. Needs no lock: it would hold up a step."""
        return find_straggler(Timed(*each) for each in tuple(self._answered_steps))

    def expire(self, now: float, phases: Mapping[int, str], report: str = "") -> StepcastError | None:
        """Judge what is late.

        Args:
            now: the clock's reading.
            phases: each rank's last known phase, for the errors.
            report: how each rank is doing, in words, for the errors.

        Returns:
            The error with which the group must end; None where it lives on.
        """
        if self._diverged is not None:
            return self._diverged
        for entry in list(self.under_way.values()):
            if entry.failure is not None and now >= entry.failed_at + self._failure_grace_s:
                return self._epoch_ended(entry, phases)
            elapsed_s = now - entry.published_at
            if elapsed_s >= entry.hard_limit.seconds:
                return self._timed_out(entry, entry.hard_limit, elapsed_s, phases, report, ends_group=True)
            limit = entry.limit
            if limit is not None and elapsed_s >= limit.seconds and not (entry.ready or entry.settled):
                error = self._timed_out(entry, limit, elapsed_s, phases, report, ends_group=False)
                self._settle(entry, None, error)
                self._flush()
        deadlines = [deadline for entry in self.under_way.values() for deadline in self._deadlines(entry)]
        self.earliest = min(deadlines, default=math.inf)
        return None

    def fail_all(self, error: StepcastError) -> None:
        """Give every step an error, and forget everything."""
        for entry in self._order:
            # Not the entry's own failure: where a rank dies, its peers' collectives raise first.
            if not entry.settled:
                self._settle(entry, None, error)
        self._order.clear()
        self.under_way.clear()

    def _diverge(self, error: Diverged) -> None:
        """Have the next `expire` end the group. The message stays under way until then."""
        self._diverged = self._diverged or error
        self.earliest = -math.inf

    def _answered(self, rank: int, sequence: int) -> Pending | None:
        entry = self.under_way.get(sequence)
        bit = 1 << rank
        if entry is None or not entry.waiting & bit:
            self.late += 1
            return None
        entry.waiting ^= bit
        return entry

    def _judge(self, entry: Pending, rank: int) -> None:
        if not entry.waiting:
            del self.under_way[entry.sequence]
            if entry.failure is not None:
                self.to_resume.append(entry.step)
            self._answered_steps.append((entry.step, entry.published_at, entry.times))
            self.degraded = entry.failure is not None
            if entry.failure is not None and entry.settled:
                self.carried = entry.failure
            entry.ready = True
        elif entry.failure is None and not entry.needs_all and rank == entry.answer_rank:
            entry.ready = True
        self._flush()

    def _flush(self) -> None:
        """Resolve, in the order of publication, what is known up to the first step whose outcome is not."""
        order = self._order
        while order and (order[0].ready or order[0].settled):
            first = order.popleft()
            if not first.settled:
                error = first.failure
                if error is None and self.carried is not None:
                    error = self.take_carried_failure()
                self._settle(first, None if error else self._value(first), error)

    def _value(self, entry: Pending) -> Any:
        if entry.gather:
            return [entry.answers.get(rank) for rank in range(self._world_size)]
        return entry.answers.get(entry.answer_rank)

    def _settle(self, entry: Pending, value: Any, error: BaseException | None) -> None:
        entry.value, entry.error = value, error
        entry.answers = {}
        entry.settled = True
        if entry.future is not None:
            self._outcomes.add(entry)

    def _deadlines(self, entry: Pending) -> list[float]:
        deadlines = [entry.published_at + entry.hard_limit.seconds]
        if entry.failure is not None:
            deadlines.append(entry.failed_at + self._failure_grace_s)
        if entry.limit is not None and not (entry.ready or entry.settled):
            deadlines.append(entry.published_at + entry.limit.seconds)
        return deadlines

    def _epoch_ended(self, entry: Pending, phases: Mapping[int, str]) -> StepFailed:
        failure = entry.failure
        assert failure is not None  # noqa: S101 - the caller has looked
        silent = ", ".join(f"rank {rank} ({phases[rank]})" for rank in entry.missing())
        ended = StepFailed(
            f"{failure}\n{silent} did not answer the same step within failure_grace_s={self._failure_grace_s:g}, as "
            "ranks do that wait for the failed one in a collective: the epoch has ended",
            step=failure.step,
            rank=failure.rank,
            exception_type=failure.exception_type,
            traceback=failure.traceback,
            failed_ranks=failure.failed_ranks,
            epoch_ended=True,
        )
        if not entry.settled:
            self._settle(entry, None, ended)
        return ended

    def _timed_out(
        self,
        entry: Pending,
        limit: Limit,
        elapsed_s: float,
        phases: Mapping[int, str],
        report: str,
        *,
        ends_group: bool,
    ) -> StepTimeout:
        silent = ", ".join(f"rank {rank} ({phases[rank]})" for rank in entry.missing())
        why = describe_waiting(entry.missing(), phases)
        straggler = self.straggler()
        if straggler is not None:
            why += f"; before, {straggler}"
        outcome = "the stacks of all ranks are in the log" if ends_group else "the group lives on"
        where = f"\n{report}" if report else ""
        return StepTimeout(
            f"{entry}: no answer from {silent} after {elapsed_s:.3g} s; the limit is {limit.knob}={limit.seconds:g} "
            f"s{why}: {outcome}{where}",
            step=entry.step,
            elapsed_s=elapsed_s,
            limit_s=limit.seconds,
            knob=limit.knob,
            phases=phases,
        )


def _undecodable(entry: Pending, rank: int, problem: ProtocolError) -> StepFailed:
    return StepFailed(
        f"{entry}: the answer of rank {rank} can't be decoded: {problem}",
        step=entry.step,
        rank=rank,
        exception_type="ProtocolError",
        traceback="",
    )
