"""`AsyncExecutor`: the same group for an asyncio program, whose event loop is never held."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stepcast import (
    AsyncExecutor,
    Backpressure,
    Closed,
    ConfigError,
    ExecutorConfig,
    GroupState,
    ProtocolError,
    StartupError,
    StepAborted,
    StepFailed,
    StepFuture,
    StepTimeout,
    WorkerLost,
)
from tests.harness import process_has_ended, wait_until

WORKERS = Path(__file__).with_name("workers_for_tests.py")
LIMIT_S = 30.0

Result = TypeVar("Result")


def config(worker: str = "Obedient", world_size: int = 2, **settings: Any) -> ExecutorConfig:
    return ExecutorConfig(worker=f"{WORKERS}:{worker}", world_size=world_size, backend="mp", **settings)


def run(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    return asyncio.run(asyncio.wait_for(main(), 2 * LIMIT_S))


async def until(predicate: Callable[[], Any]) -> None:
    """Wait for a condition, without holding the event loop."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + LIMIT_S
    while not predicate():
        assert clock() < deadline, predicate
        await asyncio.sleep(0.002)


class Ticker:
    """Counts how often the event loop comes round."""

    def __init__(self) -> None:
        self.ticks = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.ensure_future(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)

    async def keeps_ticking(self) -> None:
        """Wait until it has ticked twenty times more."""
        wanted = self.ticks + 20
        await until(lambda: self.ticks >= wanted)


def test_it_does_what_the_executor_does(gate: Any) -> None:
    """Steps, gathered steps, futures, calls, aborts, health and state."""

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:
            assert await executor.step("hello") == "hello"
            assert await executor.step({"ranks": None}, gather=True) == [0, 1]
            futures = [await executor.submit(number) for number in range(5)]
            assert await asyncio.gather(*map(asyncio.wrap_future, futures)) == list(range(5))
            assert await executor.call("whoami") == [0, 1]
            assert await executor.call("keywords", 1, rank=1, two=2) == [[1], {"two": 2}]
            assert await executor.abort("request") is True
            with pytest.raises(StepFailed):
                await executor.call("add", 7, fail_on=[1], undo="remove")
            expected = [*range(5), ["abort", "request"], ["add", 7]]
            assert await executor.call("take_history") == [["hello", *expected, ["remove", 7]], ["hello", *expected]]
            future = await executor.submit({"gate": str(gate)})
            assert executor.health().in_flight == 1
            assert executor.state is GroupState.READY
            assert await executor.abort(future) is True
            with pytest.raises(StepAborted):
                await asyncio.wrap_future(future)
            assert await executor.abort(future.step) is False
            gate.open()
            assert await executor.step("after") == "after"
            pids = executor.worker_pids
        assert executor.state is GroupState.STOPPED
        assert all(process_has_ended(pid) for pid in pids)

    run(main)


def test_errors_are_those_of_the_executor(gate: Any) -> None:
    """Each is raised where it is awaited, and the group lives on."""

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:
            with pytest.raises(StepFailed, match="on purpose"):
                await executor.step({"raise": "on purpose"})
            with pytest.raises(ProtocolError, match="can't be sent"):
                await executor.step(object())
            with pytest.raises(ConfigError, match="private methods"):
                await executor.call("_private")
            with pytest.raises(StepTimeout, match=r"timeout_s=0.1"):
                await executor.step({"gate": str(gate)}, timeout_s=0.1)
            with pytest.raises(StepTimeout, match=r"timeout_s=0.1"):
                await executor.call("wait_for", str(gate), timeout_s=0.1)
            gate.open()
            assert await executor.step("fine") == "fine"

    run(main)


def test_it_is_started_once_and_ended_any_number_of_times() -> None:
    """`start` and `shutdown` for where there is no block; both may be called again."""

    async def main() -> None:
        executor = AsyncExecutor(config())
        assert executor.state is GroupState.NEW
        await executor.shutdown()
        for use in (executor.step(1), executor.submit(1), executor.call("whoami"), executor.abort("r")):
            with pytest.raises(Closed, match="was not started: await start"):
                await use
        with pytest.raises(Closed, match="was not started"):
            executor.health()
        await executor.start()
        pids = executor.worker_pids
        await executor.start()
        assert executor.worker_pids == pids
        await asyncio.gather(executor.shutdown(), executor.shutdown())
        await executor.shutdown()
        with pytest.raises(Closed, match="it is stopped"):
            await executor.step(1)

    run(main)


