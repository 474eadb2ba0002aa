"""`Executor` over worker processes, as an embedder uses it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from concurrent.futures import TimeoutError as StillWaiting  # the built-in one from Python 3.11 on
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from zmq.utils import garbage

from stepcast import (
    Backpressure,
    Closed,
    ConfigError,
    Executor,
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
from stepcast.runtime.executor import _limits
from stepcast.runtime.step import Limit
from tests.harness import process_has_ended, wait_until

try:
    import numpy as np
except ImportError:
    np = None  # type: ignore[assignment]

WORKERS = Path(__file__).with_name("workers_for_tests.py")
OBEDIENT = f"{WORKERS}:Obedient"
WORLD_SIZES = (1, 2, 3)
#: Longer than anything here takes on a slow machine; only a hang reaches it.
LIMIT_S = 30.0

Result = TypeVar("Result")


def config(world_size: int = 2, worker: str = "Obedient", **settings: Any) -> ExecutorConfig:
    return ExecutorConfig(worker=f"{WORKERS}:{worker}", world_size=world_size, backend="mp", **settings)


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run a function in a thread of its own."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


@pytest.fixture(scope="module")
def all_groups() -> Iterator[dict[int, Executor]]:
    """A group of each size, with the default settings."""
    with ExitStack() as stack:
        stack.callback(garbage.gc.stop)
        groups = {size: stack.enter_context(Executor(config(size))) for size in WORLD_SIZES}
        if np is not None:
            # The first array that is sent without a copy starts a thread of pyzmq's own, which stays.
            groups[2].step(np.zeros(100_000))
        yield groups


@pytest.fixture(scope="module")
def all_tight() -> Iterator[Executor]:
    """A group of two with small windows and limits; rank 1 answers."""
    settings = {"max_in_flight": 2, "max_in_flight_bytes": 150_000, "max_message_bytes": 100_000}
    with Executor(config(2, output_rank=1, backpressure_timeout_s=0.2, **settings)) as executor:
        yield executor


def cleared(executor: Executor) -> Executor:
    """See to it that nothing of the test before is left in the workers."""
    executor.call("take_history")
    assert executor.state is GroupState.READY
    return executor


@pytest.fixture
def groups(all_groups: dict[int, Executor]) -> dict[int, Executor]:
    return {size: cleared(executor) for size, executor in all_groups.items()}


@pytest.fixture
def pair(groups: dict[int, Executor]) -> Executor:
    return groups[2]


@pytest.fixture
def tight(all_tight: Executor) -> Executor:
    return cleared(all_tight)


# Steps.


def test_a_step_is_answered_by_the_output_rank(groups: dict[int, Executor]) -> None:
    """The values come back as they were sent, at every size of the group."""
    values: list[Any] = [None, True, 7, -1.5, "text", b"\0bytes", [1, [2]], {"value": {"b": None}}, [], "", b"x" * 5000]
    for executor in groups.values():
        assert [executor.step(value) for value in values] == values
        assert executor.step({"ranks": None}) == 0


def test_another_rank_can_be_the_one_that_answers(tight: Executor) -> None:
    """`output_rank` says whose result a step has."""
    assert tight.step({"ranks": None}) == 1


def test_every_rank_gets_every_step_in_order(groups: dict[int, Executor]) -> None:
    """Steps and calls run in the order of submission, the same on each rank."""
    for size, executor in groups.items():
        for number in range(20):
            executor.submit(number)
        executor.call("add", 7, fail_on=[])
        executor.step("last")
        assert executor.call("take_history") == [[*range(20), ["add", 7], "last"]] * size


def test_gathered_results_are_those_of_all_ranks_in_order(groups: dict[int, Executor]) -> None:
    """Also those of the ranks that do not answer otherwise."""
    for size, executor in groups.items():
        assert executor.step({"ranks": None}, gather=True) == list(range(size))
        assert executor.submit({"ranks": [0], "return": "mine"}, gather=True).result(LIMIT_S) == ["mine"] + [None] * (
            size - 1
        )


def test_submit_pipelines_up_to_the_window_and_keeps_the_order(pair: Executor, gate: Any) -> None:
    """Eight steps are under way at once; their futures are resolved in the order of submission."""
    order: list[int] = []
    futures = [pair.submit({"gate": str(gate), "return": "first"})] + [pair.submit(number) for number in range(7)]
    for future in futures:
        future.add_done_callback(lambda future: order.append(future.step))
    health = pair.health()
    assert (health.in_flight, [rank.queue_depth for rank in health.ranks]) == (8, [8, 8])
    assert not any(future.done() for future in futures)
    gate.open()
    assert [future.result(LIMIT_S) for future in futures] == ["first", *range(7)]
    wait_until(lambda: len(order) == 8)
    assert order == [future.step for future in futures] == sorted(order)


def test_the_futures_are_those_of_the_standard_library(pair: Executor) -> None:
    """`wait` and `as_completed` work on them, though nobody asks for their results."""
    futures: list[Future[Any]] = [pair.submit(number) for number in range(8)]
    assert not wait(futures, LIMIT_S).not_done
    assert sorted(future.result() for future in as_completed(futures, LIMIT_S)) == list(range(8))


def test_a_wait_for_a_result_can_be_limited(pair: Executor, gate: Any) -> None:
    """The step goes on when the limit passes, and its result is there later."""
    future = pair.submit({"gate": str(gate)})
    with pytest.raises(StillWaiting):
        future.result(0.05)
    with pytest.raises(StillWaiting):
        future.exception(0)
    gate.open()
    assert future.exception(LIMIT_S) is None
    assert future.result(0) == 0


def test_a_long_wait_is_as_good_as_any(pair: Executor) -> None:
    """Limits beyond what the kernel can be told are no error."""
    assert pair.step(1, timeout_s=1e9) == 1
    assert pair.step(2, timeout_s=float("inf")) == 2
    assert pair.submit(3).result(1e9) == 3


def test_each_rank_tells_when_it_worked_on_a_step(pair: Executor) -> None:
    """Times by rank: when the step was there, and how long the answer took."""
    future = pair.submit({"ranks": None}, gather=True)
    future.result(LIMIT_S)
    assert sorted(future.times) == [0, 1]
    for times in future.times.values():
        assert times.received_ns > 0
        assert times.compute_ns > 0


def test_several_threads_get_their_own_answers(pair: Executor) -> None:
    """Steps, futures and calls of four threads at once: nobody gets what another has asked for."""

    def work(number: int) -> None:
        for turn in range(25):
            tag = [number, turn]
            assert pair.step(tag) == tag
            futures = [pair.submit([*tag, deep]) for deep in range(3)]
            assert pair.call("keywords", number, turn=turn, rank=1) == [[number], {"turn": turn}]
            assert [future.result(LIMIT_S) for future in futures] == [[*tag, deep] for deep in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result(LIMIT_S)


# Arrays and tensors.


def test_arrays_travel_both_ways(pair: Executor) -> None:
    """Dtype, shape and values hold; what a worker gets can't be written to."""
    pytest.importorskip("numpy")
    for array in (np.arange(6, dtype="i2").reshape(2, 3), np.zeros((0, 3)), np.array(1.5), np.ones(50_000, "f4")[::2]):
        answer = pair.step({"value": array})["value"]
        assert (answer.dtype, answer.shape) == (array.dtype, array.shape)
        assert (answer == array).all()
        kind, dtype, shape, writeable, values = pair.call("describe_array", array, rank=1)
        assert (kind, dtype, shape, writeable) == ("numpy", str(array.dtype), list(array.shape), False)
        assert values == array.tolist()


