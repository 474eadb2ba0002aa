"""The table of steps under way: every outcome is given out once, in order, and in time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepcast import StepAborted, StepcastError, StepFailed, StepTimeout
from stepcast.bus import codec
from stepcast.bus.errors import Diverged
from stepcast.bus.frames import TIMES_BYTES, pack_times
from stepcast.runtime.pending import PendingTable
from stepcast.runtime.step import Limit, Pending, StepFuture

GRACE_S = 0.5
HARD_LIMIT_S = 8.0
TIMES = bytes(TIMES_BYTES)
ERROR = ("ValueError", "no", "Traceback: no")


class Table:
    """A `PendingTable`, and the clock and the publisher that belong to it."""

    def __init__(self, world_size: int, answer_rank: int = 0) -> None:
        self.pending = PendingTable(world_size, GRACE_S)
        self.world_size = world_size
        self.answer_rank = answer_rank
        self.now = 100.0
        self.entries: list[Pending] = []
        self.phases: Mapping[int, str] = dict.fromkeys(range(world_size), "step")

    def submit(
        self, *, gather: bool = False, needs_all: bool = False, limit_s: float | None = None, future: bool = True
    ) -> Pending:
        number = len(self.entries) + 1
        limit = None if limit_s is None else Limit(limit_s, "timeout_s")
        setting = Limit(HARD_LIMIT_S, "step_timeout_s")
        hard_limit = setting if limit is None else max(limit, setting)
        needs_all = gather or needs_all
        entry = Pending(number, 10 * number, "step", gather, self.answer_rank, needs_all, self.now, limit, hard_limit)
        if future:
            entry.future = StepFuture(entry, lambda _entry, _timeout: None, self.pending.abort)
        self.pending.add(entry)
        self.entries.append(entry)
        return entry

    def answer(self, rank: int, entry: Pending) -> None:
        wanted = entry.gather or rank == self.answer_rank
        frames = codec.encode([rank, entry.step]) if wanted else ()
        self.pending.result(rank, entry.sequence, frames, TIMES)
        self.pending.give_out()

    def fail(self, rank: int, entry: Pending) -> None:
        self.pending.failed(rank, entry.sequence, (ERROR[0], f"rank {rank}", ERROR[2]), self.now)
        self.pending.give_out()

    def expire(self) -> StepcastError | None:
        error = self.pending.expire(self.now, self.phases)
        self.pending.give_out()
        return error


def error_of(entry: Pending) -> Any:
    assert entry.future
    assert entry.future.done()
    return entry.future.exception()


# One thing at a time.


@pytest.mark.parametrize("settled", [False, True], ids=["before its outcome", "after its outcome"])
def test_answers_after_different_collectives_end_the_group(settled: bool) -> None:
    table = Table(3)
    entry, later = table.submit(gather=not settled), table.submit()
    for rank in (0, 1):
        table.pending.result(rank, entry.sequence, (), pack_times((rank, 7, 0, 5, 2, 256 + 1)))
    assert table.expire() is None
    table.pending.result(2, entry.sequence, (), pack_times((9, 7, 0, 5, 1, 512 + 3)))
    assert table.pending.next_deadline() == -math.inf
    error = table.expire()
    assert isinstance(error, Diverged)
    assert (error.step, error.counts) == (10, {0: 2, 1: 2, 2: 1})
    assert error.last == {0: "all_reduce", 1: "all_reduce", 2: "broadcast"}
    table.pending.fail_all(error)
    table.pending.give_out()
    assert error_of(entry) is (None if settled else error)
    assert error_of(later) is error


def test_what_ranks_tell_of_a_message_in_work_may_end_the_group() -> None:
    table = Table(2)
    entry = table.submit()
    table.pending.entered(0, entry.sequence, [[1, 256 + 1, "all_reduce float32[1] SUM"]])
    assert table.expire() is None
    table.pending.entered(1, entry.sequence, [[1, 512 + 3, "broadcast float32[1] from 0"]])
    error = table.expire()
    assert isinstance(error, Diverged)
    assert error.last == {0: "all_reduce float32[1] SUM", 1: "broadcast float32[1] from 0"}


def test_what_comes_late_of_a_message_that_is_answered_does_not_count() -> None:
    table = Table(2)
    entry = table.submit()
    table.answer(0, entry)
    table.pending.entered(0, entry.sequence, [[1, 257, "all_reduce"]])  # it was on its way before the answer
    table.answer(1, entry)
    table.pending.entered(1, entry.sequence, [[1, 257, "all_reduce"]])
    assert table.expire() is None
    assert error_of(entry) is None


def test_the_output_rank_answers_a_step() -> None:
    """The future is resolved by the output rank's answer, whatever the others do."""
    table = Table(3, answer_rank=1)
    entry = table.submit()
    table.answer(0, entry)
    assert not entry.settled
    table.answer(1, entry)
    assert entry.future
    assert entry.future.result() == [1, 10]
    assert len(table.pending) == 1
    table.answer(2, entry)
    assert len(table.pending) == 0


