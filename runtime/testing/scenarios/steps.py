"""A step or a call fails, is late, or can't be sent; a start fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from stepcast.bus.errors import StepcastError
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.testing.chaos import NO_ERROR
from stepcast.runtime.testing.stage import RankScenario, Stage

from .common import COLLECTIVE, FAILED, LATE, PARKED, SHORT, in_step

#: What expires at once does so within this, on a busy machine too; a wait for an answer would take longer.
_AT_ONCE_S = 0.2
#: A thread that waits may use this share of a processor.
_WAITING_CORES = 0.5


def _seen(stage: Stage, act: Callable[[], object]) -> None:
    try:
        act()
    except StepcastError as error:
        stage.record.see(error)


def _stay_past_limit(fault: str) -> Callable[[Stage], None]:
    """The error has to name the limit's setting."""

    def run(stage: Stage) -> None:
        stage.group.in_next_step(stage.victim, fault)
        stage.fault(lambda: None)
        futures = stage.steps(4)
        text = str(stage.outcome(futures[0]))
        if "step_timeout_s" not in text or f"rank {stage.victim}" not in text:
            raise AssertionError(f"the error names not the setting, or not the rank: {text}")
        stage.answers(futures)

    return run


def _off_output_rank(stage: Stage) -> None:
    stage.victim = stage.draw.randrange(1, stage.world_size)


def _raise_in_pipeline(stage: Stage) -> None:
    """Two steps are under way; the first fails on a rank whose answer nobody asked for: the second is served right."""
    _off_output_rank(stage)
    stage.group.in_next_step(stage.victim, "raise")
    stage.fault(lambda: None)
    first, second = stage.steps(2)
    failure = stage.outcome(first)
    if failure is None:
        raise AssertionError("the step that failed was answered")
    stage.record.lost_steps += 1
    stage.record.see(failure)
    if (answer := second.result(0 if second.done() else _AT_ONCE_S * 25)) != [1] * stage.world_size:
        raise AssertionError(f"the step after the one that failed was answered {answer!r}")
    stage.serve_on()


def _raise_off_output_rank(stage: Stage) -> None:
    """The peers, the output rank among them, sit in the collective."""
    _off_output_rank(stage)
    stage.group.in_next_step(stage.victim, "raise")
    stage.fault(lambda: stage.run(2))


def _own_limit(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "sleep", 0.6)
    stage.fault(lambda: stage.answers(stage.steps(1, timeout_s=0.2)))
    stage.serve_on()  # its own answer, not the late one


def _late_call(stage: Stage) -> None:
    """A call past its own limit; the next one must get its own answers, not the late ones."""
    executor = stage.group.executor
    stage.fault(lambda: _seen(stage, lambda: executor.call("sleep", 0.5, timeout_s=0.15)))
    stage.look()
    stage.call()


def _call_during_step(stage: Stage) -> None:
    """A call while a step is under way takes its turn."""
    stage.group.in_next_step(stage.victim, "sleep", 0.4)
    futures = stage.steps(2)
    stage.fault(stage.call)
    stage.answers(futures)


def _expired_limit(stage: Stage) -> None:
    stage.fault(lambda: stage.steps(1, timeout_s=-1.0))
    if time.monotonic() - stage.record.fault_at > _AT_ONCE_S:
        raise AssertionError("a limit that has passed already was waited for")
    stage.serve_on()


def _unsendable_step(stage: Stage) -> None:
    stage.fault(lambda: _seen(stage, lambda: stage.group.executor.step(object())))
    stage.serve_on()


def _fill_queue(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "sleep", 1.0)
    futures = stage.steps(2)
    stage.fault(lambda: futures.extend(stage.steps(1)))
    lost = stage.record.lost_steps
    stage.answers(futures)
    if (lost, stage.record.lost_steps) != (1, 1):
        raise AssertionError(f"{stage.record.lost_steps} steps were lost, not the one that was refused")


def _kill_with_full_queue(stage: Stage) -> None:
    """A submission waits for room, of which the dead rank will make none: it is refused, and did not spin."""
    stage.group.in_next_step(stage.victim, "sleep")
    futures = stage.steps(2)
    kill = threading.Timer(0.5, lambda: stage.fault(lambda: stage.group.kill(stage.victim)))
    kill.start()
    began, cpu_began = time.monotonic(), time.thread_time()
    try:
        futures += stage.steps(1)
    finally:
        kill.join()
    cores = (time.thread_time() - cpu_began) / (time.monotonic() - began)
    if cores > _WAITING_CORES:
        raise AssertionError(f"the submission took {cores:.0%} of a processor while it waited")
    stage.answers(futures)