def test_tensors_travel_both_ways(pair: Executor) -> None:
    """Those of bfloat16, which numpy does not have, too."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        answer = pair.step({"value": tensor, "name": "x"})
        assert answer["name"] == "x"
        assert answer["value"].dtype == dtype
        assert torch.equal(answer["value"], tensor)


def test_a_result_with_buffers_waits_for_every_rank(pair: Executor, gate: Any) -> None:
    """When it is there, the embedder may write to its arrays again: no rank reads them any more."""
    pytest.importorskip("numpy")
    array = np.zeros(100_000)
    future = pair.submit({"gate": str(gate), "ranks": [1], "array": array})
    with pytest.raises(StillWaiting):
        future.result(0.05)
    gate.open()
    assert future.result(LIMIT_S) is None
    assert set(future.times) == {0, 1}


# Back-pressure.


def test_a_full_window_names_the_slow_ranks_and_publishes_nothing(tight: Executor, gate: Any) -> None:
    """Rank 0 holds two steps; the third is refused after the limit, with all that is known."""
    futures = [tight.submit({"gate": str(gate), "ranks": [0]}) for _ in range(2)]
    assert [future.result(LIMIT_S) for future in futures] == [None, None]  # rank 1 has answered, and is not slow
    published = tight.health().published
    with pytest.raises(Backpressure) as caught:
        tight.submit("third")
    assert tight.try_submit("third") is None
    with pytest.raises(Backpressure):
        tight.step("third")
    gate.open()
    assert tight.health().published == published
    error = caught.value
    assert (error.slow_ranks, error.queued, error.limit, error.limit_bytes) == ((0,), 2, 2, 150_000)
    assert "wait for rank 0; nothing was published" in str(error)
    assert "backpressure_timeout_s=0.2" in str(error)
    wait_until(lambda: tight.health().in_flight == 0)
    assert tight.call("take_history") == [[], []]


def test_the_window_counts_bytes_as_well(tight: Executor, gate: Any) -> None:
    """Two messages would fit, but not their bytes."""
    first = tight.submit({"gate": str(gate), "padding": bytes(80_000)})
    with pytest.raises(Backpressure) as caught:
        tight.submit(bytes(80_000))
    assert caught.value.queued == 1
    assert 80_000 < caught.value.queued_bytes < 81_000
    assert caught.value.slow_ranks == (0, 1)
    small = tight.submit("small")
    gate.open()
    assert first.result(LIMIT_S) == 1
    assert small.result(LIMIT_S) == "small"
    assert len(tight.step(bytes(80_000))) == 80_000


def test_submit_waits_for_room_and_goes_on(pair: Executor, gate: Any) -> None:
    """The ninth step is published when the first has been answered."""
    futures = [pair.submit({"gate": str(gate)})] + [pair.submit(number) for number in range(7)]
    published = pair.health().published
    ninth = in_thread(lambda: pair.submit("ninth"))
    with pytest.raises(StillWaiting):
        ninth.result(0.1)
    assert pair.health().published == published
    gate.open()
    assert ninth.result(LIMIT_S).result(LIMIT_S) == "ninth"
    assert [future.result(LIMIT_S) for future in futures] == [0, *range(7)]


def test_a_payload_that_can_not_be_sent_is_refused_before_it_is_published(tight: Executor) -> None:
    """The error names the place and what is allowed, or the limit; no rank sees anything."""
    published = tight.health().published
    with pytest.raises(ProtocolError, match=r"^step\['a'\]\[1\]: an object of type object can't be sent; allowed are"):
        tight.step({"a": [0, object()]})
    with pytest.raises(ProtocolError, match="an int beyond 64 bits"):
        tight.submit(1 << 64)
    with pytest.raises(ProtocolError, match=r"^keywords\[1\]\[0\]: an object of type set can't be sent"):
        tight.call("keywords", set())
    for size in (100_001, 150_001):
        with pytest.raises(ProtocolError, match=r"is over the limit of 100000: send less, or raise max_message_bytes"):
            tight.step(bytes(size))
        with pytest.raises(ProtocolError, match="is over the limit of 100000"):
            tight.call("keywords", bytes(size))
    assert tight.health().published == published
    assert tight.step("fine") == "fine"


# Failures that the group survives.


def test_a_failed_step_degrades_the_group_until_one_goes_well(groups: dict[int, Executor]) -> None:
    """The error tells rank, type and traceback; the next step runs, and makes the group READY again."""
    for size, executor in groups.items():
        with pytest.raises(StepFailed) as caught:
            executor.step({"raise": "on purpose", "ranks": [size - 1]}, gather=True)
        error = caught.value
        assert (error.rank, error.exception_type, error.failed_ranks) == (size - 1, "ValueError", (size - 1,))
        assert 'raise ValueError(step["raise"])' in error.traceback
        assert f"failed on rank {size - 1}: ValueError: on purpose" in str(error)
        assert not error.epoch_ended
        assert executor.state is GroupState.DEGRADED
        assert executor.health().ok
        assert executor.step("well") == "well"
        wait_until(lambda executor=executor: executor.state is GroupState.READY)


def test_a_failed_step_fails_its_own_future_only(pair: Executor) -> None:
    """Those before and after it have their results."""
    futures = [pair.submit(0), pair.submit({"raise": "no"}), pair.submit(2)]
    assert futures[0].result(LIMIT_S) == 0
    with pytest.raises(StepFailed) as caught:
        futures[1].result(LIMIT_S)
    assert caught.value.step == futures[1].step
    assert sorted(caught.value.failed_ranks) == [0, 1]
    assert futures[2].result(LIMIT_S) == 2


def test_an_answer_that_can_not_be_sent_is_that_steps_failure(tight: Executor) -> None:
    """What can't be encoded, and what is larger than a message may be; the worker goes on."""
    with pytest.raises(StepFailed, match=r"the answer\['deep'\]\[0\]: an object of type object can't be sent"):
        tight.call("unsendable")
    for size in (100_001, 1_000_000):
        with pytest.raises(StepFailed, match=r"the answer has .* bytes, over max_message_bytes=100000") as caught:
            tight.call("big", size)
        assert caught.value.failed_ranks in {(0, 1), (1, 0)}
    assert tight.call("whoami") == [0, 1]


