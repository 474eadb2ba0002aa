"""SIGKILL of a rank, in each phase of its life: one clear error, at once, and nothing left."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from stepcast import Closed, Executor, GroupState, StartupError, StepcastError, WorkerLost
from stepcast.runtime.launch import mp
from tests.faults import signs
from tests.faults.rig import METHODS, TORCH, Stage
from tests.harness import process_has_ended, wait_until

FIRST, LAST = 0, 2
BOTH = pytest.mark.parametrize("victim", [FIRST, LAST])
JudgeTime = Callable[[float], None]

#: What a rank may have told last when it is killed in a phase: the message that tells the phase may die with it.
TOLD = {
    "spawning": {"spawning"},
    "importing": {"spawning", "starting", "importing"},
    "loading": {"importing", "loading"},
}


@BOTH
@pytest.mark.parametrize(
    ("method", "phase"),
    [(method, phase) for method in METHODS for phase in TOLD if (method, phase) != ("forkserver", "spawning")],
)
def test_a_rank_killed_while_it_starts_fails_the_start(
    stage: Stage, judge_time: JudgeTime, monkeypatch: pytest.MonkeyPatch, method: str, phase: str, victim: int
) -> None:
    """StartupError names the rank, its pid, the signal and the phase; its peers, still starting, are gone as well."""
    if (method, phase) == ("fork", "spawning"):
        monkeypatch.setattr(mp, "run_worker", lambda *_: signs.reach("spawning"))
    failures: list[StepcastError] = []

    with pytest.raises(StartupError) as caught:
        Executor(stage.config(at=phase, do="die", ranks=[victim], start_method=method), on_failure=failures.append)

    judge_time(time.monotonic() - stage.killed_at())
    error = caught.value
    pid, _ = signs.read(stage.directory, signs.KILLED)
    assert error.ranks == (victim,)
    assert error.exit_codes == {victim: -signal.SIGKILL}
    assert error.phases[victim] in TOLD[phase]
    assert f"rank {victim} (pid {pid}) was killed by SIGKILL while {error.phases[victim]}" in str(error)
    assert failures == [error]
    for rank in range(3):
        assert process_has_ended(signs.read(stage.directory, f"{phase}-{rank}")[0])


def check_lost(error: BaseException | None, victim: int, pid: int, phase: str) -> None:
    assert isinstance(error, WorkerLost)
    assert (error.rank, error.pid, error.exit_code, error.phase) == (victim, pid, -signal.SIGKILL, phase)
    assert f"rank {victim} (pid {pid}) was killed by SIGKILL while in phase {phase}" in str(error)


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_while_idle_ends_the_group_unasked(
    stage: Stage, judge_time: JudgeTime, method: str, victim: int
) -> None:
    """`on_failure` is called though no step is under way; the next step is refused, with the first error as cause."""
    failed = threading.Event()
    failures: list[StepcastError] = []
    config = stage.config(start_method=method)
    with Executor(config, on_failure=lambda error: (failures.append(error), failed.set())) as executor:
        assert executor.step("before", gather=True) == ["before"] * 3
        pids = executor.worker_pids
        killed_at = stage.kill(f"loading-{victim}")
        assert failed.wait(10)
        judge_time(time.monotonic() - killed_at)
        with pytest.raises(Closed) as refused:
            executor.step("after")
        health = executor.health()

    [error] = failures
    check_lost(error, victim, pids[victim], "idle")
    assert refused.value.__cause__ is error
    assert (health.state, health.ok) == ("failed", False)
    assert all(map(process_has_ended, pids))


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_in_a_step_fails_all_steps_under_way(
    stage: Stage, judge_time: JudgeTime, method: str, victim: int
) -> None:
    """Each future of the pipeline gets the same error, and none a result."""
    with Executor(stage.config(start_method=method)) as executor:
        pids = executor.worker_pids
        futures = [executor.submit(["block"]), executor.submit("next"), executor.submit("last")]
        stage.wait_for("block-0", "block-1", "block-2")
        killed_at = stage.kill(f"block-{victim}")
        errors = [future.exception(10) for future in futures]
        judge_time(time.monotonic() - killed_at)

    check_lost(errors[0], victim, pids[victim], "step")
    assert all(error is errors[0] for error in errors)
    assert all(map(process_has_ended, pids))


def test_a_rank_killed_in_a_step_wakes_the_thread_that_waits_for_its_result(
    stage: Stage, judge_time: JudgeTime
) -> None:
    """A synchronous `step` reads the replies in its own thread; the death interrupts it there."""
    with Executor(stage.config(start_method="fork")) as executor:
        caught: list[BaseException] = []
        ended_at: list[float] = []

        def step() -> None:
            try:
                executor.step(["block"])
            except WorkerLost as error:
                ended_at.append(time.monotonic())
                caught.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        stage.wait_for("block-0", "block-1", "block-2")
        killed_at = stage.kill("block-1")
        thread.join(10)
        judge_time(ended_at[0] - killed_at)

    check_lost(caught[0], 1, signs.read(stage.directory, "block-1")[0], "step")


def test_all_ranks_killed_at_once_are_one_error(stage: Stage, judge_time: JudgeTime) -> None:
    """Whichever is seen first is named; the others do not come after it."""
    failures: list[StepcastError] = []
    with Executor(stage.config(start_method="fork"), on_failure=failures.append) as executor:
        future = executor.submit(["block"])
        stage.wait_for("block-0", "block-1", "block-2")
        killed_at, *_ = [stage.kill(f"block-{rank}") for rank in range(3)]
        error = future.exception(10)
        judge_time(time.monotonic() - killed_at)

    assert isinstance(error, WorkerLost)
    check_lost(error, error.rank, signs.read(stage.directory, f"block-{error.rank}")[0], "step")
    assert failures == [error]


def test_a_rank_killed_behind_a_full_window_frees_the_thread_that_waits_for_room(
    stage: Stage, judge_time: JudgeTime
) -> None:
    """A submission that waits for room that never comes is refused with the death as its cause."""
    with Executor(stage.config(start_method="fork", max_in_flight=2)) as executor:
        futures = [executor.submit(["block"]), executor.submit("next")]
        stage.wait_for("block-0", "block-1", "block-2")
        refused: list[Closed] = []
        refused_at: list[float] = []

        def submit() -> None:
            try:
                executor.submit("no room")
            except Closed as error:
                refused_at.append(time.monotonic())
                refused.append(error)

        thread = threading.Thread(target=submit)
        thread.start()
        wait_until(executor._group._group.pump._reading.locked, message="the thread that waits for room")
        killed_at = stage.kill("block-2")
        thread.join(10)
        judge_time(refused_at[0] - killed_at)
        assert refused[0].__cause__ is futures[1].exception(10)

    check_lost(futures[0].exception(0), LAST, signs.read(stage.directory, "block-2")[0], "step")


def kill_the_fork_server() -> None:
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process_has_ended(pid))


def test_the_death_of_the_fork_server_is_not_that_of_its_ranks(stage: Stage, judge_time: JudgeTime) -> None:
    """Its ranks work on, and end as others do, but for their exit codes, which only the server could have told."""
    with Executor(stage.config(start_method="forkserver")) as executor:
        pids = executor.worker_pids
        kill_the_fork_server()
        for number in range(3):
            assert executor.step(number, gather=True) == [number] * 3
        future = executor.submit(["block"])
        stage.wait_for("block-0", "block-1", "block-2")
        killed_at = stage.kill("block-1")
        error = future.exception(10)
        judge_time(time.monotonic() - killed_at)

    assert isinstance(error, WorkerLost)
    assert (error.rank, error.pid, error.exit_code, error.phase) == (1, pids[1], None, "step")
    wait_until(lambda: all(map(process_has_ended, pids)))


def test_ranks_whose_fork_server_is_dead_shut_down_in_good_order(stage: Stage) -> None:
    """Each has said that it is done, and is waited for."""
    executor = Executor(stage.config(start_method="forkserver"))
    pids = executor.worker_pids
    kill_the_fork_server()
    executor.shutdown()
    assert all(stage.there(f"stopping-{rank}") for rank in range(3))
    assert all(map(process_has_ended, pids))


def test_the_death_of_one_group_is_no_affair_of_another(stage: Stage) -> None:
    """Also where the other's workers are forks, which have inherited all that the first had open."""
    with (
        Executor(stage.config(world_size=2, start_method="spawn")) as first,
        Executor(stage.config(world_size=2, start_method="fork")) as second,
        Executor(stage.config(world_size=2, start_method="fork")) as third,
    ):
        for lost in (first, second):
            future = lost.submit(["block"])
            stage.wait_for("block-0", "block-1")
            stage.kill("block-1")
            assert isinstance(future.exception(10), WorkerLost)
            wait_until(lambda lost=lost: all(map(process_has_ended, lost.worker_pids)))
            stage.forget()
        assert [third.step(number, gather=True) for number in range(3)] == [[number] * 2 for number in range(3)]
        assert third.state is GroupState.READY