def test_two_starts_at_once_start_one_group() -> None:
    """The second waits for the first; no second group is left behind."""

    async def main() -> None:
        executor = AsyncExecutor(config())
        await asyncio.gather(executor.start(), executor.start())
        threads = [thread for thread in threading.enumerate() if thread.name == "stepcast-monitor"]
        assert len(threads) == 1
        await executor.shutdown()

    run(main)


def test_the_loop_runs_while_a_group_starts_works_and_ends(new_gate: Callable[[], Any]) -> None:
    """Each of them waits in a thread, or for a callback."""
    setup, step, call = new_gate(), new_gate(), new_gate()

    async def main() -> None:
        async with Ticker() as ticker:
            executor = AsyncExecutor(config("SlowSetup", worker_options={"gate": str(setup)}))
            starting = asyncio.ensure_future(executor.start())
            await ticker.keeps_ticking()
            assert not starting.done()
            setup.open()
            await starting
            for gate, work in (
                (step, executor.step({"gate": str(step)})),
                (call, executor.call("wait_for", str(call), rank=0)),
            ):
                working = asyncio.ensure_future(work)
                await ticker.keeps_ticking()
                assert not working.done()
                gate.open()
                assert await working in (0, f"went through {call}")
            await executor.shutdown()

    run(main)


def test_back_pressure_is_awaited_without_holding_the_loop(gate: Any) -> None:
    """Steps beyond the window wait in their order, and the loop goes round meanwhile."""

    async def main() -> None:
        async with Ticker() as ticker, AsyncExecutor(config(max_in_flight=2)) as executor:
            steps = [asyncio.ensure_future(executor.step({"gate": str(gate)})) for _ in range(2)]
            await until(lambda: executor.health().in_flight == 2)
            steps += [asyncio.ensure_future(executor.step(number)) for number in range(20)]
            await ticker.keeps_ticking()
            assert executor.health().in_flight == 2
            assert not any(step.done() for step in steps)
            gate.open()
            assert await asyncio.gather(*steps) == [0, 0, *range(20)]
            assert await executor.call("take_history") == [list(range(20))] * 2

    run(main)


def test_back_pressure_past_its_limit_is_told(gate: Any) -> None:
    """To each that waits; nothing was published."""

    async def main() -> None:
        async with AsyncExecutor(config(max_in_flight=1, backpressure_timeout_s=0.1)) as executor:
            first = await executor.submit({"gate": str(gate)})
            published = executor.health().published
            outcomes = await asyncio.gather(*(executor.step(number) for number in range(2)), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [Backpressure, Backpressure]
            assert executor.health().published == published
            gate.open()
            assert await asyncio.wrap_future(first) == 0

    run(main)


class RoomLater:
    """In the place of an `Executor`: has room at the second asking, and remembers who came."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.tried = 0
        self.room = threading.Event()

    def try_submit(self, payload: str, **_: Any) -> Any:
        self.tried += 1
        if self.tried == 1:
            return None
        self.came.append(payload)
        return payload

    def submit(self, payload: str, **_: Any) -> Any:
        assert self.room.wait(LIMIT_S)
        self.came.append(payload)
        return payload


def test_nobody_overtakes_those_that_wait_for_room() -> None:
    """One that has just had its turn, and comes again at once, stands behind the others."""

    async def main() -> None:
        executor = AsyncExecutor(config())
        room = RoomLater()
        executor._executor = room  # type: ignore[assignment]

        async def submit(*payloads: str) -> None:
            for payload in payloads:
                await executor.submit(payload)

        tasks = [asyncio.ensure_future(submit("a1", "a2"))]
        await until(lambda: room.tried == 1)
        tasks += [asyncio.ensure_future(submit("b")), asyncio.ensure_future(submit("c"))]
        await asyncio.sleep(0)
        room.room.set()
        await asyncio.gather(*tasks)
        assert room.came == ["a1", "b", "c", "a2"]
        executor._executor = None

    run(main)


def test_cancelling_aborts_the_step_and_loses_nothing(gate: Any) -> None:
    """The step is told to be aborted, and the next one gets its own result."""

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:
            step = (await executor.submit("first")).step + 1
            waiting = asyncio.ensure_future(executor.step({"until_aborted": step}))
            following = asyncio.ensure_future(executor.step("following"))
            await until(lambda: executor.health().published >= step + 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await following == "following"
            assert await executor.call("take_history") == [["first", ["saw the abort of", step], "following"]] * 2
            # With a limit of asyncio's own.
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(executor.step({"gate": str(gate)}), 0.05)
            gate.open()
            assert await executor.step("after") == "after"
            assert executor.state is GroupState.READY

    run(main)


def test_a_step_that_is_cancelled_while_it_waits_for_room_is_not_run_to_its_end(gate: Any) -> None:
    """It is aborted as soon as it is published; those behind it go on."""

    async def main() -> None:
        async with AsyncExecutor(config(max_in_flight=1)) as executor:
            first = asyncio.ensure_future(executor.step({"gate": str(gate)}))
            await until(lambda: executor.health().in_flight == 1)
            cancelled = asyncio.ensure_future(executor.step("cancelled"))
            behind = [asyncio.ensure_future(executor.step(number)) for number in range(3)]
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            gate.open()
            assert await first == 0
            assert await asyncio.gather(*behind) == [0, 1, 2]

    run(main)


def test_a_start_that_fails_raises(gate: Any) -> None:
    """In `start` and in the block's head; nothing is left, and nothing was started."""

    async def main() -> None:
        executor = AsyncExecutor(config("FailsInSetup"))
        with pytest.raises(StartupError, match="no weights here"):
            await executor.start()
        assert executor.state is GroupState.NEW
        await executor.shutdown()
        with pytest.raises(StartupError, match="no weights here"):
            async with executor:
                raise AssertionError("it has not started")

    run(main)


@pytest.mark.parametrize("ends", ["before the start is through", "after it"])
def test_a_start_that_is_cancelled_leaves_nothing(gate: Any, ends: str) -> None:
    """Whether the program ends at once or goes on; the guard of these tests sees what is left."""

    async def main() -> None:
        executor = AsyncExecutor(config("SlowSetup", worker_options={"gate": str(gate)}))
        starting = asyncio.ensure_future(executor.start())
        await until(lambda: [thread for thread in threading.enumerate() if thread.name == "stepcast-monitor"])
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert executor.state is GroupState.NEW
        gate.open()
        if ends == "after it":
            await until(lambda: not [each for each in threading.enumerate() if each.name == "stepcast-monitor"])

    run(main)


def test_a_program_that_is_interrupted_ends_its_group() -> None:
    """What cancels the main task ends the block, and with it the group."""
    pids: list[int] = []

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:
            pids.extend(executor.worker_pids)
            await executor.step({"until_aborted": 1})

    async def cancel_it() -> None:
        task = asyncio.ensure_future(main())
        await until(lambda: pids)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel_it)
    assert all(process_has_ended(pid) for pid in pids)