def test_a_failure_is_told_whatever_the_message_limit(tight: Executor) -> None:
    """A long text is cut, and what can't be sent in it is replaced: the error arrives all the same."""
    with pytest.raises(StepFailed) as caught:
        tight.step({"raise": "\N{SNOWMAN}" * 30_000})
    assert "\N{SNOWMAN}" * 30_000 in str(caught.value)
    with pytest.raises(StepFailed, match="no module named"):
        tight.step({"raise": "no module named " + "x" * 90_000})


# Calls.


def test_a_call_runs_on_every_rank(groups: dict[int, Executor]) -> None:
    """The answers stand in the order of the ranks; one of them can be asked for."""
    for size, executor in groups.items():
        assert executor.call("whoami") == list(range(size))
        assert executor.call("whoami", rank=size - 1) == size - 1
        assert executor.call("keywords", 1, "two", three=3) == [[[1, "two"], {"three": 3}]] * size
        with pytest.raises(ConfigError, match=rf"call\(rank={size}\): must be a rank of the group, 0 to {size - 1}"):
            executor.call("whoami", rank=size)


def test_a_call_for_one_rank_runs_on_all(pair: Executor) -> None:
    """Only the answer is one rank's: the ranks stay in lockstep."""
    assert pair.call("add", 3, fail_on=[], rank=1) == "added 3"
    assert pair.call("take_history") == [[["add", 3]]] * 2


@pytest.mark.parametrize("name", ["_private", "__init__", "setup", "execute", "teardown", "abort"])
def test_methods_that_are_not_the_embedders_are_refused(pair: Executor, name: str) -> None:
    """Nothing is published, whether it is the method or its undo."""
    published = pair.health().published
    for arguments in ({"method": name}, {"method": "whoami", "undo": name}):
        with pytest.raises(
            ConfigError, match=rf"^call\('{name}'\): private methods and the loop's own can't be called$"
        ):
            pair.call(**arguments)
    assert pair.health().published == published


def test_a_method_that_does_not_exist_fails_the_call(pair: Executor) -> None:
    """The worker's class and the method are named."""
    with pytest.raises(StepFailed, match="Obedient has no public method 'nothing' to call") as caught:
        pair.call("nothing")
    assert caught.value.exception_type == "AttributeError"
    with pytest.raises(StepFailed, match="has no public method 'history'"):
        pair.call("history")  # not a method
    assert pair.call("whoami") == [0, 1]


def test_a_call_is_undone_where_it_worked_if_it_failed_somewhere(groups: dict[int, Executor]) -> None:
    """All ranks or none: the ranks that failed are not asked to undo, and the call's own error is raised."""
    executor = groups[3]
    with pytest.raises(StepFailed, match="no room for 7") as caught:
        executor.call("add", 7, fail_on=[1], undo="remove")
    assert caught.value.failed_ranks == (1,)
    assert executor.call("take_history") == [
        [["add", 7], ["remove", 7]],
        [["add", 7]],
        [["add", 7], ["remove", 7]],
    ]
    assert executor.call("add", 8, fail_on=[], undo="remove") == ["added 8"] * 3
    assert executor.call("take_history") == [[["add", 8]]] * 3
    with pytest.raises(StepFailed):
        executor.call("add", 9, fail_on=[0, 1, 2], undo="remove")
    assert executor.call("take_history") == [[["add", 9]]] * 3


def test_a_call_that_fails_for_an_earlier_step_is_undone_where_it_was_made(pair: Executor, new_gate: Any) -> None:
    """On every rank where the failure came after it was published, and on none where it was not."""
    for published in (True, False):
        gate = new_gate()
        assert pair.step({"ranks": [1], "gate": str(gate), "raise": "too late"}) is None
        if not published:
            gate.open()
            wait_until(lambda: pair.state is GroupState.DEGRADED)
        call = in_thread(lambda: pair.call("add", 7, fail_on=[], undo="remove"))
        if published:
            wait_until(lambda: pair.health().in_flight == 2)
            gate.open()
        with pytest.raises(StepFailed, match="too late"):
            call.result(LIMIT_S)
        assert pair.call("take_history") == [[["add", 7], ["remove", 7]] if published else []] * 2


