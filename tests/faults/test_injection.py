"""`stepcast.testing`: each injected fault does what it says."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from stepcast import Closed, ConfigError, ExecutorConfig, ProtocolError, StartupError, StepFailed, WorkerLost
from stepcast.bus.frames import Kind
from stepcast.runtime.testing.frames import FrameFaults, MessageReader
from stepcast.testing import FaultyGroup
from stepcast.workers.responder import EXIT_LINK_LOST
from tests.harness import wait_until

ECHO = "stepcast.workers.echo:Echo"


def config(**settings: Any) -> ExecutorConfig:
    limits = {"heartbeat_interval_s": 0.1, "startup_timeout_s": 60.0, "kill_timeout_s": 5.0}
    return ExecutorConfig(**{"worker": ECHO, "world_size": 2, **limits, **settings})


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_frames_that_are_disturbed_cost_no_step(method: str) -> None:
    """Dropped, repeated, reordered, corrupted and late: every step is answered once, in order, by both ranks."""
    with FaultyGroup(config(start_method=method), frame_faults=True) as group:
        faults = {
            "drop": lambda: group.frames.drop(1),
            "duplicate": lambda: group.frames.duplicate(1),
            "reorder": lambda: group.frames.reorder(1),
            "corrupt": lambda: group.frames.corrupt(1),
            "delay": lambda: group.frames.delay(1, 0.2),
        }
        for name, inject in faults.items():
            inject()
            futures = [group.executor.submit([name, number], gather=True) for number in range(4)]
            assert [future.result(30) for future in futures] == [[[name, number]] * 2 for number in range(4)]
        assert group.frames.happened == dict.fromkeys(faults, 1)


def test_a_link_that_is_cut_or_stalled_goes_on_when_it_is_healed() -> None:
    """No step comes through meanwhile; then all of them do."""
    with FaultyGroup(config(), frame_faults=True) as group:
        health = group.executor.health
        for disturb in (group.frames.cut, group.frames.blackhole, group.frames.stall):
            disturb(1)
            future = group.executor.submit("through", gather=True)
            wait_until(lambda: health().ranks[0].queue_depth == 0)
            assert not future.done()
            assert health().ranks[1].queue_depth == 1
            group.frames.heal(1)
            assert future.result(30) == ["through"] * 2


def test_an_answer_that_finds_its_link_cut_waits_until_it_is_healed() -> None:
    """The rank's connections have closed, and it tries again."""
    with FaultyGroup(config(), frame_faults=True) as group:
        group.in_next_step(1, "sleep", 0.3)
        future = group.executor.submit("late", gather=True)
        wait_until(lambda: group.executor.health().ranks[0].queue_depth == 0)
        group.frames.cut(1)
        connections = len(group.frames.happened)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            future.result(0.6)
        assert not future.done()
        group.frames.heal(1)
        assert future.result(30) == ["late"] * 2
        assert connections == group.frames.happened["cut"] == 1


