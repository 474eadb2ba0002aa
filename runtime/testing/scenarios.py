"""The scenarios of `stepcast chaos`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepcast.bus.errors import StepcastError
from stepcast.bus.frames import Kind

from .chaos import NO_ERROR, Scenario, Stage

_LOST, _FAILED, _LATE = "WorkerLost", "StepFailed", "StepTimeout"
_COLLECTIVE = {"worker": "stepcast.runtime.testing.worker:Collective"}
_SHORT = {"step_timeout_s": 1.0}


def _in_step(fault: str, seconds: float = 3600.0, *, count: int = 4, then: bool = False) -> Callable[[Stage], None]:
    """One rank fails in a step; `then`: the group must serve the next ones."""

    def run(stage: Stage) -> None:
        stage.group.in_next_step(stage.victim, fault, seconds)
        stage.fault(lambda: stage.run(1 if then else count))
        if then:
            _serve_on(stage)

    return run


def _serve_on(stage: Stage) -> None:
    answer = stage.group.executor.step("on", gather=True)
    if answer != ["on"] * stage.group.config.world_size:
        raise AssertionError(f"the next step was answered {answer!r}")


def _kill_idle(stage: Stage) -> None:
    stage.run()
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.await_failure()


def _kill_all(stage: Stage) -> None:
    def kill_each() -> None:
        for rank in range(stage.group.config.world_size):
            stage.group.kill(rank)

    stage.fault(kill_each)
    stage.await_failure()


def _kill_while_others_wait(stage: Stage) -> None:
    """The victim sleeps; its peers are in the step, or in its collective; then it is killed."""
    stage.group.in_next_step(stage.victim, "sleep")
    futures = stage.steps(4)
    stage.wait(0.3)  # they get into it meanwhile
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.answers(futures)


def _kill_stopped(stage: Stage) -> None:
    stage.group.stop(stage.victim)
    futures = stage.steps(2)
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.answers(futures)


def _stop_and_resume(stage: Stage) -> None:
    stage.fault(lambda: stage.group.stop(stage.victim))
    futures = stage.steps(4)
    stage.group.resume(stage.victim)
    stage.answers(futures)


def _stop_for_good(stage: Stage) -> None:
    stage.fault(lambda: stage.group.stop(stage.victim))
    stage.run(1)


def _fill_queue(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "sleep", 2.0)
    futures = stage.steps(2)
    stage.fault(lambda: futures.extend(stage.steps(1)))
    lost = stage.lost_steps
    stage.answers(futures)
    if (lost, stage.lost_steps) != (1, 1):
        raise AssertionError(f"{stage.lost_steps} steps were lost, not the one that was refused")


def _own_limit(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "sleep", 0.6)
    stage.fault(lambda: stage.answers(stage.steps(1, timeout_s=0.2)))
    _serve_on(stage)  # its own answer, not the late one


def _expired_limit(stage: Stage) -> None:
    stage.fault(lambda: stage.steps(1, timeout_s=-1.0))
    _serve_on(stage)


def _unsendable_step(stage: Stage) -> None:
    try:
        stage.group.executor.step(object())
    except StepcastError as error:
        stage.see(error)
    _serve_on(stage)


def _stay_in_teardown(stage: Stage) -> None:
    stage.group.in_next_step(stage.victim, "teardown")
    stage.run(1)


def _idle_past_the_collective_limit(stage: Stage) -> None:
    stage.run(1)
    stage.wait(2.5)
    stage.run(1)


def _nothing(_: Stage) -> None:
    """The start is to fail."""


def _frames(disturb: Callable[[Stage], object], count: int = 4) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        stage.fault(lambda: disturb(stage))
        stage.run(count)
        if not stage.group.frames.happened:
            raise AssertionError("no frame was disturbed")

    return run


def _heal(disturb: Callable[[Stage], object]) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        stage.fault(lambda: disturb(stage))
        futures = stage.steps(3)
        stage.wait(0.5)
        stage.group.frames.heal(stage.victim)
        stage.answers(futures)

    return run


def _frame(name: str, disturb: Callable[[Stage], object], expected: str = NO_ERROR, **more: Any) -> Scenario:
    return Scenario(name, expected, _frames(disturb, **more), frames=True)


SCENARIOS = (
    Scenario("kill-idle", _LOST, _kill_idle),
    Scenario("kill-all", _LOST, _kill_all),
    Scenario("kill-in-step", _LOST, _in_step("kill")),
    Scenario("kill-while-peers-wait", _LOST, _kill_while_others_wait),
    Scenario("kill-in-collective", _LOST, _kill_while_others_wait, _COLLECTIVE),
    Scenario("kill-stopped", _LOST, _kill_stopped),
    Scenario("exit-in-step", _LOST, _in_step("exit")),
    Scenario("exit-cleanly-in-step", _LOST, _in_step("exit_cleanly")),
    Scenario("os-exit-in-step", _LOST, _in_step("os_exit")),
    Scenario("segfault-in-step", _LOST, _in_step("segfault")),
    Scenario("stop-and-resume", NO_ERROR, _stop_and_resume),
    Scenario("stop-past-limit", _LATE, _stop_for_good, _SHORT),
    Scenario("raise-in-step", _FAILED, _in_step("raise", then=True)),
    Scenario("raise-before-collective", _FAILED, _in_step("raise"), _COLLECTIVE),
    Scenario("unsendable-answer", _FAILED, _in_step("answer", then=True)),
    Scenario("unsendable-step", "ProtocolError", _unsendable_step),
    Scenario("slow-rank", NO_ERROR, _in_step("sleep", 0.5)),
    Scenario("slow-rank-in-collective", NO_ERROR, _in_step("sleep", 0.5), _COLLECTIVE),
    Scenario("hold-gil", NO_ERROR, _in_step("hold_gil", 1.0)),
    Scenario("hold-gil-past-limit", _LATE, _in_step("hold_gil"), _SHORT),
    Scenario("stuck-past-limit", _LATE, _in_step("sleep"), _SHORT),
    Scenario("stuck-and-deaf-to-sigterm", _LATE, _in_step("sleep_ignoring_sigterm"), _SHORT),
    Scenario("own-limit", _LATE, _own_limit),
    Scenario("expired-limit", _LATE, _expired_limit),
    Scenario("queue-full", "Backpressure", _fill_queue, {"max_in_flight": 2}),
    Scenario("stuck-in-teardown", NO_ERROR, _stay_in_teardown),
    Scenario(
        "idle-past-collective-limit",
        NO_ERROR,
        _idle_past_the_collective_limit,
        {
            **_COLLECTIVE,
            "collective_timeout_s": 2.0,
        },
    ),
    Scenario("raise-in-setup", "StartupError", _nothing, in_setup="raise"),
    Scenario("exit-in-setup", "StartupError", _nothing, in_setup="exit"),
    Scenario("kill-in-setup", "StartupError", _nothing, in_setup="kill"),
    Scenario("sleep-in-setup", "StartupError", _nothing, {"startup_timeout_s": 8.0}, in_setup="sleep"),
    _frame("drop-step", lambda stage: stage.group.frames.drop(stage.victim)),
    _frame("drop-last-step", lambda stage: stage.group.frames.drop(stage.victim), count=1),
    _frame("drop-steps-and-replays", lambda stage: stage.group.frames.drop(stage.victim, count=6)),
    _frame("duplicate-step", lambda stage: stage.group.frames.duplicate(stage.victim)),
    _frame("reorder-steps", lambda stage: stage.group.frames.reorder(stage.victim)),
    _frame("corrupt-step", lambda stage: stage.group.frames.corrupt(stage.victim)),
    _frame("delay-step", lambda stage: stage.group.frames.delay(stage.victim, 0.3)),
    _frame("duplicate-answer", lambda stage: stage.group.frames.duplicate(stage.victim, Kind.RESULT)),
    _frame("delay-answer", lambda stage: stage.group.frames.delay(stage.victim, 0.3, Kind.RESULT), count=1),
    _frame("drop-answer", lambda stage: stage.group.frames.drop(stage.victim, Kind.RESULT), "ProtocolError", count=1),
    Scenario("cut-and-heal", NO_ERROR, _heal(lambda stage: stage.group.frames.cut(stage.victim)), frames=True),
    Scenario("stall-and-heal", NO_ERROR, _heal(lambda stage: stage.group.frames.stall(stage.victim)), frames=True),
)
