"""A group that has failed is restarted in place: the executor goes on, with new processes and a new epoch."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepcast import (
    AsyncExecutor,
    Closed,
    Executor,
    ExecutorConfig,
    StartupError,
    StepcastError,
    StepFailed,
    StepTimeout,
    WorkerLost,
)
from tests.faults.rig import SETTINGS
from tests.harness import process_has_ended, wait_until

HERE = Path(__file__).parent
ECHO = "stepcast.workers.echo:Echo"
LIMIT_S = 30.0


def config(worker: str = ECHO, **settings: Any) -> ExecutorConfig:
    settings = {**SETTINGS, "world_size": 2, "restart": "on_failure", "restart_backoff_s": 0.01, **settings}
    return ExecutorConfig(worker=worker, **settings)


def kill(executor: Executor | AsyncExecutor, rank: int = 1) -> tuple[int, ...]:
    """Kill a rank, and return the pids of all."""
    pids = executor.worker_pids
    os.kill(pids[rank], signal.SIGKILL)
    return pids


def only_once(directory: Path) -> str:
    """A worker whose group comes up in its first epoch only."""
    script = directory / "once.py"
    script.write_text(
        "from stepcast import Worker\n"
        "class Once(Worker):\n"
        "    def setup(self, rank):\n"
        "        if rank.epoch > 1: raise OSError('no second time')\n"
        "    def execute(self, step): return step\n"
    )
    return f"{script}:Once"


def wait_for_failure(executor: Executor) -> None:
    wait_until(lambda: executor.health().failure is not None, LIMIT_S)


def wait_for_epoch(executor: Executor | AsyncExecutor, epoch: int) -> None:
    wait_until(lambda: executor.health().epoch == epoch and executor.health().ok, LIMIT_S)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_executor_goes_on_after_a_rank_was_killed(method: str) -> None:
    failures: list[StepcastError] = []
    with Executor(config(start_method=method), on_failure=failures.append) as executor:
        assert executor.step("before", gather=True) == ["before"] * 2
        last = executor.submit("last")
        assert last.result(LIMIT_S) == "last"
        old = kill(executor)
        wait_for_epoch(executor, 2)
        assert executor.step("after", gather=True) == ["after"] * 2
        assert executor.submit("next").step > last.step + 1
        assert set(executor.worker_pids).isdisjoint(old)
        assert all(map(process_has_ended, old))
        health = executor.health()
        assert (health.restarts, health.state, health.failure) == (1, "ready", None)
    assert [type(error) for error in failures] == [WorkerLost]


def sleep_until_lost(executor: Executor) -> None:
    with pytest.raises(WorkerLost):
        executor.call("sleep", LIMIT_S)


def test_steps_under_way_fail_as_retryable_and_later_ones_wait_for_the_new_group() -> None:
    with Executor(config()) as executor:
        futures = [executor.submit(step) for step in ([0.0], "behind", "behind")]
        sleeping = threading.Thread(target=sleep_until_lost, args=(executor,))
        sleeping.start()
        assert [future.result(LIMIT_S) for future in futures] == [[0.0], "behind", "behind"]
        wait_until(lambda: {rank.phase for rank in executor.health().ranks} == {"call"})
        behind = [executor.submit(number) for number in range(3)]
        kill(executor, 0)
        errors = [future.exception(LIMIT_S) for future in behind]
        assert [type(error) for error in errors] == [WorkerLost] * 3
        assert all(error.retryable for error in errors if isinstance(error, WorkerLost))
        assert executor.step("waited") == "waited"
        assert executor.health().epoch == 2
        sleeping.join(LIMIT_S)


def test_the_setup_and_the_rendezvous_are_made_again() -> None:
    pytest.importorskip("torch")
    worker = f"{HERE}/collective_victims.py:Collectives"
    with Executor(config(worker, collective_timeout_s=60.0)) as executor:
        assert executor.step(["all_reduce"], gather=True) == [[3.0]] * 2
        # Rank 0 sits in a collective that its peer never enters.
        waiting = executor.submit({"0": ["all_reduce"], "1": [f"gate {HERE}/never"]})
        wait_until(lambda: [rank.phase for rank in executor.health().ranks] != ["idle", "idle"])
        kill(executor)
        assert isinstance(waiting.exception(LIMIT_S), WorkerLost)
        assert executor.step(["all_reduce"], gather=True) == [[3.0]] * 2


def test_past_the_number_of_restarts_the_executor_is_done_for() -> None:
    failures: list[StepcastError] = []
    with Executor(config(max_restarts=2), on_failure=failures.append) as executor:
        for epoch in (2, 3):
            kill(executor)
            wait_for_epoch(executor, epoch)
        kill(executor)
        wait_for_failure(executor)
        with pytest.raises(Closed, match=r"for good, after 2 restarts \(max_restarts=2\)\. .*was killed by SIGKILL"):
            executor.step("no more")
        assert executor.health().state == "failed"
    assert len(failures) == 3


def test_a_new_group_that_does_not_come_up_counts_as_a_failure(tmp_path: Path) -> None:
    """The error, and health, tell of the start that failed last; nothing is retryable any more."""
    failures: list[StepcastError] = []
    with Executor(config(only_once(tmp_path), max_restarts=2), on_failure=failures.append) as executor:
        kill(executor)
        wait_for_failure(executor)
        with pytest.raises(Closed, match=r"for good, after 0 restarts.*no second time") as caught:
            executor.step("never")
        assert not caught.value.retryable
        assert "no second time" in str(executor.health().failure)
    assert [type(error) for error in failures] == [WorkerLost, StartupError, StartupError]
    assert [error.retryable for error in failures] == [True, True, False]
    lost, first, second = map(str, failures)
    assert lost.endswith("the group is being restarted")
    assert first.endswith("The group is being restarted")
    assert second.endswith("The group has ended; start a new executor")


def test_a_submission_waits_for_no_longer_than_its_limit() -> None:
    with Executor(config(restart_backoff_s=600.0, restart_window_s=3600.0, restart_wait_s=0.1)) as executor:
        kill(executor)
        wait_for_failure(executor)
        with pytest.raises(Closed, match=r"not ready within restart_wait_s=0\.1 s: try again") as caught:
            executor.step("too early")
        assert caught.value.retryable
        assert executor.try_submit("too early") is None
        health = executor.health()
        assert (health.state, health.ok, executor.state.value) == ("starting", False, "starting")
    # The shutdown has ended the wait for the restart.
    assert executor.state.value == "failed"


def test_a_shutdown_ends_a_group_that_is_starting_again(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    reached = tmp_path / "reached"
    script.write_text(
        "import pathlib, time\n"
        "from stepcast import Worker\n"
        "class Slow(Worker):\n"
        "    def setup(self, rank):\n"
        "        if rank.epoch > 1:\n"
        f"            pathlib.Path({str(reached)!r}).touch()\n"
        "            time.sleep(600)\n"
        "    def execute(self, step): return step\n"
    )
    before = psutil.Process().children()  # multiprocessing's own helpers
    with Executor(config(f"{script}:Slow")) as executor:
        kill(executor)
        wait_until(reached.exists, LIMIT_S)
    assert psutil.Process().children() == before


def test_a_dropped_executor_is_not_restarted() -> None:
    executor = Executor(config())
    old = kill(executor)
    wait_for_epoch(executor, 2)
    pids = executor.worker_pids
    del executor
    gc.collect()
    wait_until(lambda: all(map(process_has_ended, (*old, *pids))), LIMIT_S)


def test_an_asynchronous_program_goes_on_too() -> None:
    async def main() -> None:
        loop, failed = asyncio.get_running_loop(), asyncio.Event()
        executor = AsyncExecutor(config(), on_failure=lambda _: loop.call_soon_threadsafe(failed.set))
        async with executor:
            assert await executor.step("before") == "before"
            kill(executor)
            await failed.wait()
            assert await executor.step("after") == "after"
            assert executor.health().epoch == 2

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_restarts_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Descriptors and threads are as many after ten restarts as after the first."""
    caplog.set_level(logging.CRITICAL)
    me = psutil.Process()
    with Executor(config(world_size=1, max_restarts=20, restart_backoff_s=1e-6)) as executor:
        counts = []
        for epoch in range(2, 13):
            kill(executor, 0)
            wait_for_epoch(executor, epoch)
            assert executor.step(epoch) == epoch
            counts.append((me.num_fds(), threading.active_count(), len(me.children())))
    assert counts[0] == counts[-1], counts


