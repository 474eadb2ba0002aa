"""Ranks that end in other ways than by SIGKILL, and ranks that do not want to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from stepcast import Closed, Executor, GroupState, WorkerLost
from tests.faults import signs
from tests.faults.rig import METHODS, Stage
from tests.harness import process_has_ended

JudgeTime = Callable[[float], None]
METHOD = pytest.mark.parametrize("method", METHODS)


@METHOD
@pytest.mark.parametrize(
    ("action", "code", "told"),
    [
        ("exit", 3, "exited with code 3"),
        ("exit_0", 0, "exited with code 0"),
        ("os_exit", 7, "exited with code 7"),
        ("segfault", -signal.SIGSEGV, "was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_in_a_step_is_lost(
    stage: Stage, judge_time: JudgeTime, method: str, action: str, code: int, told: str
) -> None:
    """The error has the exit code or the signal's name, and the stack of a crash."""
    with Executor(stage.config(start_method=method)) as executor:
        pids = executor.worker_pids
        error = executor.submit({"0": "block", "1": action, "2": "block"}).exception(10)
        judge_time(time.monotonic() - signs.read(stage.directory, f"{action}-1")[1])

    assert isinstance(error, WorkerLost)
    assert (error.rank, error.pid, error.exit_code, error.phase) == (1, pids[1], code, "step")
    assert f"rank 1 (pid {pids[1]}) {told} while in phase step" in str(error)
    if action == "segfault" and method != "fork":  # a fork's stack stands on pytest's, and is longer than what is kept
        assert "Fatal Python error: Segmentation fault" in str(error)
        assert "in segfault" in str(error)
    assert all(map(process_has_ended, pids))


@METHOD
@pytest.mark.parametrize("action", ["ignore_sigterm", "hold_gil"])
def test_ranks_that_do_not_want_to_end_are_killed_within_the_limits(
    stage: Stage, caplog: pytest.LogCaptureFixture, method: str, action: str
) -> None:
    """STOP, SIGTERM and SIGKILL each have their limit; the log says who needed it, and the step under way is closed."""
    executor = Executor(stage.config(start_method=method, stop_timeout_s=0.5, terminate_timeout_s=0.5))
    pids = executor.worker_pids
    future = executor.submit([action])
    stage.wait_for(f"{action}-0", f"{action}-1", f"{action}-2")

    began = time.monotonic()
    executor.shutdown()
    took_s = time.monotonic() - began

    assert 1.0 <= took_s < 3.0
    assert isinstance(future.exception(0), Closed)
    assert executor.state is GroupState.STOPPED
    for rank in range(3):
        assert f"rank {rank} has not stopped in time; sending SIGTERM" in caplog.text
    assert all(map(process_has_ended, pids))


@METHOD
def test_workers_have_the_grace_to_tear_down(stage: Stage, method: str) -> None:
    """An orderly shutdown waits for teardown; with spawn for what runs at the interpreter's exit as well."""
    with Executor(stage.config(start_method=method)) as executor:
        last = executor.submit("last")

    assert last.result(0) == "last"
    for rank in range(3):
        assert stage.there(f"stopping-{rank}")
        # multiprocessing ends its forks without running what was registered with atexit.
        assert stage.there(f"atexit-{rank}") == (method == "spawn")


@METHOD
def test_a_thread_that_a_worker_leaves_behind_delays_its_end_no_longer_than_the_limits(
    stage: Stage, method: str
) -> None:
    """An interpreter waits for its threads at exit, for ever."""
    executor = Executor(stage.config(start_method=method, stop_timeout_s=0.5, terminate_timeout_s=0.5))
    pids = executor.worker_pids
    executor.step(["leave_a_thread"], gather=True)

    began = time.monotonic()
    executor.shutdown()

    assert time.monotonic() - began < 3.0
    assert all(stage.there(f"stopping-{rank}") for rank in range(3))
    assert all(map(process_has_ended, pids))


def test_a_worker_in_a_long_step_exits_in_good_order_on_sigterm(stage: Stage) -> None:
    """SIGTERM unwinds the step, so that the interpreter's exit handlers run before SIGKILL comes."""
    executor = Executor(stage.config(stop_timeout_s=0.3, terminate_timeout_s=10))
    future = executor.submit(["block"])
    stage.wait_for("block-0", "block-1", "block-2")

    executor.shutdown()

    assert isinstance(future.exception(0), Closed)
    assert all(stage.there(f"atexit-{rank}") for rank in range(3))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_ends_in_its_teardown_is_told_whoever_ends_last(stage: Stage, victim: int) -> None:
    """Its peers end at the same moment; the monitor must not take the last end for the end of its work."""
    for _ in range(10):
        config = stage.config(at="stopping", do="os_exit", ranks=[victim], others="go on", start_method="fork")
        executor = Executor(config)
        with pytest.raises(WorkerLost) as caught:
            executor.shutdown()
        assert (caught.value.rank, caught.value.exit_code, caught.value.phase) == (victim, 7, "stopping")
