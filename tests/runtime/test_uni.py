"""The "uni" backend: one rank in this process, with the same methods and the same errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting  # the built-in one from Python 3.11 on
from pathlib import Path
from typing import Any

import pytest

from stepcast import (
    Backpressure,
    Closed,
    ConfigError,
    Executor,
    ExecutorConfig,
    GroupState,
    ProtocolError,
    RankInfo,
    StartupError,
    StepAborted,
    StepFailed,
    StepTimeout,
    Worker,
)
from stepcast.bus.endpoints import RunDirectory
from tests.harness import wait_until

WORKERS = Path(__file__).with_name("workers_for_tests.py")
LIMIT_S = 30.0


def config(worker: str = "Obedient", **settings: Any) -> ExecutorConfig:
    return ExecutorConfig(worker=f"{WORKERS}:{worker}", backend="uni", **settings)


@pytest.fixture
def uni() -> Iterator[Executor]:
    with Executor(config(max_in_flight=4, backpressure_timeout_s=0.2, max_message_bytes=100_000)) as executor:
        yield executor


def test_one_rank_runs_here_by_default() -> None:
    """A world size of one needs no process; the class may be one defined in a function."""

    class Local(Worker):
        def setup(self, rank: RankInfo) -> None:
            self.info = rank

        def execute(self, step: Any) -> Any:
            return [step, os.getpid(), self.info.rank, self.info.world_size, self.info.epoch, self.info.output_rank]

    with Executor(ExecutorConfig(worker=Local)) as executor:
        assert executor.step("here") == ["here", os.getpid(), 0, 1, 1, 0]
        assert executor.worker_pids == (os.getpid(),)
        assert executor.step(1, gather=True) == [[1, os.getpid(), 0, 1, 1, 0]]


def test_steps_futures_and_calls_are_those_of_any_group(uni: Executor) -> None:
    """In order, with their times and their own answers."""
    values: list[Any] = [None, True, 7, -1.5, "text", b"\0bytes", [1, [2]], {"value": {"b": None}}, [], ""]
    assert [uni.step(value) for value in values] == values
    uni.call("take_history")
    futures = [uni.submit(number) for number in range(4)]
    assert [future.result(LIMIT_S) for future in futures] == [0, 1, 2, 3]
    assert futures[0].times[0].compute_ns > 0
    assert uni.call("keywords", 1, two=2) == [[[1], {"two": 2}]]
    assert uni.call("whoami", rank=0) == 0
    assert uni.abort("request")
    assert uni.call("take_history") == [[0, 1, 2, 3, ["abort", "request"]]]
    with pytest.raises(ConfigError, match=r"call\(rank=1\)"):
        uni.call("whoami", rank=1)
    with pytest.raises(ConfigError, match="private methods"):
        uni.call("_private")


def test_a_failed_step_degrades_the_group_until_one_goes_well(uni: Executor) -> None:
    """The error tells rank, type and traceback."""
    with pytest.raises(StepFailed, match="failed on rank 0: ValueError: on purpose") as caught:
        uni.step({"raise": "on purpose"})
    assert (caught.value.rank, caught.value.exception_type) == (0, "ValueError")
    assert 'raise ValueError(step["raise"])' in caught.value.traceback
    assert uni.state is GroupState.DEGRADED
    assert uni.step(1) == 1
    assert uni.state is GroupState.READY
    with pytest.raises(StepFailed, match="no room for 7"):
        uni.call("add", 7, fail_on=[0], undo="remove")
    assert uni.call("take_history") == [[1, ["add", 7]]]


def test_the_windows_hold_here_too(uni: Executor, gate: Any) -> None:
    """Four messages, and no more until one is answered; nothing was published meanwhile."""
    futures = [uni.submit({"gate": str(gate)})] + [uni.submit(number) for number in range(3)]
    published = uni.health().published
    with pytest.raises(Backpressure) as caught:
        uni.submit("fifth")
    assert (caught.value.slow_ranks, caught.value.queued, caught.value.limit) == ((0,), 4, 4)
    assert uni.try_submit("fifth") is None
    assert uni.health().published == published
    gate.open()
    assert [future.result(LIMIT_S) for future in futures] == [0, 0, 1, 2]
    assert uni.step("fifth") == "fifth"


def test_what_can_not_be_sent_is_refused_here_too(uni: Executor) -> None:
    """A worker that works here works in processes as well."""
    published = uni.health().published
    with pytest.raises(ProtocolError, match=r"step\['a'\]: an object of type object can't be sent"):
        uni.step({"a": object()})
    with pytest.raises(ProtocolError, match="is over the limit of 100000"):
        uni.step(bytes(100_001))
    assert uni.health().published == published
    with pytest.raises(StepFailed, match=r"the answer\['deep'\]\[0\]: an object of type object can't be sent"):
        uni.call("unsendable")
    with pytest.raises(StepFailed, match="over max_message_bytes=100000"):
        uni.call("big", 100_001)


def test_neither_side_sees_the_others_later_writes() -> None:
    """Arrays are copies, as they are where a socket lies between; what the worker gets can't be written to."""
    np = pytest.importorskip("numpy")
    with Executor(config()) as uni:
        array = np.ones(3)
        uni.call("keep", array)
        array[:] = 9
        assert uni.call("kept") == [[1, 1, 1]]
        assert uni.call("describe_array", array)[0][:4] == ["numpy", "float64", [3], False]
        uni.call("keep", None)
        first = uni.call("fill", 1.0)[0]
        second = uni.call("fill", 2.0)[0]
        assert (first.tolist(), second.tolist()) == ([1.0] * 4, [2.0] * 4)