def test_an_error_in_the_block_is_the_one_that_is_raised() -> None:
    """The group ends all the same."""

    async def main() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with AsyncExecutor(config()) as executor:
                raise KeyError("mine")
        assert executor.state is GroupState.STOPPED

    run(main)


def test_a_lost_worker_is_told_to_all_that_wait() -> None:
    """Each await gets the error, and `on_failure` is called once."""
    told: list[Exception] = []

    async def main() -> None:
        async with AsyncExecutor(config(), on_failure=told.append) as executor:
            steps = [asyncio.ensure_future(executor.step({"until_aborted": 1 << 40})) for _ in range(3)]
            calling = asyncio.ensure_future(executor.call("whoami"))
            await until(lambda: executor.health().in_flight == 4)
            os.kill(executor.worker_pids[1], signal.SIGKILL)
            outcomes = await asyncio.gather(*steps, calling, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [WorkerLost] * 4
            with pytest.raises(Closed, match="the group has failed"):
                await executor.step(1)

    run(main)
    wait_until(lambda: told)
    assert [type(error) for error in told] == [WorkerLost]


def test_many_tasks_get_their_own_answers() -> None:
    """Two hundred steps and calls at once, through a window of eight."""

    async def main() -> None:
        async with AsyncExecutor(config()) as executor:

            async def work(number: int) -> None:
                assert await executor.step([number]) == [number]
                assert await executor.call("keywords", number, rank=1) == [[number], {}]
                future = await executor.submit([number, "again"])
                assert isinstance(future, StepFuture)
                assert await asyncio.wrap_future(future) == [number, "again"]

            await asyncio.gather(*(work(number) for number in range(70)))

    run(main)


def test_one_rank_in_this_process_works_the_same() -> None:
    """The uni backend behind the same methods."""

    async def main() -> None:
        settings = {"worker": f"{WORKERS}:Obedient", "backend": "uni"}
        async with AsyncExecutor(ExecutorConfig(**settings)) as executor:
            answers: list[Awaitable[Any]] = [executor.step(number) for number in range(20)]
            assert await asyncio.gather(*answers) == list(range(20))
            assert await executor.call("whoami") == [0]

    run(main)
