"""A rank other than the output rank raises in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from stepcast import Closed, Executor, GroupState, StepFailed
from tests.faults import signs
from tests.faults.rig import TORCH, Stage
from tests.harness import process_has_ended, wait_until

LAST = 2
JudgeTime = Callable[[float], None]


def check_failed(error: BaseException | None, *, epoch_ended: bool) -> None:
    assert isinstance(error, StepFailed)
    assert (error.rank, error.failed_ranks, error.exception_type) == (LAST, (LAST,), "LookupError")
    assert error.epoch_ended is epoch_ended
    assert "failed on rank 2: LookupError: no luck in step on rank 2" in str(error)
    assert 'raise LookupError(f"no luck in {phase} on rank {rank}")' in error.traceback
    assert error.traceback in str(error)


def raised_at(stage: Stage) -> float:
    return signs.read(stage.directory, f"raise-{LAST}")[1]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_step_that_all_ranks_have_answered_fails_alone(stage: Stage, judge_time: JudgeTime, method: str) -> None:
    """The step's own future fails, at once; the one behind it in the pipeline and those after it have their results."""
    with Executor(stage.config(start_method=method)) as executor:
        pids = executor.worker_pids
        futures = [executor.submit(step, gather=True) for step in ("before", {"2": "raise"}, "behind")]
        error = futures[1].exception(10)
        judge_time(time.monotonic() - raised_at(stage))
        assert futures[0].result(10) == ["before"] * 3
        assert futures[2].result(10) == ["behind"] * 3
        assert executor.step("after") == "after"
        assert executor.state is GroupState.READY
        assert executor.worker_pids == pids

    check_failed(error, epoch_ended=False)


def test_a_failure_behind_the_output_ranks_answer_fails_the_next_step(stage: Stage) -> None:
    """The step's own result was given out already: the group is degraded, and the next step says why, once."""
    with Executor(stage.config(start_method="fork")) as executor:
        assert executor.step({"2": "raise"}) == 0
        wait_until(lambda: executor.state is GroupState.DEGRADED)
        with pytest.raises(StepFailed) as caught:
            executor.step("next")
        assert executor.step("after") == "after"
        wait_until(lambda: executor.state is GroupState.READY)

    check_failed(caught.value, epoch_ended=False)


def fail_in_lockstep(stage: Stage, executor: Executor, step: Any, judge_time: JudgeTime) -> None:
    pids = executor.worker_pids
    before = executor.submit("before")
    failing = executor.submit(step)
    behind = executor.submit("behind")

    error = failing.exception(10)
    judge_time(time.monotonic() - raised_at(stage))

    check_failed(error, epoch_ended=True)
    assert "rank 0 (step), rank 1 (step) did not answer the same step" in str(error)
    assert "the epoch has ended" in str(error)
    assert before.result(10) == "before"
    behind_error = behind.exception(10)
    assert isinstance(behind_error, StepFailed)
    assert behind_error.epoch_ended
    with pytest.raises(Closed, match="the epoch has ended"):
        executor.step("after")
    wait_until(lambda: all(map(process_has_ended, pids)))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_rank_that_raises_while_its_peers_are_stuck_ends_the_epoch(
    stage: Stage, judge_time: JudgeTime, method: str
) -> None:
    """The step's future says so; the step behind it, which the failed rank may have answered, is given no result."""
    with Executor(stage.config(start_method=method)) as executor:
        fail_in_lockstep(stage, executor, {"0": "block", "1": "block", "2": "raise"}, judge_time)


@pytest.mark.slow
def test_a_rank_that_raises_before_a_collective_ends_the_epoch(stage: Stage, judge_time: JudgeTime) -> None:
    """The peers sit in an all-reduce that only its own timeout would end; the driver does not wait for that."""
    pytest.importorskip("torch")
    with Executor(stage.config(worker=TORCH)) as executor:
        step = {"0": "collective", "1": "collective", "2": "collective"}
        assert executor.step(step, gather=True) == [3.0] * 3
        fail_in_lockstep(stage, executor, {**step, "2": "raise"}, judge_time)