def test_a_late_answer_is_not_the_next_calls(pair: Executor, gate: Any) -> None:
    """A call past its own limit fails; the group lives on, and each later call gets its own answer."""
    late = pair.health().dropped["late"]
    with pytest.raises(StepTimeout) as caught:
        pair.call("wait_for", str(gate), timeout_s=0.1)
    error = caught.value
    assert (error.knob, error.limit_s) == ("timeout_s", 0.1)
    assert error.elapsed_s >= 0.1
    assert "the group lives on" in str(error)
    assert pair.state is GroupState.READY
    following = in_thread(lambda: pair.call("whoami"))
    gate.open()
    assert following.result(LIMIT_S) == [0, 1]
    assert pair.step("mine") == "mine"
    assert pair.health().dropped["late"] == late + 2


def test_a_step_past_its_own_limit_fails_alone(pair: Executor, gate: Any) -> None:
    """The error names each rank's phase; a step behind it is not late because of it."""
    future = pair.submit({"gate": str(gate), "ranks": [1]}, gather=True, timeout_s=0.1)
    after = pair.submit("after")
    with pytest.raises(StepTimeout, match=r"no answer from rank 1 \(step\)") as caught:
        future.result(LIMIT_S)
    assert caught.value.step == future.step
    assert caught.value.phases[1] == "step"
    gate.open()
    assert after.result(LIMIT_S) == "after"


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_limit_that_has_passed_already_publishes_nothing(pair: Executor, timeout_s: float) -> None:
    """Zero and less is refused at once."""
    published = pair.health().published
    for submit in (pair.step, pair.submit, pair.try_submit):
        with pytest.raises(StepTimeout, match="had passed before it was published; it was not"):
            submit("late", timeout_s=timeout_s)
    with pytest.raises(StepTimeout, match="call of whoami"):
        pair.call("whoami", timeout_s=timeout_s)
    assert pair.health().published == published


# Aborts.


@pytest.mark.parametrize("by", ["future", "id", "cancel"])
def test_an_aborted_step_fails_at_once_and_the_ranks_run_on(pair: Executor, gate: Any, by: str) -> None:
    """By its future, by its id, or by the future's own `cancel`; a second time there is nothing to abort."""
    future = pair.submit({"gate": str(gate)})
    after = pair.submit("after")

    def abort() -> bool:
        if by == "cancel":
            return future.cancel()
        return pair.abort(future if by == "future" else future.step)

    assert abort()
    with pytest.raises(StepAborted, match=f"step {future.step} was aborted"):
        future.result(0)
    assert not abort()
    assert not after.done()
    gate.open()
    assert after.result(LIMIT_S) == "after"
    assert not pair.abort(after)
    assert pair.state is GroupState.READY


def test_a_thread_that_waits_for_an_aborted_step_is_released(pair: Executor, gate: Any) -> None:
    """Whether it reads the replies itself or another does so for it."""
    future = pair.submit({"gate": str(gate)})
    waiting = [in_thread(future.exception) for _ in range(3)]
    with pytest.raises(StillWaiting):
        waiting[0].result(0.05)
    assert future.cancel()
    assert all(isinstance(each.result(LIMIT_S), StepAborted) for each in waiting)
    gate.open()
    assert pair.step(1) == 1


def test_nothing_else_can_be_aborted(pair: Executor) -> None:
    """A step that does not exist is not under way."""
    assert not pair.abort(1 << 40)
    assert not pair.abort(0)


def test_a_worker_can_ask_whether_its_step_is_aborted(groups: dict[int, Executor]) -> None:
    """Every rank sees it, while it is in that step."""
    for size, executor in groups.items():
        step = executor.submit("before").step + 1
        future = executor.submit({"until_aborted": step})
        assert future.step == step
        assert executor.abort(future)
        assert executor.call("take_history") == [["before", ["saw the abort of", step]]] * size


def test_a_request_is_aborted_on_every_rank_between_the_same_steps(groups: dict[int, Executor]) -> None:
    """`Worker.abort` runs in the order of the steps."""
    for size, executor in groups.items():
        executor.submit("before")
        assert executor.abort("request-7")
        executor.step("after")
        assert executor.call("take_history") == [["before", ["abort", "request-7"], "after"]] * size


# Health.


def test_health_tells_what_each_rank_does(pair: Executor, gate: Any) -> None:
    """While a step runs and when it is over; without asking the ranks, and so at once."""
    future = pair.submit({"gate": str(gate), "ranks": [1]}, gather=True)
    wait_until(lambda: pair.health().ranks[0].phase == "idle")
    health = pair.health()
    assert (health.state, health.ok, health.failure, health.epoch) == ("ready", True, None, 1)
    assert (health.in_flight, health.in_flight_bytes > 0) == (1, True)
    assert [rank.rank for rank in health.ranks] == [0, 1]
    assert tuple(rank.pid for rank in health.ranks) == pair.worker_pids
    assert [rank.phase for rank in health.ranks] == ["idle", "step"]
    assert [rank.queue_depth for rank in health.ranks] == [0, 1]
    assert health.ranks[0].step == future.step
    assert all(rank.last_heard_s >= 0 and rank.phase_age_s >= 0 for rank in health.ranks)
    gate.open()
    future.result(LIMIT_S)
    health = pair.health()
    assert [(rank.phase, rank.step, rank.queue_depth) for rank in health.ranks] == [("idle", future.step, 0)] * 2
    assert (health.in_flight, health.in_flight_bytes) == (0, 0)


def test_health_tells_a_call_from_a_step(pair: Executor, gate: Any) -> None:
    """The phase is that of what the rank works on."""
    calling = in_thread(lambda: pair.call("wait_for", str(gate)))
    wait_until(lambda: [rank.phase for rank in pair.health().ranks] == ["call", "call"])
    gate.open()
    assert calling.result(LIMIT_S) == [f"went through {gate}"] * 2


# Callbacks of futures.


def test_a_callback_may_submit_the_next_step(pair: Executor) -> None:
    """A chain of fifty, each submitted by the one before, beside a thread that waits."""
    results: list[int] = []
    done = threading.Event()

    def go_on(future: Future[Any]) -> None:
        results.append(future.result())
        if results[-1] == 49:
            done.set()
        else:
            pair.submit(results[-1] + 1).add_done_callback(go_on)

    first = pair.submit(0)
    first.add_done_callback(go_on)
    assert first.result(LIMIT_S) == 0
    while not done.is_set():
        pair.step("meanwhile")
    assert results == list(range(50))