def test_a_rank_whose_link_stays_cut_ends_and_says_so() -> None:
    """It is lost, as one that dies."""
    worker = f"{Path(__file__).parent / 'victims.py'}:Impatient"
    with FaultyGroup(config(worker=worker), frame_faults=True) as group:
        group.frames.cut(1)
        with pytest.raises(WorkerLost, match="its connection to the driver has ended, and did not") as caught:
            group.executor.step("a step", gather=True)
        assert (caught.value.rank, caught.value.exit_code) == (1, EXIT_LINK_LOST)


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.STOP])
def test_what_is_lost_at_the_end_is_replayed(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """A step under way is finished, and a rank that misses its STOP is not killed for it."""
    with FaultyGroup(config(), frame_faults=True) as group:
        group.frames.drop(1, kind)
        future = group.executor.submit("the last", gather=True)
        group.executor.shutdown()
        assert future.result(0) == ["the last"] * 2
        assert group.frames.happened == {"drop": 1}
    assert "sending SIGTERM" not in caplog.text


def test_a_restart_leaves_nothing_in_the_proxy() -> None:
    """Neither what the epoch before has listened on, nor a connection that is stalled, nor a message that is late."""
    settings = {"restart": "on_failure", "max_restarts": 9, "restart_backoff_s": 0.001}
    with FaultyGroup(config(**settings), frame_faults=True) as group:
        held = []
        for epoch in range(1, 4):
            assert group.executor.step(epoch, gather=True) == [epoch] * 2
            held.append(len(list(Path("/proc/self/fd").iterdir())))
            group.frames.delay(0, 3600.0)
            future = group.executor.submit("overtaken", gather=True)
            group.frames.stall(1)
            group.kill(1)
            with pytest.raises(WorkerLost):
                future.result(30)
            group.frames.heal(0)
            group.frames.heal(1)
        assert held[1] == held[2]


@pytest.mark.parametrize("count", [1, 4])
def test_an_answer_that_is_lost_ends_the_group(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't be replayed, be it the last one or one that others follow: the error says whose it was."""
    monkeypatch.setattr("stepcast.runtime.inbox._ANSWER_GRACE_S", 0.3)
    with FaultyGroup(config(), frame_faults=True) as group:
        group.frames.drop(1, Kind.RESULT)
        futures = [group.executor.submit("a step", gather=True) for _ in range(count)]
        with pytest.raises(ProtocolError, match="an answer of rank 1 was lost"):
            futures[-1].result(30)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("fault", ["exit", "exit_cleanly", "os_exit", "kill", "segfault"])
def test_a_rank_that_ends_in_a_step_is_lost(method: str, fault: str) -> None:
    """Only the rank that was told to, and in the step after the order."""
    with FaultyGroup(config(start_method=method)) as group:
        assert group.executor.step(0, gather=True) == [0, 0]
        group.in_next_step(1, fault)
        with pytest.raises(WorkerLost) as caught:
            group.executor.step(1, gather=True)
        assert caught.value.rank == 1
        assert group.wait_until_gone(5.0)
        with pytest.raises(Closed):
            group.executor.step(2)


@pytest.mark.parametrize(("fault", "name"), [("raise", "InjectedFaultError"), ("answer", "ProtocolError")])
def test_a_rank_that_fails_in_a_step_goes_on(fault: str, name: str) -> None:
    """The group lives, and the wrapped worker computes the next step."""
    with FaultyGroup(config()) as group:
        group.in_next_step(1, fault)
        with pytest.raises(StepFailed) as caught:
            group.executor.step(1, gather=True)
        assert (caught.value.rank, caught.value.exception_type.rpartition(".")[2]) == (1, name)
        assert group.executor.step(2, gather=True) == [2, 2]


@pytest.mark.parametrize("fault", ["sleep", "hold_gil"])
def test_a_slow_rank_is_waited_for(fault: str) -> None:
    """Meanwhile one that holds the GIL is silent, and one that sleeps is not."""
    with FaultyGroup(config()) as group:
        group.in_next_step(1, fault, 1.0)
        future = group.executor.submit("slow", gather=True)
        silences = []
        while not future.done():
            silences.append(group.executor.health().ranks[1].last_heard_s)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                future.result(0.05)
        assert future.result(30) == ["slow"] * 2
        assert (max(silences) > 0.6) == (fault == "hold_gil")


def test_a_stopped_rank_goes_on_when_it_is_resumed() -> None:
    """Its step is late, not lost."""
    with FaultyGroup(config()) as group:
        group.stop(1)
        future = group.executor.submit("late", gather=True)
        wait_until(lambda: group.executor.health().ranks[0].queue_depth == 0)
        assert not future.done()
        group.resume(1)
        assert future.result(30) == ["late"] * 2


def test_a_driver_that_was_frozen_goes_on() -> None:
    """Its ranks wait; nobody is lost, though no heartbeat came for longer than the limit of a rank."""
    with FaultyGroup(config(unresponsive_timeout_s=0.3)) as group:
        future = group.executor.submit("before", gather=True)
        began = time.monotonic()
        group.freeze_driver(0.6)
        assert time.monotonic() - began >= 0.6
        assert future.result(30) == ["before"] * 2
        assert group.executor.step("after", gather=True) == ["after"] * 2
        assert group.executor.health().ok


def test_a_group_without_its_run_directory_goes_on() -> None:
    """Its connections stand."""
    with FaultyGroup(config()) as group:
        group.lose_run_directory()
        assert group.executor.step("on", gather=True) == ["on"] * 2


def test_each_group_has_its_own_faults() -> None:
    """One that is restarted keeps its proxy, whatever others come and go."""
    settings = {"restart": "on_failure", "restart_backoff_s": 0.01}
    with FaultyGroup(config(**settings), frame_faults=True) as first:
        with FaultyGroup(config(), frame_faults=True) as second:
            first.kill(1)
            wait_until(lambda: first.executor.health().restarts == 1, 30.0)
            first.frames.drop(1)
            second.frames.duplicate(1)
            for group in (first, second):
                assert [group.executor.step(number, gather=True) for number in range(2)] == [[0, 0], [1, 1]]
        assert (first.frames.happened, second.frames.happened) == ({"drop": 1}, {"duplicate": 1})


def test_a_rank_that_fails_in_setup_fails_the_start() -> None:
    """And the error says which."""
    with pytest.raises(StartupError) as caught, FaultyGroup(config(), in_setup={1: "raise"}):
        pass
    assert caught.value.ranks == (1,)


def test_what_does_not_exist_is_refused() -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match="'explode': must be one of"):
        FaultyGroup(config(), in_setup={1: "explode"})
    with pytest.raises(ConfigError, match="start_method"):
        FaultyGroup(config(start_method="fork"), frame_faults=True)


def test_faults_wait_for_their_kind_of_message_and_their_rank() -> None:
    """What is not meant passes untouched."""
    from stepcast.bus.frames import Wire  # noqa: PLC0415

    wire = Wire(bytes(16), 1)
    reader = MessageReader()
    reader.carries_messages = True
    steps = [wire.pack(Kind.STEP, number) for number in (1, 2)]
    stream = bytes(64) + b"".join(b"\0" + bytes([len(each)]) + each for each in [*steps, wire.pack(Kind.HEARTBEAT)])
    # However it is cut into pieces.
    messages = [message for byte in stream for message in reader.feed(bytes([byte])) if message.head]
    assert [message.kind for message in messages] == [Kind.STEP, Kind.STEP, Kind.HEARTBEAT]

    faults = FrameFaults()
    faults.drop(1, Kind.STEP)
    assert faults.judge(0, messages[0], to_rank=True) == [(0.0, messages[0].data)]
    assert faults.judge(1, messages[2], to_rank=True) == [(0.0, messages[2].data)]
    assert faults.judge(1, messages[0], to_rank=True) == []
    assert faults.judge(1, messages[1], to_rank=True) == [(0.0, messages[1].data)]
    assert faults.happened == {"drop": 1}


def test_a_cut_is_seen_however_soon_it_is_healed() -> None:
    """What was connected before belongs to another life of the link."""
    faults = FrameFaults()
    before = faults.life(1)
    faults.cut(1)
    assert faults.life(1) is None
    faults.heal(1)
    assert faults.life(1) not in (None, before)
    assert faults.life(0) == before