def test_limits_hold_here_too(uni: Executor, gate: Any) -> None:
    """A step past its own limit fails alone, and its late answer is dropped."""
    with pytest.raises(StepTimeout, match=r"the limit is timeout_s=0.1 s: the group lives on"):
        uni.step({"gate": str(gate)}, timeout_s=0.1)
    with pytest.raises(StillWaiting):
        uni.submit({"gate": str(gate)}).result(0.05)
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(StepTimeout, match="had passed before it was published"):
            uni.step(1, timeout_s=timeout_s)
    gate.open()
    assert uni.call("whoami", timeout_s=LIMIT_S) == [0]
    assert uni.step(2, timeout_s=1e12) == 2
    assert uni.step(3, timeout_s=float("inf")) == 3
    assert uni.health().dropped["late"] == 1


def test_a_step_past_the_groups_limit_ends_the_group(gate: Any) -> None:
    """A thread can't be killed: it ends when the step returns, and tears its worker down then."""
    told: list[Exception] = []
    executor = Executor(config(step_timeout_s=0.2, stop_timeout_s=0.1), on_failure=told.append)
    waiting = executor.submit({"gate": str(gate)})
    behind = executor.submit(2)
    with pytest.raises(
        StepTimeout, match=r"the limit is step_timeout_s=0.2 s: .*the group has ended; start a new executor"
    ):
        waiting.result(LIMIT_S)
    with pytest.raises(StepTimeout):
        behind.result(LIMIT_S)
    with pytest.raises(Closed, match="the group has failed") as caught:
        executor.step(3)
    assert caught.value.__cause__ is waiting.exception()
    assert executor.state is GroupState.FAILED
    assert executor.health().ranks[0].verdict == "stuck"
    wait_until(lambda: told)
    executor.shutdown()
    gate.open()


def test_aborted_steps_and_requests(uni: Executor, gate: Any) -> None:
    """By future, by id and by the worker's own question."""
    held = uni.submit({"gate": str(gate)})
    behind = uni.submit("behind")
    assert uni.abort(held)
    assert not uni.abort(held.step)
    with pytest.raises(StepAborted):
        held.result(0)
    gate.open()
    assert behind.result(LIMIT_S) == "behind"
    step = behind.step + 1
    asking = uni.submit({"until_aborted": step})
    assert asking.cancel()
    assert uni.call("take_history") == [["behind", ["saw the abort of", step]]]
    assert not uni.abort(1 << 40)


