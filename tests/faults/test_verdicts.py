"""What `health` says of ranks that are stopped, silent, busy or fine, and what ends a group for it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from stepcast import Executor, StepcastError, WorkerLost
from tests.faults import signs
from tests.faults.rig import Embedder, Stage
from tests.harness import process_has_ended, wait_until

INTERVAL_S = 0.1


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, and let them go on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def verdicts(executor: Executor) -> list[str]:
    return [rank.verdict for rank in executor.health().ranks]


def wait_for_verdicts(executor: Executor, *expected: str) -> None:
    wait_until(lambda: verdicts(executor) == list(expected), message=lambda: f"{expected}, and not {executor.health()}")


@pytest.fixture
def let_go(stage: Stage) -> Iterator[Callable[[], None]]:
    """Holds the locks on which ranks `spin` and `doze`, until it is called."""
    path = stage.directory / signs.LOCKS
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    memory = ctypes.c_char.from_buffer(shared)
    address = ctypes.addressof(memory)
    lock, semaphore = ctypes.c_void_p(address), ctypes.c_void_p(address + signs.SEMAPHORE_AT)
    libc = ctypes.CDLL(None)
    libc.pthread_spin_init(lock, 1)
    libc.pthread_spin_lock(lock)
    libc.sem_init(semaphore, 1, 0)

    def let_go() -> None:
        libc.pthread_spin_unlock(lock)
        libc.sem_post(semaphore)

    yield let_go
    del memory
    shared.close()


@pytest.mark.parametrize("ranks", [[1], [0, 2]])
def test_a_stopped_idle_rank_turns_the_group_red_until_it_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture, ranks: list[int]
) -> None:
    """The kernel says that it is stopped; it is logged once, and the group lives on."""
    with Executor(stage.config(heartbeat_interval_s=INTERVAL_S)) as executor:
        pids = executor.worker_pids
        wait_for_verdicts(executor, "idle", "idle", "idle")
        with stopped(*(pids[rank] for rank in ranks)):
            wait_for_verdicts(executor, *("stopped" if rank in ranks else "idle" for rank in range(3)))
            health = executor.health()
            assert (health.state, health.ok) == ("ready", False)
            for rank in ranks:
                expected = f"stopped by a signal (SIGSTOP; state T): kill -CONT {pids[rank]} lets it go on"
                assert health.ranks[rank].detail == expected
        wait_for_verdicts(executor, "idle", "idle", "idle")
        assert executor.health().ok
        assert executor.step("on", gather=True) == ["on"] * 3

    messages = [record.getMessage() for record in caplog.records if "is stopped in phase idle" in record.getMessage()]
    assert len(messages) == len(ranks)


def test_a_stopped_rank_is_found_though_steps_are_published_all_the_time(stage: Stage) -> None:
    """No pause in the step stream is needed for a heartbeat."""
    with Executor(stage.config(heartbeat_interval_s=INTERVAL_S, max_in_flight=2000)) as executor:
        futures = []
        with stopped(executor.worker_pids[1]):

            def publish_and_look() -> bool:
                futures.append(executor.submit("a step", gather=True))
                return verdicts(executor)[1] == "stopped"

            wait_until(publish_and_look)
        assert all(future.result(10) == ["a step"] * 3 for future in futures)
        wait_until(lambda: executor.health().ok)


def test_a_rank_that_computes_in_native_code_and_holds_the_gil_is_at_work(
    stage: Stage, let_go: Callable[[], None]
) -> None:
    """It can't answer, and makes progress: health stays green for as long as the step may take."""
    with Executor(stage.config(heartbeat_interval_s=INTERVAL_S)) as executor:
        future = executor.submit({"1": "spin"}, gather=True)

        def is_found_out() -> bool:
            health = executor.health()
            assert health.ok, health
            assert health.ranks[1].verdict in ("busy", "slow")
            return "runs native code that holds the GIL" in health.ranks[1].detail

        try:
            wait_until(is_found_out)
        finally:
            let_go()
        assert future.result(10) == [0, "spun", 2]


def test_a_rank_that_waits_in_native_code_and_holds_the_gil_is_unresponsive(
    stage: Stage, let_go: Callable[[], None]
) -> None:
    """Neither an answer nor progress: that can't be told from a deadlock, but from a stopped process."""
    # Processor time is told in ticks of 10 ms: over a short interval one or two of them would look like progress.
    with Executor(stage.config(heartbeat_interval_s=3 * INTERVAL_S)) as executor:
        future = executor.submit({"1": "doze"}, gather=True)
        try:
            wait_for_verdicts(executor, "idle", "unresponsive", "idle")
            health = executor.health()
            assert not health.ok
            assert "waits in the kernel (state S, 0.0" in health.ranks[1].detail
        finally:
            let_go()
        assert future.result(10) == [0, "dozed", 2]
        wait_until(lambda: executor.health().ok)