@pytest.mark.slow
@pytest.mark.parametrize(("method", "victim"), [("spawn", FIRST), ("spawn", LAST), ("fork", LAST)])
def test_a_rank_killed_in_a_collective_is_named_and_not_its_peers(
    stage: Stage, judge_time: JudgeTime, method: str, victim: int
) -> None:
    """Peers whose collective breaks raise at the same time; the error is the death that made them."""
    pytest.importorskip("torch")
    with Executor(stage.config(worker=TORCH, start_method=method)) as executor:
        pids = executor.worker_pids
        future = executor.submit({"0": "collective", "1": "block", "2": "collective"})
        stage.wait_for("block-1", "collective-0", "collective-2")
        killed_at = stage.kill(f"collective-{victim}")
        error = future.exception(10)
        judge_time(time.monotonic() - killed_at)

    check_lost(error, victim, pids[victim], "step")
    assert all(map(process_has_ended, pids))


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_while_the_group_stops_fails_the_shutdown(
    stage: Stage, judge_time: JudgeTime, method: str, victim: int
) -> None:
    """`shutdown` raises WorkerLost instead of waiting for a teardown that never ends."""
    executor = Executor(stage.config(at="stopping", start_method=method))
    pids = executor.worker_pids
    killed_at: list[float] = []

    def kill() -> None:
        stage.wait_for("stopping-0", "stopping-1", "stopping-2")
        killed_at.append(stage.kill(f"stopping-{victim}"))

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerLost) as caught:
        executor.shutdown()
    judge_time(time.monotonic() - killed_at[0])
    killer.join()

    check_lost(caught.value, victim, pids[victim], "stopping")
    assert all(map(process_has_ended, pids))


@pytest.mark.parametrize("method", METHODS)
def test_a_dead_rank_is_noticed_though_a_child_of_its_own_lives_on(
    stage: Stage, judge_time: JudgeTime, method: str
) -> None:
    """A data loader that a rank has forked inherits all of its descriptors; that must not hide the rank's death."""
    with Executor(stage.config(start_method=method)) as executor:
        pids = executor.worker_pids
        [child] = [each for each in executor.call("fork_a_child", timeout_s=10) if each]
        try:
            future = executor.submit(["block"])
            stage.wait_for("block-0", "block-1", "block-2")
            killed_at = stage.kill("block-1")
            error = future.exception(10)
            judge_time(time.monotonic() - killed_at)
        finally:
            stage.kill_pid(child)

    check_lost(error, 1, pids[1], "step")