def test_health_tells_what_the_rank_does(uni: Executor, gate: Any) -> None:
    """Without asking it."""
    future = uni.submit({"gate": str(gate)})
    wait_until(lambda: uni.health().ranks[0].phase == "step")
    health = uni.health()
    assert (health.state, health.ok, health.failure, health.in_flight) == ("ready", True, None, 1)
    assert (health.ranks[0].pid, health.ranks[0].step, health.ranks[0].queue_depth) == (os.getpid(), future.step, 1)
    assert (health.ranks[0].verdict, health.ranks[0].detail[:12]) == ("busy", "in phase ste")
    gate.open()
    future.result(LIMIT_S)
    assert (uni.health().ranks[0].phase, uni.health().in_flight) == ("idle", 0)
    assert uni.health().ranks[0].verdict == "idle"


@pytest.mark.timeout(45)
def test_a_callback_may_use_the_executor(uni: Executor, gate: Any) -> None:
    """It runs in no thread that a step would need: it may run one, and wait for others."""
    outcome: Future[Any] = Future()

    def use_it(_future: Future[Any]) -> None:
        try:
            outcome.set_result([uni.step("mine"), uni.submit("other").result(LIMIT_S), uni.health().ok])
        except Exception as error:  # noqa: BLE001 - told by the main thread
            outcome.set_exception(error)

    future = uni.submit({"gate": str(gate)})
    future.add_done_callback(use_it)
    gate.open()
    assert outcome.result(LIMIT_S) == ["mine", "other", True]
    assert future.result(0) == 0


def test_callbacks_are_called_in_order_and_once(uni: Executor) -> None:
    """Also one that is added when the future is done."""
    order: list[int] = []
    futures = []
    for number in range(40):
        future = uni.submit(number)
        future.add_done_callback(lambda future: order.append(future.result()))
        futures.append(future)
    wait_until(lambda: len(order) == 40)
    assert order == list(range(40))
    futures[0].add_done_callback(lambda future: order.append(-1))
    assert order[40:] == [-1]


def test_several_threads_get_their_own_answers(uni: Executor) -> None:
    """Steps and calls of four threads at once."""

    def work(number: int) -> None:
        for turn in range(50):
            assert uni.step([number, turn]) == [number, turn]
            assert uni.call("keywords", number, turn=turn) == [[[number], {"turn": turn}]]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result(LIMIT_S)


def test_a_setup_that_raises_is_told_with_its_cause() -> None:
    """The exception itself is at hand here; no thread and no file is left."""
    with pytest.raises(StartupError, match=r"failed in the worker's setup\(\): LookupError: no weights here") as caught:
        Executor(config("FailsInSetup"))
    assert isinstance(caught.value.__cause__, LookupError)
    assert (caught.value.ranks, caught.value.phases) == ((0,), {0: "loading"})


@pytest.mark.parametrize(
    ("worker", "told"),
    [("no_such_module:Class", "No module named 'no_such_module'"), (f"{WORKERS}:Missing", "has no Missing")],
)
def test_a_worker_that_can_not_be_imported_is_told(worker: str, told: str) -> None:
    """As everywhere; a second attempt is told the same."""
    for _ in range(2):
        with pytest.raises(StartupError, match="failed in importing the worker's class") as caught:
            Executor(ExecutorConfig(worker=worker))
        assert told in str(caught.value)


def test_a_start_past_its_limit_is_told(gate: Any) -> None:
    """The setup goes on, since a thread can't be killed; its thread ends with it."""
    with pytest.raises(StartupError, match=r"not ready within startup_timeout_s=0\.2 s: rank 0 \(loading\)"):
        Executor(config("SlowSetup", startup_timeout_s=0.2, worker_options={"gate": str(gate)}))
    gate.open()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "stepcast-uni"])


def test_shutdown_tears_the_worker_down_and_leaves_no_thread(tmp_path: Path) -> None:
    """Again and from another thread as well; steps are refused afterwards."""
    executor = Executor(config("MarksTeardown", worker_options={"mark": str(tmp_path)}))
    futures = [executor.submit(number) for number in range(4)]
    other = threading.Thread(target=executor.shutdown)
    other.start()
    executor.shutdown()
    other.join(LIMIT_S)
    executor.shutdown()
    assert [future.result(0) for future in futures] == [0, 1, 2, 3]
    assert (tmp_path / "rank-0").exists()
    assert executor.state is GroupState.STOPPED
    assert (executor.health().ok, executor.health().in_flight, executor.health().ranks[0].phase) == (False, 0, "gone")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stepcast")]
    for use in (executor.step, executor.submit, executor.try_submit, executor.call):
        with pytest.raises(Closed, match="it is stopped"):
            use("whoami")