def test_a_step_with_buffers_is_answered_when_every_rank_has_answered() -> None:
    """Until then some rank may still read the embedder's arrays."""
    table = Table(2)
    entry = table.submit(needs_all=True)
    table.answer(0, entry)
    assert not entry.settled
    table.answer(1, entry)
    assert entry.future
    assert entry.future.result() == [0, 10]


def test_gathered_answers_come_in_the_order_of_the_ranks() -> None:
    """Whichever rank answers first."""
    table = Table(3)
    entry = table.submit(gather=True)
    for rank in (2, 0, 1):
        table.answer(rank, entry)
    assert entry.future
    assert entry.future.result() == [[0, 10], [1, 10], [2, 10]]


def test_an_outcome_waits_for_its_turn() -> None:
    """The second step's answer is there first, and is given out second."""
    table = Table(2)
    first, second = table.submit(gather=True), table.submit()
    order: list[int] = []
    for entry in (first, second):
        assert entry.future
        entry.future.add_done_callback(lambda future: order.append(future.step))  # type: ignore[attr-defined]
    table.answer(0, first)
    table.answer(0, second)
    assert order == []
    table.answer(1, first)
    assert order == [10, 20]


def test_a_step_without_a_future_keeps_its_outcome() -> None:
    """Its waiter reads it; nothing is to be given out."""
    table = Table(1)
    entry = table.submit(future=False)
    table.answer(0, entry)
    assert not table.pending.outcomes
    assert entry.outcome() == [0, 10]
    failing = table.submit(future=False)
    table.fail(0, failing)
    with pytest.raises(StepFailed, match="step 20 failed on rank 0: ValueError: rank 0"):
        failing.outcome()


def test_a_callback_that_gives_out_continues_where_it_is() -> None:
    """Called from a callback, the rest is given out in order, and nothing twice."""
    table = Table(1)
    entries = [table.submit(gather=True) for _ in range(3)]
    order: list[int] = []

    def note(future: Any) -> None:
        order.append(future.step)
        table.pending.give_out()

    for entry in entries:
        assert entry.future
        entry.future.add_done_callback(note)
        table.pending.result(0, entry.sequence, codec.encode(0), TIMES)
    table.pending.give_out()
    assert order == [10, 20, 30]


def test_a_second_answer_of_a_rank_is_counted_and_dropped() -> None:
    """Neither its value nor its failure reaches a future."""
    table = Table(2)
    entry = table.submit(gather=True)
    table.answer(0, entry)
    table.answer(0, entry)
    table.fail(0, entry)
    assert table.pending.late == 2
    table.answer(1, entry)
    assert entry.future
    assert entry.future.result() == [[0, 10], [1, 10]]
    table.answer(1, entry)
    assert table.pending.late == 3


def test_a_failure_that_all_have_answered_is_the_steps_own() -> None:
    """Rank, type and traceback are told; the group lives on, and is degraded until a step goes well."""
    table = Table(3)
    entry, after = table.submit(), table.submit()
    table.fail(1, entry)
    table.answer(0, entry)
    assert not entry.settled
    table.fail(2, entry)
    error = error_of(entry)
    assert (error.step, error.rank, error.exception_type, error.traceback) == (10, 1, ERROR[0], ERROR[2])
    assert (error.failed_ranks, error.epoch_ended) == ((1, 2), False)
    assert str(error).startswith("step 10 failed on rank 1: ValueError: rank 1\n\nrank 1: Traceback")
    assert table.pending.degraded
    table.now += 100
    assert table.pending.next_deadline() is not None
    for rank in range(3):
        table.answer(rank, after)
    assert not table.pending.degraded
    assert after.future
    assert after.future.result() == [0, 20]