def _stay_in_teardown(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "teardown")
    stage.run(1)


def _shut_down_while_stuck(stage: Stage) -> None:
    """SIGTERM leaves a rank the time to run its exit handlers."""
    stage.group.executor.call("note_at_exit", str(stage.group.config.run_dir))
    stage.group.in_next_step(stage.victim, "sleep")
    futures = stage.steps(1)
    stage.look()
    stage.fault(lambda: _seen(stage, stage.group.executor.shutdown))
    stage.answers(futures)
    if not Path(str(stage.group.config.run_dir), f"exited-{stage.victim}").exists():
        raise AssertionError(f"rank {stage.victim} was ended without its exit handlers")


def _nothing(_: Stage) -> None:
    """The start is to fail."""


_STUCK = Verdict.STUCK

SCENARIOS = (
    RankScenario("raise-in-step", FAILED, in_step("raise", then=True), verdict=Verdict.IDLE),
    RankScenario("raise-in-pipeline", FAILED, _raise_in_pipeline, verdict=Verdict.IDLE),
    RankScenario("raise-before-collective", FAILED, in_step("raise"), settings=COLLECTIVE, verdict=Verdict.BUSY),
    RankScenario("raise-off-output-rank", FAILED, _raise_off_output_rank, settings=COLLECTIVE, verdict=Verdict.BUSY),
    RankScenario(
        "extra-collective", "Diverged", in_step("extra_collective"), settings=COLLECTIVE, verdict=Verdict.BUSY
    ),
    RankScenario("unsendable-answer", FAILED, in_step("answer", then=True), verdict=Verdict.IDLE),
    RankScenario("unsendable-step", "ProtocolError", _unsendable_step, verdict=Verdict.IDLE),
    RankScenario("slow-rank", NO_ERROR, in_step("sleep", 0.5), verdict=Verdict.SLOW),
    RankScenario("slow-rank-in-collective", NO_ERROR, in_step("sleep", 0.5), settings=COLLECTIVE, verdict=Verdict.BUSY),
    RankScenario("stuck-past-limit", LATE, _stay_past_limit("sleep"), settings=SHORT, verdict=_STUCK),
    RankScenario(
        "stuck-and-deaf-to-sigterm", LATE, _stay_past_limit("sleep_ignoring_sigterm"), settings=SHORT, verdict=_STUCK
    ),
    RankScenario("own-limit", LATE, _own_limit, verdict=Verdict.BUSY),
    RankScenario("late-answer-to-call", LATE, _late_call, verdict=Verdict.BUSY),
    RankScenario("call-during-step", NO_ERROR, _call_during_step, verdict=Verdict.IDLE),
    RankScenario("expired-limit", LATE, _expired_limit, verdict=Verdict.IDLE),
    RankScenario(
        "queue-full",
        "Backpressure",
        _fill_queue,
        settings={"max_in_flight": 2, "backpressure_timeout_s": 0.4},
        verdict=Verdict.SLOW,
    ),
    RankScenario(
        "kill-with-full-queue",
        "Closed",
        _kill_with_full_queue,
        settings={"max_in_flight": 2, "backpressure_timeout_s": 30.0},
        verdict=Verdict.GONE,
    ),
    RankScenario(
        "call-to-ranks-in-broadcast",
        NO_ERROR,
        _call_during_step,
        settings={**PARKED, "keepalive": "collective", "collective_timeout_s": 10.0},
        verdict=Verdict.IDLE,
    ),
    RankScenario(
        "stuck-in-teardown", NO_ERROR, _stay_in_teardown, settings={"stop_timeout_s": 0.5}, verdict=Verdict.IDLE
    ),
    RankScenario(
        "shut-down-while-stuck",
        "Closed",
        _shut_down_while_stuck,
        settings={"stop_timeout_s": 0.3, "terminate_timeout_s": 5.0},
        verdict=Verdict.BUSY,
        start_method="spawn",  # multiprocessing's children have no exit handlers
        not_under={"torchrun": "its agent sends SIGTERM to all; ranks leave it to the driver what it means"},
    ),
    RankScenario("raise-in-setup", "StartupError", _nothing, in_setup="raise"),
    RankScenario("exit-in-setup", "StartupError", _nothing, in_setup="exit"),
    RankScenario("kill-in-setup", "StartupError", _nothing, in_setup="kill"),
    RankScenario("sleep-in-setup", "StartupError", _nothing, settings={"startup_timeout_s": 3.0}, in_setup="sleep"),
)