def test_a_teardown_that_raises_is_told_by_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    """Once; where the block has raised already, it is only logged."""
    executor = Executor(config("FailsInTeardown"))
    with pytest.raises(StepFailed, match="can't let go"):
        executor.shutdown()
    executor.shutdown()
    assert executor.state is GroupState.FAILED
    with pytest.raises(KeyError, match="mine"), Executor(config("FailsInTeardown")):
        raise KeyError("mine")
    assert "while the executor was shut down after another error" in caplog.text


def test_a_step_that_outlasts_shutdown_is_told_so(gate: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The limit is kept; the thread ends with the step."""
    caplog.set_level(logging.ERROR, "stepcast.runtime")
    executor = Executor(config(stop_timeout_s=0.1))
    future = executor.submit({"gate": str(gate)})
    executor.shutdown()
    with pytest.raises(Closed, match="shut down before the step was answered"):
        future.result(LIMIT_S)
    assert "the worker's thread is still in" in caplog.text
    gate.open()


def test_a_callback_may_shut_the_executor_down(gate: Any) -> None:
    """In whatever thread it runs."""
    executor = Executor(config())
    ended: Future[None] = Future()
    future = executor.submit({"gate": str(gate)})
    future.add_done_callback(lambda _: ended.set_result(executor.shutdown()))
    gate.open()
    assert ended.result(LIMIT_S) is None
    assert executor.state is GroupState.STOPPED


def test_an_executor_that_is_dropped_ends() -> None:
    """Without shutdown; the guard of these tests sees that nothing is left."""
    executor = Executor(config())
    assert executor.step(1) == 1
    del executor
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("stepcast")])


def test_a_worker_that_wants_to_exit_ends_the_group_alone() -> None:
    """`SystemExit` in a step is not the embedder's."""

    class Quits(Worker):
        def execute(self, step: Any) -> Any:
            raise SystemExit(3)

    executor = Executor(ExecutorConfig(worker=Quits))
    with pytest.raises(StepFailed, match="SystemExit: 3") as caught:
        executor.step(1)
    assert caught.value.epoch_ended
    assert executor.state is GroupState.FAILED
    executor.shutdown()


def test_executors_may_be_built_while_another_imports_its_worker(tmp_path: Path, new_gate: Callable[[], Any]) -> None:
    """Only the script that is imported is kept from building one, not the rest of this process."""
    gate, reached = new_gate(), tmp_path / "reached"
    script = tmp_path / "slow_import.py"
    script.write_text(
        "import pathlib, time\n"
        "from stepcast import Executor, ExecutorConfig, Worker\n"
        f"pathlib.Path({str(reached)!r}).touch()\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.002)\n"
        "class Mine(Worker):\n"
        "    def execute(self, step): return ['mine', step]\n"
        "with Executor(ExecutorConfig(worker=Mine)) as executor: raise RuntimeError('below the executor')\n"
    )
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(Executor, ExecutorConfig(worker=f"{script}:Mine"))
        wait_until(reached.exists)
        with Executor(config()) as executor:
            assert executor.step(1) == 1
        gate.open()
        with building.result(LIMIT_S) as mine:
            assert mine.step(2) == ["mine", 2]


def test_a_program_that_is_interrupted_in_a_step_leaves_no_directory() -> None:
    """The thread can't be ended, and goes with the process; what it would have removed is removed before."""
    program = """
import os, signal, threading
from stepcast import Executor, ExecutorConfig
config = ExecutorConfig(worker="stepcast.workers.echo:Echo", stop_timeout_s=0.1)
with Executor(config) as executor:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    executor.call("sleep", 60.0)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in run.stderr
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_a_ctrl_c_while_the_directory_is_made_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held until somebody would remove the directory, and comes then."""

    def interrupted(root: str | None) -> RunDirectory:
        directory = RunDirectory(root)
        signal.raise_signal(signal.SIGINT)
        return directory

    monkeypatch.setattr("stepcast.runtime.uni.RunDirectory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Executor(config())

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not list(Path(os.environ["TMPDIR"]).iterdir())