def test_a_program_that_forgets_the_shutdown_ends_all_the_same() -> None:
    program = """
import os, signal, time
from stepcast import Executor, ExecutorConfig
config = ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=2, restart="on_failure", restart_backoff_s=0.01)
executor = Executor(config)
os.kill(executor.worker_pids[0], signal.SIGKILL)
while not executor.health().restarts: time.sleep(0.01)
print(executor.step("after"), *executor.worker_pids)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    answer, *pids = run.stdout.split()
    assert answer == "after"
    assert all(process_has_ended(int(pid)) for pid in pids)


def test_a_submission_that_waits_for_room_waits_for_the_new_group() -> None:
    with Executor(config(max_in_flight=1)) as executor:
        sleeping = threading.Thread(target=sleep_until_lost, args=(executor,))
        sleeping.start()
        wait_until(lambda: {rank.phase for rank in executor.health().ranks} == {"call"})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(executor.step, "waited")
            wait_until(lambda: executor.health().in_flight == 1)
            kill(executor)
            assert waiting.result(LIMIT_S) == "waited"
        sleeping.join(LIMIT_S)
        assert executor.health().epoch == 2


def test_a_submission_waits_for_no_longer_than_its_own_limit() -> None:
    with Executor(config(restart_backoff_s=600.0, restart_window_s=3600.0)) as executor:
        kill(executor)
        wait_for_failure(executor)
        for submit in (executor.step, executor.submit):
            with pytest.raises(StepTimeout, match=r"was not ready within timeout_s=0\.05 s") as caught:
                submit("too early", timeout_s=0.05)
            assert caught.value.retryable
            assert (caught.value.knob, caught.value.limit_s) == ("timeout_s", 0.05)
            assert isinstance(caught.value.__cause__, WorkerLost)
    with pytest.raises(Closed, match="it is stopped") as closed:
        executor.step("too late")
    assert isinstance(closed.value.__cause__, WorkerLost)


def test_a_callback_may_run_a_step_on_the_new_group() -> None:
    answers: list[Any] = []
    with Executor(config(), on_failure=lambda _: answers.append(executor.step("told"))) as executor:
        for epoch in (2, 3):
            kill(executor)
            wait_for_epoch(executor, epoch)
            wait_until(lambda epoch=epoch: len(answers) == epoch - 1)  # type: ignore[misc]
    assert answers == ["told", "told"]


def test_callbacks_hold_up_no_restart_and_are_called_in_order() -> None:
    told: list[StepcastError] = []
    go_on = threading.Event()

    def block(error: StepcastError) -> None:
        go_on.wait(LIMIT_S)
        told.append(error)
        raise RuntimeError("is logged")

    with Executor(config(), on_failure=block) as executor:
        for epoch in (2, 3):
            pids = kill(executor)
            wait_for_epoch(executor, epoch)
            assert all(map(process_has_ended, pids))
        assert not told
        go_on.set()
    assert [type(error) for error in told] == [WorkerLost] * 2
    assert told[0] is not told[1]


def test_a_callback_may_shut_the_executor_down() -> None:
    ended = threading.Event()

    def end(_error: StepcastError) -> None:
        executor.shutdown()
        ended.set()

    executor = Executor(config(), on_failure=end)
    kill(executor)
    assert ended.wait(LIMIT_S)
    assert executor.state.value in ("failed", "stopped")


def test_nothing_is_undone_on_a_group_that_was_set_up_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "undo.py"
    script.write_text(
        "from stepcast import Worker\n"
        "class Undo(Worker):\n"
        "    def setup(self, rank): self.rank, self.undone = rank.rank, 0\n"
        "    def fail(self):\n"
        "        if self.rank: raise ValueError('no')\n"
        "    def undo(self): self.undone += 1\n"
        "    def count(self): return self.undone\n"
    )
    with Executor(config(f"{script}:Undo")) as executor:
        with pytest.raises(StepFailed, match="no"):
            executor.call("fail", undo="undo")
        assert executor.call("count") == [1, 0]
        group: Any = executor._group
        undo = group.undo

        def undo_late(step: int, request: Any) -> Any:
            kill(executor)
            wait_for_epoch(executor, 2)
            return undo(step, request)

        monkeypatch.setattr(group, "undo", undo_late)
        with pytest.raises(StepFailed, match="Undo was not called: the group was restarted since"):
            executor.call("fail", undo="undo")
        assert executor.call("count") == [0, 0]


def test_awaits_under_way_fail_as_retryable_and_later_ones_go_on() -> None:
    async def until(condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_until, condition)

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:
            sleeping = asyncio.ensure_future(executor.call("sleep", LIMIT_S))
            await until(lambda: {rank.phase for rank in executor.health().ranks} == {"call"})
            behind = [asyncio.ensure_future(executor.step(number)) for number in range(12)]  # more than the window
            await until(lambda: executor.health().in_flight == 8)
            kill(executor)
            errors = await asyncio.gather(sleeping, *behind[:7], return_exceptions=True)
            assert [type(error) for error in errors] == [WorkerLost] * 8
            assert all(error.retryable for error in errors if isinstance(error, WorkerLost))
            assert await asyncio.gather(*behind[7:]) == list(range(7, 12))
            assert await executor.step("later") == "later"
            assert executor.health().epoch == 2

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("kind", [StepTimeout, StepFailed])
def test_a_step_that_ends_the_group_has_it_restarted(kind: type[StepcastError], tmp_path: Path) -> None:
    """Past its limit, or where one rank raises and its peer never answers."""
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time\n"
        "from stepcast import Worker\n"
        "class Stuck(Worker):\n"
        "    def setup(self, rank): self.rank = rank.rank\n"
        "    def execute(self, step):\n"
        "        if step == 'raise' and self.rank: raise ValueError('no')\n"
        "        if step in ('raise', 'hang'): time.sleep(600)\n"
        "        return step\n"
    )
    limits = {"step_timeout_s": 0.5} if kind is StepTimeout else {"failure_grace_s": 0.2}
    with Executor(config(f"{script}:Stuck", **limits)) as executor:
        with pytest.raises(kind, match=r"[Tt]he group is being restarted") as caught:
            executor.step("hang" if kind is StepTimeout else "raise")
        assert caught.value.retryable
        assert executor.step("after") == "after"
        assert executor.health().restarts == 1


def test_ctrl_c_ends_the_wait_for_a_restart() -> None:
    """At once, and the shutdown after it leaves nothing."""
    program = """
import os, signal, threading, time
from stepcast import Executor, ExecutorConfig
settings = {"world_size": 2, "restart": "on_failure", "restart_backoff_s": 600.0}
config = ExecutorConfig(worker="stepcast.workers.echo:Echo", **settings)
with Executor(config) as executor:
    pids = executor.worker_pids
    os.kill(pids[0], signal.SIGKILL)
    while executor.state.value != "starting": time.sleep(0.01)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        executor.step("waits")
    except KeyboardInterrupt:
        print("interrupted", *pids, flush=True)
print(threading.active_count(), flush=True)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    line, threads = run.stdout.splitlines()
    word, *pids = line.split()
    assert (word, threads) == ("interrupted", "1")
    assert all(process_has_ended(int(pid)) for pid in pids)
