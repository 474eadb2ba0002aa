"""Collectives are counted, ranks that disagree on them are found, and an idle group dies of none."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepcast import Executor, ExecutorConfig
from stepcast.bus.errors import Diverged, StartupError, StepcastError, StepFailed, WorkerLost
from stepcast.bus.tally import last_collective
from tests.faults.rig import SETTINGS
from tests.harness import wait_until

pytest.importorskip("torch")

HERE = Path(__file__).parent
#: Long enough that no test waits for it.
FAR_S = 120.0
LIMIT_S = 30.0


def config(worker: str = "Collectives", world_size: int = 2, **settings: Any) -> ExecutorConfig:
    settings = {"collective_timeout_s": FAR_S, "heartbeat_interval_s": 0.2, **settings}
    return ExecutorConfig(
        worker=f"{HERE}/collective_victims.py:{worker}", backend="mp", world_size=world_size, **{**SETTINGS, **settings}
    )


def tallies(future: Any) -> list[tuple[int, str]]:
    return [(times.collectives, last_collective(times.fingerprint)) for _, times in sorted(future.times.items())]


def test_collectives_are_counted_whoever_calls_them() -> None:
    words = ["all_reduce", "functional", "broadcast 2", "gathered", "asynchronous"]
    with Executor(config(world_size=3)) as executor:
        future = executor.submit(words, gather=True)
        assert future.result() == [[6.0, 6.0, 1.0, [1.0, 2.0, 3.0], 6.0]] * 3
        assert tallies(future) == [(5, "all_reduce")] * 3
        assert all(0 < times.waited_ns < times.compute_ns for times in future.times.values())
        # Each step begins anew; a group that not every rank is in does not count, nor does a step without any.
        for words, tally in ([["all_reduce"], (1, "all_reduce")], [["pair"], (0, "none")], [[], (0, "none")]):
            future = executor.submit(words, gather=True)
            future.result()
            assert tallies(future) == [tally] * 3


def test_nothing_is_counted_where_it_is_not_asked_for() -> None:
    with Executor(config(check_collectives=False)) as executor:
        assert executor.call("backend") == ["gloo", "gloo"]
        future = executor.submit(["all_reduce"], gather=True)
        assert future.result() == [[3.0], [3.0]]
        assert tallies(future) == [(0, "none"), (0, "none")]


def test_an_extra_collective_of_one_rank_is_found_before_its_timeout() -> None:
    began = time.monotonic()
    with Executor(config()) as executor, pytest.raises(Diverged) as raised:
        executor.step({"0": ["all_reduce"], "1": ["all_reduce", "all_reduce 4"]}, gather=True)
    assert raised.value.step == 1
    assert raised.value.counts == {0: 1, 1: 2}
    assert raised.value.last == {0: "all_reduce", 1: "all_reduce float32[4] SUM"}
    assert "rank 0 answered after 1" in str(raised.value)
    assert "rank 1 has entered 2" in str(raised.value)
    assert time.monotonic() - began < FAR_S


def test_different_collectives_at_the_same_count_are_found_before_their_timeout() -> None:
    with Executor(config()) as executor, pytest.raises(Diverged) as raised:
        executor.step({"0": ["all_reduce", "all_reduce 4"], "1": ["all_reduce", "broadcast 4"]})
    assert raised.value.counts == {0: 2, 1: 2}
    assert raised.value.last == {0: "all_reduce float32[4] SUM", 1: "broadcast float32[4] from 0"}


def test_answers_after_different_collectives_end_the_group() -> None:
    """Here no rank hangs: the extra collective is one that nobody waits for."""
    with Executor(config(heartbeat_interval_s=60.0)) as executor:
        with pytest.raises(Diverged) as raised:
            executor.step({"0": ["all_reduce"], "1": ["all_reduce", "abandoned"]}, gather=True)
        assert raised.value.counts == {0: 1, 1: 2}


def test_a_rank_that_is_only_behind_is_not_diverged(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Executor(config()) as executor:
        future = executor.submit({"0": ["all_reduce", "all_reduce"], "1": ["all_reduce", f"gate {gate}", "all_reduce"]})
        wait_until(lambda: executor.health().ranks[0].phase == "collective")
        heard = executor.health().ranks[0].phase_age_s
        wait_until(lambda: executor.health().ranks[0].phase_age_s > heard + 1.0)  # five heartbeats
        assert executor.health().ranks[1].phase == "step"
        gate.touch()
        assert future.result() == [3.0, 3.0]
        assert executor.step(["all_reduce"]) == [3.0]


# Keepalive. The timeout is scaled down; who is idle for longer than that is idle for too long.

TIMEOUT_S = 6.0
IDLE_S = 20.0
KEEPALIVE = {"keepalive": "collective", "keepalive_every": 3}
LIVING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Parked", KEEPALIVE),
    ("Collectives", KEEPALIVE),
    ("Collectives", {}),
)


@pytest.mark.slow
def test_idle_ranks_die_only_inside_a_broadcast_without_keepalive() -> None:
    with contextlib.ExitStack() as stack:
        start = functools.partial(config, collective_timeout_s=TIMEOUT_S)
        living = [stack.enter_context(Executor(start(worker, **settings))) for worker, settings in LIVING]
        dying = stack.enter_context(Executor(start("Parked")))
        groups = [*living, dying]
        assert [executor.step(["all_reduce"]) for executor in groups] == [[3.0]] * 4
        wait_until(lambda: dying.health().ranks[1].phase == "parked")
        idle_until = time.monotonic() + IDLE_S
        wait_until(lambda: time.monotonic() >= idle_until, 2 * IDLE_S)
        with pytest.raises(StepcastError, match="Timed out"):
            dying.step(["all_reduce"])
        assert [executor.health().failure for executor in living] == [None] * 3
        assert [executor.health().published > 2 for executor in living] == [True, True, False]
        assert [executor.step(["all_reduce", "functional"]) for executor in living] == [[3.0, 3.0]] * 3


def test_parked_ranks_take_steps_calls_and_stop_in_order() -> None:
    with Executor(config("Parked", world_size=3)) as executor:
        futures = [executor.submit([f"all_reduce {size}"], gather=True) for size in (1, 2, 3)]
        assert [future.result() for future in futures] == [[[6.0]] * 3] * 3
        assert len(set(executor.call("pids"))) == 3
        wait_until(lambda: [each.phase for each in executor.health().ranks] == ["idle", "parked", "parked"])


def test_a_rank_killed_while_parked_is_lost_at_once() -> None:
    with Executor(config("Parked")) as executor:
        executor.step(["all_reduce"])
        wait_until(lambda: executor.health().ranks[1].phase == "parked")
        os.kill(executor.worker_pids[1], signal.SIGKILL)
        wait_until(lambda: executor.health().failure is not None, 5.0)
        with pytest.raises(StepcastError) as raised:
            executor.step(["all_reduce"])
        assert isinstance(raised.value.__cause__, WorkerLost)
        assert raised.value.__cause__.rank == 1


def test_parking_in_a_broadcast_needs_a_process_group() -> None:
    with pytest.raises(StartupError, match="has not made a process group"):
        Executor(config("ParkedWithoutGroup"))


def test_a_rank_lost_while_the_others_tear_down_holds_up_nobody() -> None:
    """The others are in a barrier that the lost one never enters: they are ended without it."""
    with ThreadPoolExecutor(1) as thread:
        executor = Executor(config("LeavesTogether", world_size=3, stop_timeout_s=FAR_S))
        began = time.monotonic()
        stopping = thread.submit(executor.shutdown)
        wait_until(lambda: {each.phase for each in executor.health().ranks} == {"stopping"})
        os.kill(executor.worker_pids[1], signal.SIGKILL)
        with contextlib.suppress(WorkerLost):
            stopping.result(FAR_S)
        assert time.monotonic() - began < FAR_S


def test_health_names_the_rank_that_the_others_wait_for() -> None:
    with Executor(config(world_size=3)) as executor:
        for _ in range(4):
            executor.step({"0": ["all_reduce"], "1": ["nap", "all_reduce"], "2": ["all_reduce"]}, gather=True)
        straggler = executor.health().straggler
        assert straggler is not None
        assert (straggler.rank, straggler.cause) == (1, "compute")
        assert straggler.lead_s > 0.05


def test_no_collective_of_a_later_step_answers_that_of_a_failed_one() -> None:
    """A rank that raised before its peers' all-reduce takes no other step: no step gets a wrong result."""
    with Executor(config(failure_grace_s=0.3)) as executor:
        assert executor.step(["all_reduce"]) == [3.0]
        futures = [executor.submit({"0": ["all_reduce"], "1": ["no such word"]})]
        futures += [executor.submit(["all_reduce"]) for _ in range(3)]
        errors = [future.exception(LIMIT_S) for future in futures]
    assert [type(error) for error in errors] == [StepFailed] * 4
    assert {error.epoch_ended for error in errors if isinstance(error, StepFailed)} == {True}


def test_steps_behind_a_failed_one_go_on_where_every_rank_has_answered_it() -> None:
    """Nobody sits in a collective: the failed step fails alone, and the steps behind it are right."""
    with Executor(config()) as executor:
        futures = [executor.submit(["no such word"], gather=True)]
        futures += [executor.submit(["all_reduce"], gather=True) for _ in range(3)]
        assert isinstance(futures[0].exception(LIMIT_S), StepFailed)
        assert [future.result(LIMIT_S) for future in futures[1:]] == [[[3.0], [3.0]]] * 3