def test_a_long_step_is_healthy(stage: Stage) -> None:
    """Heartbeats go out, and are answered, while it runs; where its peers are done with it, the rank is slow."""
    with Executor(stage.config(heartbeat_interval_s=INTERVAL_S)) as executor:
        everywhere = executor.submit(["wait_for_go"], gather=True)
        stage.wait_for("wait_for_go-0", "wait_for_go-1", "wait_for_go-2")
        answered: set[int] = set()

        def have_answered_late() -> bool:
            health = executor.health()
            assert health.ok, health
            late = [rank for rank in health.ranks if rank.phase_age_s > 6 * INTERVAL_S]
            assert all(rank.verdict == "busy" for rank in late)
            answered.update(rank.rank for rank in late if rank.last_heard_s < rank.phase_age_s / 2)
            return len(answered) == len(health.ranks)

        wait_until(have_answered_late)
        signs.note(stage.directory, "go")
        assert everywhere.result(10) == ["gone"] * 3

        stage.forget()
        alone = executor.submit({"1": "wait_for_go"}, gather=True)
        wait_for_verdicts(executor, "idle", "slow", "idle")
        assert executor.health().ok
        assert "for which its peers took" in executor.health().ranks[1].detail
        signs.note(stage.directory, "go")
        assert alone.result(10) == [0, "gone", 2]
        wait_for_verdicts(executor, "idle", "idle", "idle")


def test_full_load_is_green(stage: Stage) -> None:
    """Step after step, each longer than a heartbeat interval."""
    with Executor(stage.config(heartbeat_interval_s=INTERVAL_S)) as executor:
        futures = [executor.submit(["nap"]) for _ in range(8)]

        def are_done() -> bool:
            health = executor.health()
            assert health.ok, health
            if len(futures) < 16:
                futures.extend(filter(None, [executor.try_submit(["nap"])]))
            return all(future.done() for future in futures)

        wait_until(are_done)
        assert len(futures) == 16


def test_a_rank_that_is_stopped_for_too_long_ends_the_group(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Where the embedder has set a limit for it, idle or not; the error and the log say what is known."""
    failed = threading.Event()
    failures: list[StepcastError] = []

    def note_failure(error: StepcastError) -> None:
        failures.append(error)
        failed.set()

    config = stage.config(heartbeat_interval_s=INTERVAL_S, unresponsive_timeout_s=0.5)
    with Executor(config, on_failure=note_failure) as executor:
        pids = executor.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        assert failed.wait(10)
        executor.shutdown()
        assert all(map(process_has_ended, pids))
        assert json.loads(json.dumps(executor.health().as_dict()))["ranks"][1]["verdict"] == "gone"

    [error] = failures
    assert isinstance(error, WorkerLost)
    assert (error.rank, error.pid, error.exit_code, error.phase) == (1, pids[1], None, "idle")
    assert error.silent_for_s >= 0.5
    assert "over unresponsive_timeout_s=0.5 s, in phase idle: stopped: stopped by a signal (SIGSTOP" in str(error)
    assert f"rank 1 (pid {pids[1]}) is stopped (state T), and can give no stack" in caplog.text
    assert "[rank 0] Thread" in caplog.text or "most recent call first" in caplog.text


def test_a_driver_that_was_stopped_condemns_nobody(stage: Stage) -> None:
    """Nor do its workers end: they trust its process, and not its heartbeat."""
    settings = stage.settings(heartbeat_interval_s=INTERVAL_S, unresponsive_timeout_s=0.5)
    with Embedder(stage, "look_on", settings) as embedder:
        stage.wait_for("ready", by=embedder)
        workers = [signs.read(stage.directory, f"importing-{rank}")[0] for rank in range(3)]
        with stopped(embedder.process.pid):
            stopped_at = time.monotonic()
            wait_until(lambda: psutil.Process(embedder.process.pid).status() == psutil.STATUS_STOPPED)
            wait_until(lambda: time.monotonic() - stopped_at > 20 * INTERVAL_S)
            assert not any(map(process_has_ended, workers))
        resumed_at = time.monotonic()
        wait_until(lambda: time.monotonic() - resumed_at > 5 * INTERVAL_S)
        signs.note(stage.directory, "go")
        assert embedder.finish() == 0
        assert "red: []\nstep: ['on', 'on', 'on']" in embedder.output