@pytest.mark.timeout(45)
@pytest.mark.parametrize("waits", [True, False], ids=["in the waiting thread", "in the monitor"])
def test_a_callback_that_waits_for_room_gets_it(pair: Executor, new_gate: Any, waits: bool) -> None:
    """The window is full, and the thread that runs the callback may be the one that reads the replies."""
    entered = threading.Event()
    outcome: Future[StepFuture] = Future()

    def submit_another(_future: Future[Any]) -> None:
        entered.set()
        try:
            outcome.set_result(pair.submit("another"))
        except Exception as error:  # noqa: BLE001 - told by the main thread
            outcome.set_exception(error)

    first, second = new_gate(), new_gate()
    # Rank 0 answers, and rank 1 holds all of them in the window.
    futures = [pair.submit({"gate": {0: str(first), 1: str(second)}})]
    futures += [pair.submit({"gate": str(second), "ranks": [1]}) for _ in range(7)]
    futures[0].add_done_callback(submit_another)
    waiting = in_thread(futures[0].result) if waits else None
    first.open()
    assert entered.wait(LIMIT_S)
    with pytest.raises(StillWaiting):
        outcome.result(0.05)
    second.open()
    assert outcome.result(LIMIT_S).result(LIMIT_S) == "another"
    if waiting:
        assert waiting.result(LIMIT_S) == 0


@pytest.mark.timeout(45)
def test_who_waits_is_answered_while_the_monitor_is_in_a_callback(pair: Executor, new_gate: Any) -> None:
    """One thread reads for both, and the other goes on by itself when that one has its answer, or has given up."""
    entered, leave = threading.Event(), threading.Event()
    pair.submit(None).add_done_callback(lambda _: (entered.set(), leave.wait(2 * LIMIT_S)))
    try:
        assert entered.wait(LIMIT_S)
        first, second, room = new_gate(), new_gate(), new_gate()
        futures = [pair.submit({"gate": str(first)})]
        reader = in_thread(futures[0].result)
        wait_until(pair._group._group.pump._reading.locked, message="the thread that reads")
        futures += [pair.submit({"gate": str(second)}), pair.submit({"gate": str(room)})]
        futures += [pair.submit({"gate": str(room)}) for _ in range(5)]
        in_line = pair._group._group.pump._turns
        gives_up = in_thread(lambda: futures[1].exception(0.2))
        waiting = in_thread(futures[1].result)
        submitting = in_thread(lambda: pair.submit("another"))
        with pytest.raises(StillWaiting):
            gives_up.result(LIMIT_S)
        wait_until(lambda: len(in_line) == 2, message="those who wait")
        first.open()
        assert reader.result(LIMIT_S) == 0
        assert submitting.result(LIMIT_S).step == futures[-1].step + 1
        second.open()
        assert waiting.result(LIMIT_S) == 0
        assert not in_line
        room.open()
        assert futures[-1].result(LIMIT_S) == 0
    finally:
        leave.set()


@pytest.mark.timeout(90)
def test_threads_that_submit_wait_give_up_and_abort_all_end(pair: Executor) -> None:
    """Whoever reads for whom: every future has one outcome, and the right one."""
    told: list[int] = []

    def use_the_group(seed: int) -> int:
        draw = Random(seed)
        futures: list[tuple[int, StepFuture]] = []
        for number in range(120):
            value = 1000 * seed + number
            future = pair.submit(value)
            future.add_done_callback(lambda future: told.append(future.step))
            futures.append((value, future))
            if draw.random() < 0.2:
                future.add_done_callback(lambda _: pair.step("in a callback"))
            if draw.random() < 0.2:
                future.cancel()
            elif draw.random() < 0.5:
                with suppress(StillWaiting, StepAborted):
                    future.result(draw.choice([0, 0.0001, 0.001]))
            elif draw.random() < 0.5:
                assert pair.step(value) == value
        for value, future in futures:
            error = future.exception(LIMIT_S)
            assert isinstance(error, StepAborted) or future.result(0) == value
        return len(futures)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use_the_group, range(1, 5), timeout=2 * LIMIT_S)) == [120] * 4
    wait_until(lambda: len(told) == 480, LIMIT_S)
    assert len(set(told)) == 480
    assert not pair._group._group.pump._turns


@pytest.mark.timeout(45)
@pytest.mark.parametrize("waits", [True, False], ids=["in the waiting thread", "in the monitor"])
def test_a_callback_may_run_a_step_of_its_own(pair: Executor, gate: Any, waits: bool) -> None:
    """It waits for it as any other thread does, and may ask about the group and abort what it likes."""
    outcome: Future[Any] = Future()

    def use_the_group(_future: Future[Any]) -> None:
        try:
            other = pair.submit("other")
            outcome.set_result((pair.step("mine"), other.result(LIMIT_S), pair.health().ok, pair.abort(1 << 40)))
        except Exception as error:  # noqa: BLE001 - told by the main thread
            outcome.set_exception(error)

    future = pair.submit({"gate": str(gate)})
    future.add_done_callback(use_the_group)
    waiting = in_thread(future.result) if waits else None
    gate.open()
    assert outcome.result(LIMIT_S) == ("mine", "other", True, False)
    if waiting:
        assert waiting.result(LIMIT_S) == 0


@pytest.mark.timeout(45)
def test_a_slow_callback_does_not_hold_up_the_next_result(pair: Executor, gate: Any) -> None:
    """Both outcomes are known at once; the first one's callback blocks, the second result can be had."""
    entered, go_on = threading.Event(), threading.Event()

    def block(_future: Future[Any]) -> None:
        entered.set()
        assert go_on.wait(LIMIT_S)

    first = pair.submit({"gate": str(gate), "ranks": [1]}, gather=True)
    second = pair.submit("second")
    first.add_done_callback(block)
    wait_until(lambda: pair.health().ranks[0].queue_depth == 0)  # rank 0 has answered both
    gate.open()
    assert entered.wait(LIMIT_S)
    assert second.result(LIMIT_S) == "second"
    assert pair.step("third") == "third"
    go_on.set()
    assert first.result(LIMIT_S) == [None, 1]