def test_a_failure_that_some_rank_does_not_answer_ends_the_epoch() -> None:
    """After the grace, not before; the error names the silent ranks and what they do."""
    table = Table(3)
    table.phases = {0: "idle", 1: "collective", 2: "step"}
    entry, other = table.submit(), table.submit()
    table.fail(0, entry)
    assert table.pending.next_deadline() == table.now + GRACE_S
    table.now += GRACE_S / 2
    assert table.expire() is None
    table.now += GRACE_S / 2
    error = table.expire()
    assert isinstance(error, StepFailed)
    assert error.epoch_ended
    assert (error.step, error.rank, error.exception_type, error.traceback) == (10, 0, ERROR[0], ERROR[2])
    assert "rank 1 (collective), rank 2 (step) did not answer the same step within failure_grace_s=0.5" in str(error)
    assert error_of(entry) is error
    table.pending.fail_all(error)
    table.pending.give_out()
    assert error_of(other) is error


def test_a_failure_after_the_answer_fails_the_next_step() -> None:
    """The output rank's value was given out already; whoever comes next learns that the state is in doubt."""
    table = Table(2)
    first, second, third = table.submit(), table.submit(), table.submit()
    table.answer(0, first)
    table.fail(1, first)
    assert first.future
    assert first.future.result() == [0, 10]
    assert table.pending.degraded
    table.answer(0, second)
    error = error_of(second)
    assert (error.step, error.rank) == (10, 1)
    table.answer(1, second)
    table.answer(0, third)
    assert third.future
    assert third.future.result() == [0, 30]


def test_a_hole_in_a_ranks_answers_shows() -> None:
    """Answers come in order: one that others have overtaken was lost."""
    table = Table(2)
    first, second = table.submit(), table.submit()
    assert [table.pending.answered_by(rank, 0) for rank in (0, 1)] == [0, 0]
    table.answer(1, second)
    assert table.pending.answered_by(1, second.sequence) == 0
    table.answer(1, first)
    assert table.pending.answered_by(1, second.sequence) == second.sequence
    assert table.pending.answered_by(0, 0) == 0


def test_a_carried_failure_can_be_taken_by_the_next_submission() -> None:
    """Where no step is under way, the next one is refused with it; once."""
    table = Table(2)
    entry = table.submit()
    table.answer(0, entry)
    assert table.pending.carried is None
    table.fail(1, entry)
    carried = table.pending.take_carried_failure()
    assert carried
    assert (carried.step, carried.rank) == (10, 1)
    assert table.pending.carried is None


def test_a_failure_before_a_step_has_had_its_turn_is_reported_once() -> None:
    """The answer was there, but not given out: the step fails with its own failure, and no other step does."""
    table = Table(3)
    first, second, third = table.submit(gather=True), table.submit(), table.submit()
    for rank in (0, 1):
        table.answer(rank, first)
    table.answer(0, second)
    table.fail(1, second)
    table.answer(2, first)
    assert first.future
    assert first.future.result() == [[0, 10], [1, 10], [2, 10]]
    assert not second.settled
    table.answer(2, second)
    assert error_of(second).step == 20
    for rank in range(3):
        table.answer(rank, third)
    assert third.future
    assert third.future.result() == [0, 30]
    assert table.pending.carried is None


def test_such_a_failure_ends_the_epoch_as_any_other() -> None:
    """The step waits for the ranks that are silent, but no longer than the grace."""
    table = Table(3)
    first, second = table.submit(gather=True), table.submit()
    table.answer(0, first)
    table.answer(0, second)
    table.answer(1, first)
    table.fail(1, second)
    table.answer(2, first)
    table.now += GRACE_S
    assert table.pending.next_deadline() == table.now
    error = table.expire()
    assert isinstance(error, StepFailed)
    assert error.epoch_ended
    assert error_of(second) is error


def test_an_answer_that_can_not_be_decoded_fails_its_step_alone() -> None:
    """The rank has answered, so no grace runs; the others are waited for as for any step."""
    table = Table(2)
    entry, after = table.submit(gather=True), table.submit()
    table.pending.result(0, entry.sequence, [msgpack.packb(msgpack.ExtType(99, b"?"))], TIMES)
    table.now += HARD_LIMIT_S / 2
    assert table.expire() is None
    table.answer(1, entry)
    error = error_of(entry)
    assert (error.rank, error.exception_type, error.epoch_ended) == (0, "ProtocolError", False)
    assert "the answer of rank 0 can't be decoded" in str(error)
    table.answer(0, after)
    assert after.future
    assert after.future.result() == [0, 20]


