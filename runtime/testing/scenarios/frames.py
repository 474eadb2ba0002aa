"""Messages on one rank's link are lost, changed or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepcast.bus.frames import Kind
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.testing.chaos import NO_ERROR
from stepcast.runtime.testing.stage import RankScenario, Stage


def _frames(disturb: Callable[[Stage], object], count: int = 4) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        stage.fault(lambda: disturb(stage))
        stage.run(count)
        if not stage.group.frames.happened:
            raise AssertionError("no frame was disturbed")

    return run


def _heal(disturb: Callable[[Stage], object]) -> Callable[[Stage], None]:
    """A rank that can't be reached is alive, and neither answers nor computes."""

    def run(stage: Stage) -> None:
        stage.fault(lambda: disturb(stage))
        futures = stage.steps(3)
        stage.watch_until(Verdict.UNRESPONSIVE)
        stage.group.frames.heal(stage.victim)
        stage.answers(futures)

    return run


def _frame(name: str, disturb: Callable[[Stage], object], **more: Any) -> RankScenario:
    return RankScenario(name, NO_ERROR, _frames(disturb, **more), frames=True, verdict=Verdict.IDLE)


def _link(name: str, disturb: Callable[[Stage], object]) -> RankScenario:
    return RankScenario(name, NO_ERROR, _heal(disturb), frames=True, verdict=Verdict.UNRESPONSIVE)


SCENARIOS = (
    _frame("drop-step", lambda stage: stage.group.frames.drop(stage.victim)),
    _frame("drop-last-step", lambda stage: stage.group.frames.drop(stage.victim), count=1),
    _frame("drop-steps-and-replays", lambda stage: stage.group.frames.drop(stage.victim, count=6)),
    _frame("duplicate-step", lambda stage: stage.group.frames.duplicate(stage.victim)),
    _frame("reorder-steps", lambda stage: stage.group.frames.reorder(stage.victim)),
    _frame("corrupt-step", lambda stage: stage.group.frames.corrupt(stage.victim)),
    _frame("delay-step", lambda stage: stage.group.frames.delay(stage.victim, 0.3)),
    _frame("duplicate-answer", lambda stage: stage.group.frames.duplicate(stage.victim, Kind.RESULT)),
    _frame("delay-answer", lambda stage: stage.group.frames.delay(stage.victim, 0.3, Kind.RESULT), count=1),
    RankScenario(
        "drop-answer",
        "ProtocolError",
        _frames(lambda stage: stage.group.frames.drop(stage.victim, Kind.RESULT), count=1),
        frames=True,
        verdict=Verdict.SLOW,
    ),
    _link("cut-and-heal", lambda stage: stage.group.frames.cut(stage.victim)),
    _link("blackhole-and-heal", lambda stage: stage.group.frames.blackhole(stage.victim)),
    _link("stall-and-heal", lambda stage: stage.group.frames.stall(stage.victim)),
)