def test_a_callback_that_raises_harms_nobody(pair: Executor, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; the other callbacks are called, and the steps go on."""

    def fail(_future: Future[Any]) -> None:
        raise LookupError("the embedder's own")

    future = pair.submit(1)
    future.add_done_callback(fail)
    assert future.result(LIMIT_S) == 1
    assert pair.step(2) == 2
    wait_until(lambda: "a callback of the future of step" in caplog.text)


# What the workers write.


def test_what_a_worker_prints_reaches_the_log(pair: Executor, caplog: pytest.LogCaptureFixture) -> None:
    """Standard output as INFO, standard error as WARNING, with the rank in front and as an attribute."""
    caplog.set_level(logging.INFO, "stepcast.worker")
    pair.step({"ranks": [1], "print": "hello\nworld", "print_error": "oh no"})
    wanted = [("INFO", "[rank 1] hello"), ("INFO", "[rank 1] world"), ("WARNING", "[rank 1] oh no")]

    def seen() -> list[tuple[str, str]]:
        records = [each for each in caplog.records if each.name == "stepcast.worker"]
        assert all(each.__dict__["rank"] == 1 for each in records)
        return [(each.levelname, each.getMessage()) for each in records]

    wait_until(lambda: set(wanted) <= set(seen()), message=lambda: f"{wanted} in {seen()}")
    lines = [line for line in seen() if line[0] == "INFO"]
    assert lines == wanted[:2]


def test_what_a_worker_logs_keeps_its_level_and_has_its_place(pair: Executor, caplog: pytest.LogCaptureFixture) -> None:
    """Rank, epoch and step stand on the line, and are attributes of the record."""
    caplog.set_level(logging.INFO, "stepcast.worker")
    future = pair.submit({"log": "told by %s"})
    future.result(LIMIT_S)

    def records() -> dict[int, logging.LogRecord]:
        found = [each for each in caplog.records if "told by argument" in each.getMessage()]
        return {each.__dict__["rank"]: each for each in found}

    wait_until(lambda: len(records()) == 2)
    for rank, record in records().items():
        assert (record.name, record.levelname) == ("stepcast.worker", "WARNING")
        assert (record.__dict__["epoch"], record.__dict__["step"]) == (1, future.step)
        assert record.getMessage() == f"[rank {rank} epoch 1 step {future.step}] tests.worker: told by argument"


# The process of the embedder.


def test_the_embedders_process_is_left_as_it_was() -> None:
    """Signal handlers, environment, logging, warnings, streams and hooks: during a group's life and after it."""

    def state() -> dict[str, Any]:
        loggers = {name: logging.getLogger(name) for name in ("", "stepcast", "stepcast.runtime", "stepcast.worker")}
        return {
            "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
            "environ": dict(os.environ),
            "loggers": {name: (each.level, list(each.handlers), each.propagate) for name, each in loggers.items()},
            "logging": (logging.root.manager.disable, logging.getLoggerClass(), logging.getLogRecordFactory()),
            "warnings": list(warnings.filters),
            "streams": (sys.stdout, sys.stderr, sys.stdin, sys.excepthook, threading.excepthook),
            "path": (list(sys.path), Path.cwd(), os.umask(os.umask(0o022))),
            "main": sys.modules["__main__"],
        }

    before = state()
    with Executor(config(2, worker_env={"EXTRA": "1"})) as executor:
        assert state() == before
        executor.step(1)
        with pytest.raises(StepFailed):
            executor.step({"raise": "no"})
        assert state() == before
    assert state() == before


def test_each_rank_has_its_own_environment(pair: Executor) -> None:
    """Rank and world size as torch reads them, and one thread for each rank's arithmetic."""
    for rank, environment in enumerate(pair.call("environment")):
        assert [environment[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank)] * 2
        assert [environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["2"] * 2
        assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert pair.call("where") == [[pid, rank, rank, 2, 1] for rank, pid in enumerate(pair.worker_pids)]


def test_options_and_variables_reach_every_rank() -> None:
    """Options keep their types, integers as keys too; a variable of the group's wins over the embedder's."""
    options = {"layers": [1, 2], "names": {7: "seven"}, "blob": b"\0", "none": None}
    with Executor(config(2, worker_options=options, worker_env={"TMPDIR": "/elsewhere", "EXTRA": "1"})) as executor:
        assert executor.call("options") == [options] * 2
        for environment in executor.call("environment"):
            assert (environment["TMPDIR"], environment["EXTRA"]) == ("/elsewhere", "1")


# The end.


def test_a_with_block_ends_the_group(gate: Any) -> None:
    """Every rank tears its worker down, every process has ended, and steps are refused."""
    marks = Path(f"{gate}-marks")
    marks.mkdir()
    with Executor(config(2, "MarksTeardown", worker_options={"mark": str(marks)})) as executor:
        assert executor.state is GroupState.READY
        pids = executor.worker_pids
        assert len(set(pids)) == 2
    assert executor.state is GroupState.STOPPED
    assert sorted(path.name for path in marks.iterdir()) == ["rank-0", "rank-1"]
    assert all(process_has_ended(pid) for pid in pids)
    for submit in (executor.step, executor.submit, executor.try_submit, executor.call):
        with pytest.raises(Closed, match="the executor takes no steps: it is stopped"):
            submit("whoami")
    assert not executor.abort(1)
    health = executor.health()
    assert (health.state, health.ok, health.failure) == ("stopped", False, None)
    assert [rank.phase for rank in health.ranks] == ["gone", "gone"]


def test_an_error_in_a_with_block_is_the_one_that_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """That the group can't be ended in good order then is only logged."""
    with pytest.raises(KeyError, match="mine"), Executor(config(1, "FailsInTeardown")) as executor:
        raise KeyError("mine")
    assert executor.state is GroupState.FAILED
    assert (
        "while the executor was shut down after another error: rank 0 failed outside a step: LookupError" in caplog.text
    )


def test_a_teardown_that_raises_is_told_by_shutdown() -> None:
    """Once; after that the executor is down."""
    executor = Executor(config(2, "FailsInTeardown"))
    with pytest.raises(StepFailed, match="can't let go") as caught:
        executor.shutdown()
    assert caught.value.exception_type == "LookupError"
    executor.shutdown()
    assert executor.state is GroupState.FAILED


def test_shutdown_may_be_called_again_and_from_any_thread() -> None:
    """All calls return when nothing is left."""
    executor = Executor(config(2))
    pids = executor.worker_pids
    ends = [in_thread(executor.shutdown) for _ in range(3)]
    executor.shutdown()
    for end in ends:
        assert end.result(LIMIT_S) is None
    executor.shutdown()
    assert all(process_has_ended(pid) for pid in pids)
    assert executor.state is GroupState.STOPPED


def test_steps_under_way_are_finished_by_shutdown(gate: Any) -> None:
    """STOP stands behind them in the stream."""
    executor = Executor(config(2))
    futures = [executor.submit({"gate": str(gate), "return": "first"}), executor.submit("second")]
    end = in_thread(executor.shutdown)
    wait_until(lambda: executor.state is GroupState.STOPPING)
    with pytest.raises(Closed, match="it is stopping"):
        executor.submit("third")
    gate.open()
    end.result(LIMIT_S)
    assert [future.result(0) for future in futures] == ["first", "second"]


def test_a_step_that_outlasts_shutdown_is_told_so(gate: Any) -> None:
    """The limits are kept, and nothing is left of the worker that was stuck."""
    executor = Executor(config(2, stop_timeout_s=0.2, terminate_timeout_s=0.2))
    future = executor.submit({"gate": str(gate), "ranks": [1]}, gather=True)
    pids = executor.worker_pids
    executor.shutdown()
    with pytest.raises(Closed, match="shut down before the step was answered"):
        future.result(LIMIT_S)
    assert all(process_has_ended(pid) for pid in pids)


@pytest.mark.timeout(45)
@pytest.mark.parametrize("waits", [True, False], ids=["in the waiting thread", "in the monitor"])
def test_a_callback_may_shut_the_executor_down(gate: Any, waits: bool) -> None:
    """In whatever thread it runs, the group ends in good order."""
    executor = Executor(config(2))
    outcome: Future[Any] = Future()

    def end(_future: Future[Any]) -> None:
        try:
            outcome.set_result(executor.shutdown())
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            outcome.set_exception(error)

    future = executor.submit({"gate": str(gate)})
    future.add_done_callback(end)
    waiting = in_thread(future.result) if waits else None
    gate.open()
    assert outcome.result(LIMIT_S) is None
    executor.shutdown()
    assert executor.state is GroupState.STOPPED
    if waiting:
        assert waiting.result(LIMIT_S) == 0


def test_an_executor_that_is_dropped_ends_its_group() -> None:
    """Without shutdown; the guard of these tests sees that nothing is left."""
    executor = Executor(config(2))
    pids = executor.worker_pids
    del executor
    wait_until(lambda: all(process_has_ended(pid) for pid in pids))


def test_a_group_that_has_failed_says_why(gate: Any) -> None:
    """The future, `on_failure`, health and each later step tell of the same first failure."""
    told: list[Exception] = []
    executor = Executor(config(2), on_failure=told.append)
    future = executor.submit({"gate": str(gate)})
    waiting = in_thread(future.exception)
    os.kill(executor.worker_pids[1], signal.SIGKILL)
    error = future.exception(LIMIT_S)
    assert isinstance(error, WorkerLost)
    assert (error.rank, error.pid, error.exit_code, error.phase) == (1, executor.worker_pids[1], -9, "step")
    assert not error.retryable  # this executor is done for
    assert waiting.result(LIMIT_S) is error
    wait_until(lambda: told)
    words = r"the group has failed\. The failure: rank 1 .*SIGKILL.*: the group has ended; start a new executor$"
    for submit in (executor.step, executor.submit, executor.try_submit, executor.call):
        with pytest.raises(Closed, match=words) as caught:
            submit("whoami")
        assert caught.value.__cause__ is error
    health = executor.health()
    assert (health.state, health.ok, health.failure) == ("failed", False, str(error))
    executor.shutdown()
    assert told == [error]


def test_on_failure_may_shut_the_executor_down() -> None:
    """It is called in a thread of the group's, once."""
    ended = threading.Event()

    def end(_error: Exception) -> None:
        executor.shutdown()
        ended.set()

    executor = Executor(config(1), on_failure=end)
    with pytest.raises(WorkerLost, match="exited with code 3"):
        executor.call("end_process", 3)
    assert ended.wait(LIMIT_S)
    executor.shutdown()


def test_a_group_that_is_down_writes_to_no_descriptor_of_somebody_else() -> None:
    """Its numbers are other files' by then: a forgotten executor that is dropped must not touch them."""
    executor = Executor(config(1))
    executor.shutdown()
    readers = []
    for _ in range(16):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        readers.append((reader, writer))
    executor.shutdown()
    executor.abort(1)
    del executor
    for reader, writer in readers:
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        os.close(reader)
        os.close(writer)


# The start.


def test_a_setup_that_raises_is_told_with_its_traceback() -> None:
    """Rank, phase, exception and where it was raised; nothing is left."""
    with pytest.raises(StartupError, match=r"failed in the worker's setup\(\): LookupError: no weights here") as caught:
        Executor(config(2, "FailsInSetup"))
    assert 'raise LookupError("no weights here")' in str(caught.value)
    assert set(caught.value.phases.values()) == {"loading"}


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ("no_such_module:Class", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{WORKERS}:Missing", "workers_for_tests.py has no Missing: the worker's class must be defined there"),
        (f"{WORKERS}:wait_for_gate", "is not a subclass of stepcast.Worker"),
        ("/no/such/script.py:Class", "FileNotFoundError"),
    ],
)
def test_a_worker_that_can_not_be_imported_is_told(worker: str, told: str) -> None:
    """The error names what is wrong, and the phase."""
    with pytest.raises(StartupError, match="failed in importing the worker's class") as caught:
        Executor(ExecutorConfig(worker=worker, world_size=1, backend="mp"))
    assert told in str(caught.value)
    assert caught.value.phases == {0: "importing"}


def test_a_start_past_its_limit_names_the_ranks_and_their_phases(gate: Any) -> None:
    """And the setting."""
    with pytest.raises(StartupError, match=r"not ready within startup_timeout_s=1\.5 s: ") as caught:
        Executor(config(2, "SlowSetup", startup_timeout_s=1.5, worker_options={"gate": str(gate)}))
    assert caught.value.ranks == (0, 1)
    assert caught.value.phases == {0: "loading", 1: "loading"}


def test_a_process_that_can_not_be_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks before it are ended; the error tells the cause."""
    from stepcast.runtime.launch import mp  # noqa: PLC0415 - only here

    spawn = mp.spawn
    pids: list[int] = []

    def spawn_the_first(boot: Any, environment: Any) -> Any:
        if boot.rank == 1:
            raise OSError(11, "no more processes")
        process = spawn(boot, environment)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(mp, "spawn", spawn_the_first)
    with pytest.raises(StartupError, match=r"the workers' processes can't be started: .*no more processes"):
        Executor(config(2))
    assert len(pids) == 1
    assert process_has_ended(pids[0])


def test_a_class_that_no_other_process_can_find_is_refused() -> None:
    """One defined in a function; the error says where it must be."""
    from stepcast import Worker  # noqa: PLC0415 - only here

    class Local(Worker):
        pass

    with pytest.raises(ConfigError, match="a class defined in a function can't be found by the worker processes"):
        Executor(ExecutorConfig(worker=Local, world_size=2))


def test_a_future_is_never_cancelled_only_aborted(pair: Executor) -> None:
    """`CancelledError` belongs to the standard library's executors."""
    future = pair.submit(1)
    future.result(LIMIT_S)
    assert not future.cancel()
    assert not future.cancelled()
    assert not isinstance(future.exception(), CancelledError)


# Nobody is forgotten.


def test_no_outcome_and_no_room_waits_for_the_monitors_look(
    monkeypatch: pytest.MonkeyPatch, new_gate: Callable[[], Any]
) -> None:
    """Whoever stops reading while others wait hands over to somebody; the monitor's own look is only a net below."""
    for module in ("pump", "monitor"):
        monkeypatch.setattr(f"stepcast.runtime.{module}.MONITOR_LOOK_S", 600.0)
    settings = {"max_in_flight": 3, "max_in_flight_bytes": 200_000, "heartbeat_interval_s": 600.0}

    def work(executor: Executor, number: int) -> None:
        random = Random(number)
        for turn in range(150):
            tag = [number, turn]
            kind = random.randrange(6)
            if kind == 0:
                assert executor.step(tag) == tag
            elif kind == 1:
                futures = [executor.submit([*tag, deep]) for deep in range(random.randrange(1, 4))]
                assert [future.result(LIMIT_S) for future in futures] == [[*tag, deep] for deep in range(len(futures))]
            elif kind == 2:
                assert executor.call("keywords", *tag, rank=1) == [tag, {}]
            elif kind == 3:
                future = executor.submit(tag)
                aborted = future.cancel()
                assert isinstance(future.exception(LIMIT_S), StepAborted if aborted else type(None))
            elif kind == 4:
                with suppress(StillWaiting):
                    assert executor.submit(tag).result(random.choice([0, 0.0001, 0.001])) == tag
            else:
                assert len(executor.step(bytes(random.randrange(90_000)))) < 90_000

    with Executor(config(2, **settings)) as executor:
        for done in [in_thread(lambda number=number: work(executor, number)) for number in range(4)]:
            done.result(LIMIT_S)
        # A thread reads for its own outcome, which comes before there is room for the other one.
        mine, room = new_gate(), new_gate()
        large = bytes(150_000)
        reading = in_thread(lambda: executor.step({"gate": {0: str(mine), 1: str(room)}, "large": large}))
        wait_until(lambda: executor.health().in_flight == 1)
        submitting = in_thread(lambda: executor.submit(large).result(LIMIT_S))
        with pytest.raises(StillWaiting):
            submitting.result(0.05)
        mine.open()
        assert reading.result(LIMIT_S) == 0
        room.open()
        assert submitting.result(LIMIT_S) == large


class InterruptedHereError(Exception):
    """Raised by a signal handler, as Ctrl-C raises `KeyboardInterrupt`."""


@pytest.mark.parametrize("kind", ["step", "result"])
def test_a_wait_that_is_interrupted_loses_no_answer(gate: Any, kind: str) -> None:
    """The step goes on, and the next one gets its own answer."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise InterruptedHereError

    handler = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with Executor(config(2, step_timeout_s=3.0)) as executor:
            step = {"gate": str(gate), "ranks": [1]}
            future = executor.submit(step, gather=True) if kind == "result" else None
            # Long enough for rank 0's answer to be there in most runs; where it is not, nothing can be lost.
            timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
            timer.start()
            with pytest.raises(InterruptedHereError):
                _ = future.result() if future else executor.step(step, gather=True)
            timer.join()
            gate.open()
            assert executor.step("after") == "after"
            if future:
                assert future.result(LIMIT_S) == [None, 1]
    finally:
        signal.signal(signal.SIGUSR2, handler)


@pytest.mark.parametrize(("timeout_s", "hard_s"), [(1.0, 3.0), (3.0, 6.0), (5.0, 8.0)])
def test_the_groups_limit_always_comes_after_the_embedders_own(timeout_s: float, hard_s: float) -> None:
    """Past its own limit a step fails alone, also where that limit is longer than the group's setting."""
    own, hard = _limits(timeout_s, Limit(3.0, "step_timeout_s"))
    assert own == (timeout_s, "timeout_s")
    assert hard.seconds == hard_s
    assert hard.knob.endswith("step_timeout_s")
