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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepcast import AsyncExecutor, Closed, Executor, ExecutorConfig, StepcastError, WorkerLost
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
        with pytest.raises(Closed, match=r"for good, after 2 restarts \(max_restarts=2\); .*was killed by SIGKILL"):
            executor.step("no more")
        assert executor.health().state == "failed"
    assert len(failures) == 3


def test_a_new_group_that_does_not_come_up_counts_as_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(
        "import os, pathlib\n"
        "from stepcast import Worker\n"
        "class Once(Worker):\n"
        "    def setup(self, rank):\n"
        "        if rank.epoch > 1: raise OSError('no second time')\n"
        "    def execute(self, step): return step\n"
    )
    with Executor(config(f"{script}:Once", max_restarts=2)) as executor:
        kill(executor)
        wait_for_failure(executor)
        with pytest.raises(Closed, match="no second time"):
            executor.step("never")


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


def test_failed_starts_in_a_row_are_counted_past_the_window(tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(
        "from stepcast import Worker\n"
        "class Once(Worker):\n"
        "    def setup(self, rank):\n"
        "        if rank.epoch > 1: raise OSError('no second time')\n"
        "    def execute(self, step): return step\n"
    )
    with Executor(config(f"{script}:Once", max_restarts=1, restart_window_s=0.001)) as executor:
        kill(executor)
        wait_for_failure(executor)
        with pytest.raises(Closed, match="no second time"):
            executor.step("never")