def test_a_raise_beside_an_undecodable_answer_starts_the_grace() -> None:
    """A rank that has raised may hold up the others, whatever came before it."""
    table = Table(3)
    entry = table.submit(gather=True)
    table.pending.result(0, entry.sequence, [msgpack.packb(msgpack.ExtType(99, b"?"))], TIMES)
    table.fail(1, entry)
    assert table.pending.next_deadline() == table.now + GRACE_S
    table.now += GRACE_S
    error = table.expire()
    assert isinstance(error, StepFailed)
    assert error.epoch_ended


def test_a_limit_of_the_embedders_own_fails_one_step_only() -> None:
    """The group lives on; the late answer is counted and dropped, the next step gets its own."""
    table = Table(1)
    entry, after = table.submit(limit_s=1.0), table.submit()
    table.now += 1.0
    assert table.pending.next_deadline() == table.now
    assert table.expire() is None
    error = error_of(entry)
    assert isinstance(error, StepTimeout)
    assert (error.step, error.limit_s, error.knob, error.elapsed_s) == (10, 1.0, "timeout_s", 1.0)
    assert "step 10: no answer from rank 0 (step) after 1 s; the limit is timeout_s=1 s: the group lives on" in str(
        error
    )
    table.answer(0, entry)
    assert table.pending.late == 1
    table.answer(0, after)
    assert after.future
    assert after.future.result() == [0, 20]


def test_the_groups_limit_ends_the_group() -> None:
    """The error names the setting, each rank's phase, and the ranks that have not answered."""
    table = Table(2)
    table.phases = {0: "idle", 1: "step"}
    entry = table.submit(gather=True)
    table.answer(0, entry)
    table.now += HARD_LIMIT_S
    error = table.expire()
    assert isinstance(error, StepTimeout)
    assert (error.knob, error.limit_s, error.phases) == ("step_timeout_s", HARD_LIMIT_S, {0: "idle", 1: "step"})
    assert "no answer from rank 1 (step) after 8 s" in str(error)
    assert "the stacks of all ranks are in the log" in str(error)


def test_an_aborted_step_fails_at_once_and_its_answers_are_dropped() -> None:
    """It need not wait for its turn, and is not the next one's matter."""
    table = Table(1)
    first, second = table.submit(), table.submit()
    assert table.pending.abort(second.step)
    table.pending.give_out()
    error = error_of(second)
    assert isinstance(error, StepAborted)
    assert error.step == second.step
    assert not table.pending.abort(second.step)
    assert not table.pending.abort(999)
    table.answer(0, first)
    table.answer(0, second)
    assert table.pending.late == 1
    assert first.future
    assert first.future.result() == [0, 10]
    assert not table.pending.abort(first.step)


def test_cancelling_a_future_aborts_its_step() -> None:
    """It says whether there was anything to abort."""
    table = Table(1)
    entry = table.submit()
    assert entry.future
    assert entry.future.cancel()
    table.pending.give_out()
    assert isinstance(error_of(entry), StepAborted)
    assert not entry.future.cancel()


def test_an_aborted_step_keeps_the_groups_limit() -> None:
    """Its ranks still run it: one that never answers is found."""
    table = Table(1)
    entry = table.submit()
    table.pending.abort(entry.step)
    table.now += HARD_LIMIT_S
    assert isinstance(table.expire(), StepTimeout)


def test_fail_all_gives_the_same_error_to_every_step() -> None:
    """Also to one that has failed on some rank: where a rank dies, the others' collectives raise first."""
    table = Table(2)
    answered, failed, waiting = table.submit(), table.submit(), table.submit()
    table.answer(0, answered)
    table.fail(0, failed)
    error = StepcastError("over")
    table.pending.fail_all(error)
    table.pending.give_out()
    assert answered.future
    assert answered.future.result() == [0, 10]
    assert error_of(failed) is error
    assert error_of(waiting) is error
    assert not table.pending.has_waiting()
    assert table.pending.next_deadline() is None
    table.answer(1, failed)
    assert table.pending.late == 1


