"""Ranks that are stopped, or stuck: busy is not dead, and a limit is a limit."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time

import pytest

from stepcast import Executor, StepTimeout
from tests.faults.rig import METHODS, Stage
from tests.harness import process_has_ended, wait_until

LIMIT_S = 1.5
METHOD = pytest.mark.parametrize("method", METHODS)


@METHOD
def test_a_stopped_rank_is_waited_for(stage: Stage, method: str) -> None:
    """Many heartbeats without an answer are no death; when the rank goes on, so does the step."""
    config = stage.config(start_method=method, heartbeat_interval_s=0.1)
    with Executor(config) as executor:
        pids = executor.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        try:
            future = executor.submit("a step", gather=True)
            with pytest.raises(concurrent.futures.TimeoutError):
                future.result(1.0)
            health = executor.health()
            assert not health.ok
            assert [rank.verdict for rank in health.ranks] == ["idle", "stopped", "idle"]
            assert (health.ranks[1].phase, health.ranks[1].queue_depth) == ("step", 1)
            assert health.ranks[1].last_heard_s > 0.9
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert future.result(10) == ["a step"] * 3
        wait_until(lambda: executor.health().ok)
        assert executor.step("the next") == "the next"
        assert executor.worker_pids == pids


def stacks_in(caplog: pytest.LogCaptureFixture) -> str:
    records = [record for record in caplog.records if record.name == "stepcast.worker"]
    return "\n".join(record.getMessage() for record in records if record.getMessage().startswith("[rank 1]"))


def time_out(stage: Stage, executor: Executor, step: object) -> StepTimeout:
    pids = executor.worker_pids
    began = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        executor.step(step, gather=True)
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + 1.0
    executor.shutdown()
    assert all(map(process_has_ended, pids))
    error = caught.value
    assert (error.knob, error.limit_s) == ("step_timeout_s", LIMIT_S)
    assert LIMIT_S <= error.elapsed_s < LIMIT_S + 1.0
    assert f"no answer from rank 1 (step) after {error.elapsed_s:.3g} s; the limit is step_timeout_s=1.5 s" in str(
        error
    )
    assert error.phases == {0: "idle", 1: "step", 2: "idle"}
    return error


@METHOD
@pytest.mark.parametrize("action", ["block", "hold_gil"])
def test_a_rank_past_the_step_limit_shows_its_stack_before_it_is_killed(
    stage: Stage, caplog: pytest.LogCaptureFixture, method: str, action: str
) -> None:
    """The error names the limit and every rank's phase; the log has the stuck rank's stack, even from within C code."""
    with Executor(stage.config(start_method=method, step_timeout_s=LIMIT_S)) as executor:
        time_out(stage, executor, {"1": action})

    stacks = stacks_in(caplog)
    assert f"in {action}" in stacks
    assert "signs.py" in stacks
    assert "in execute" in stacks


def test_a_stopped_rank_past_the_step_limit_is_killed(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """It can't show a stack, and the report says so; SIGKILL ends it all the same."""
    with Executor(stage.config(step_timeout_s=LIMIT_S, heartbeat_interval_s=0.2)) as executor:
        pid = executor.worker_pids[1]
        os.kill(pid, signal.SIGSTOP)
        error = time_out(stage, executor, "a step")

    assert f"rank 1 is stopped (stopped by a signal (SIGSTOP; state T): kill -CONT {pid} lets it go on)" in str(error)
    assert f"rank 1 (pid {pid}) is stopped (state T), and can give no stack" in caplog.text