def test_times_are_those_of_the_ranks_that_have_answered() -> None:
    """They are there as they come, by rank."""
    table = Table(2)
    entry = table.submit(gather=True)
    assert entry.future
    assert entry.future.times == {}
    table.pending.result(1, entry.sequence, codec.encode(0), (7).to_bytes(8, "little") + bytes(TIMES_BYTES - 8))
    assert {rank: times.received_ns for rank, times in entry.future.times.items()} == {1: 7}
    assert entry.missing() == [0]


# Everything at once.

SELDOM = st.sampled_from([False, False, False, False, True])
LIMITS = st.sampled_from([None, None, None, 0.25, 1.0, 4.0, 16.0])


class Interleavings(RuleBasedStateMachine):
    """Ranks that answer in order, each at its own pace, and an embedder that submits and aborts meanwhile."""

    @initialize(world_size=st.sampled_from([3, 2, 4, 1]), data=st.data())
    def start(self, world_size: int, data: st.DataObject) -> None:
        self.table = Table(world_size, data.draw(st.integers(0, world_size - 1)))
        self.answered = [0] * world_size  # how many each rank has answered
        self.failed: dict[int, list[int]] = {}  # by step: the ranks that have raised
        self.failed_at: dict[int, float] = {}
        self.resolved: list[int] = []  # steps, as their futures are resolved
        self.late = 0
        self.told: set[int] = set()  # steps whose failure was told, by their own future or another's
        self.over: StepcastError | None = None

    @property
    def entries(self) -> list[Pending]:
        return self.table.entries

    def is_running(self) -> bool:
        return self.over is None

    @precondition(is_running)
    @rule(kinds=st.lists(st.tuples(SELDOM, SELDOM, LIMITS), min_size=1, max_size=4))
    def submit(self, kinds: list[tuple[bool, bool, float | None]]) -> None:
        for gather, needs_all, limit_s in kinds:
            self.submit_one(gather, needs_all, limit_s)

    def submit_one(self, gather: bool, needs_all: bool, limit_s: float | None) -> None:
        carried = self.table.pending.carried and self.table.pending.take_carried_failure()
        if carried is not None:
            self.see_carried(carried, math.inf)
            self.told.add(carried.step)
        entry = self.table.submit(gather=gather, needs_all=needs_all, limit_s=limit_s)
        assert entry.future
        entry.future.add_done_callback(lambda future: self.resolved.append(future.step))  # type: ignore[attr-defined]

    @precondition(is_running)
    @rule(answers=st.lists(st.tuples(st.integers(0, 3), SELDOM), min_size=1, max_size=8))
    def answer(self, answers: list[tuple[int, bool]]) -> None:
        """Some ranks answer, each of them its next steps; some raise."""
        for rank, raises in answers:
            self.answer_one(rank % self.table.world_size, raises=raises)

    def answer_one(self, rank: int, *, raises: bool) -> None:
        if self.answered[rank] == len(self.entries):
            return
        entry = self.entries[self.answered[rank]]
        self.answered[rank] += 1
        if raises:
            self.failed.setdefault(entry.step, []).append(rank)
            self.failed_at.setdefault(entry.step, self.table.now)
            self.table.fail(rank, entry)
            return
        wanted = entry.gather or rank == self.table.answer_rank
        self.late += entry.settled and wanted
        self.table.answer(rank, entry)

    @rule(rank=st.integers(0, 3), raises=st.booleans())
    def answer_late(self, rank: int, raises: bool) -> None:
        """Answer what the rank has answered already, or what was given up with the group."""
        rank %= self.table.world_size
        known = self.answered[rank] if self.is_running() else len(self.entries)
        if not known:
            return
        entry = self.entries[known - 1]
        self.late += 1
        if raises:
            self.table.fail(rank, entry)
        else:
            self.table.answer(rank, entry)

    @precondition(lambda self: self.is_running() and self.entries)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        was_ready, was_settled = entry.ready, entry.settled
        assert self.table.pending.abort(entry.step) is not (was_ready or was_settled)
        self.table.pending.give_out()

    @precondition(is_running)
    @rule(seconds=st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.table.now += seconds
        deadline = self.table.pending.next_deadline()
        due = self.due()
        if due:
            assert deadline is not None
            assert deadline <= min(due)
        if deadline is None or self.table.now < deadline:
            return
        self.over = self.table.expire()
        self.judge_end(due)
        if self.over is not None:
            self.table.pending.fail_all(self.over)
            self.table.pending.give_out()
        elif (deadline := self.table.pending.next_deadline()) is not None:
            assert deadline > self.table.now, "the same deadline again: the caller would spin"

    def due(self) -> list[float]:
        """All that must be judged, and when, by a plain reading of what has happened."""
        due = []
        for entry in self.unanswered():
            due.append(entry.published_at + entry.hard_limit.seconds)
            if entry.step in self.failed_at:
                due.append(self.failed_at[entry.step] + GRACE_S)
            if entry.limit and not (entry.settled or entry.ready):
                due.append(entry.published_at + entry.limit.seconds)
        return due

    def unanswered(self) -> list[Pending]:
        return self.entries[min(self.answered) :]

    def judge_end(self, due: list[float]) -> None:
        fatal = [
            entry
            for entry in self.unanswered()
            if self.table.now >= entry.published_at + entry.hard_limit.seconds
            or self.table.now >= self.failed_at.get(entry.step, math.inf) + GRACE_S
        ]
        assert (self.over is not None) == bool(fatal)
        if isinstance(self.over, StepFailed):
            assert self.over.epoch_ended
            assert self.over.rank == self.failed[self.over.step][0]
        elif self.over is not None:
            assert isinstance(self.over, StepTimeout)
            assert self.over.limit_s >= HARD_LIMIT_S

    def see_carried(self, error: StepFailed, step: float) -> None:
        """A failure reaches another step only when its own could not be told any more."""
        assert step > error.step
        own = next(entry for entry in self.entries if entry.step == error.step)
        assert own.settled
        assert own.error is not error

    @invariant()
    def each_is_resolved_once_and_in_order(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.resolved) == len(set(self.resolved))
        assert not self.table.pending.outcomes
        by_step = {entry.step: entry for entry in self.entries}
        in_turn = [
            step for step in self.resolved if by_step[step].error is None or self.is_in_turn(by_step[step].error)
        ]
        assert in_turn == sorted(in_turn)

    def is_in_turn(self, error: Any) -> bool:
        return isinstance(error, StepFailed) and not error.epoch_ended

    @invariant()
    def each_outcome_is_its_own(self) -> None:
        if not hasattr(self, "table"):
            return
        told: set[int] = set()
        for entry in self.entries:
            assert entry.future
            assert entry.future.done() == entry.settled
            if not entry.settled:
                continue
            if entry.error is None:
                one = [self.table.answer_rank, entry.step]
                everyone = [[rank, entry.step] for rank in range(self.table.world_size)]
                assert entry.future.result() == (everyone if entry.gather else one)
            elif isinstance(entry.error, StepFailed) and not entry.error.epoch_ended:
                assert id(entry.error) not in told, "one failure was told twice"
                told.add(id(entry.error))
                assert list(entry.error.failed_ranks) == self.failed[entry.error.step]
                if entry.error.step != entry.step:
                    self.see_carried(entry.error, entry.step)
            elif isinstance(entry.error, StepTimeout) and entry.error is not self.over:
                assert entry.limit
                assert entry.error.knob == "timeout_s"
                assert entry.error.elapsed_s >= entry.limit.seconds

    @invariant()
    def late_answers_are_counted(self) -> None:
        if hasattr(self, "table"):
            assert self.table.pending.late == self.late

    def teardown(self) -> None:
        """In the end every rank answers, or the group ends: no future is left."""
        if not hasattr(self, "table"):
            return
        if self.over is None:
            for entry in self.entries:
                for rank in range(self.table.world_size):
                    if self.entries.index(entry) >= self.answered[rank]:
                        self.table.answer(rank, entry)
            assert len(self.table.pending) == 0
            self.no_failure_is_hidden()
        assert not self.table.pending.has_waiting()
        assert all(entry.future and entry.future.done() for entry in self.entries)
        assert sorted(self.resolved) == [entry.step for entry in self.entries]

    def no_failure_is_hidden(self) -> None:
        """The last failure was told, or the next step will fail with it. An earlier one may have been replaced."""
        carried = self.table.pending.carried and self.table.pending.take_carried_failure()
        errors = [entry.error for entry in self.entries] + [carried]
        told = self.told | {error.step for error in errors if isinstance(error, StepFailed)}
        assert not self.failed or max(self.failed) in told


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=40)
