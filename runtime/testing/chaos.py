"""Runs scenarios against live groups, and tells what became of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepcast.bus.errors import StepcastError
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.state import GroupState
from stepcast.runtime.step import StepFuture

from .census import Census
from .group import FaultyGroup, wait_for_ends

NO_ERROR = "none"
#: How long an outcome may take before the scenario counts as hung; every limit of `SETTINGS` is far below it.
_HANG_S = 45.0
_GONE_WITHIN_S = 10.0
_LEAK_GRACE_S = 5.0
SETTINGS: dict[str, Any] = {
    "startup_timeout_s": 60.0,
    "step_timeout_s": 30.0,
    "backpressure_timeout_s": 1.0,
    "heartbeat_interval_s": 0.2,
    "stop_timeout_s": 2.0,
    "terminate_timeout_s": 1.0,
    "kill_timeout_s": 5.0,
    "log_level": "ERROR",
}


@dataclass(frozen=True)
class Scenario:
    """A fault, and what should come of it.

    Attributes:
        name: its name.
        expected: the error's type that the embedder should see, or "none".
        play: does it, on a stage.
        settings: the group's, beside `SETTINGS`.
        frames: whether it disturbs frames.
        in_setup: what the victim does in its setup.
    """

    name: str
    expected: str
    play: Callable[[Stage], None]
    settings: dict[str, Any] = field(default_factory=dict)
    frames: bool = False
    in_setup: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        scenario: its name.
        passed: whether what was seen is what was expected, nothing hung and nothing was left.
        expected, seen: the error's type, or "none".
        detected_ms: from the fault until the embedder knew; None where there was no error.
        released_ms: from the fault until no process of the group was left; None where the group lived on.
        lost_steps: steps that were submitted and not answered.
        leaks: what was left behind.
        start_method, world_size, seed: what it ran with.
        problem: what else went wrong.
    """

    scenario: str
    passed: bool
    expected: str
    seen: str
    detected_ms: float | None
    released_ms: float | None
    lost_steps: int
    leaks: list[str]
    start_method: str
    world_size: int
    seed: int
    problem: str | None = None


class Stage:
    """Where a scenario plays: a live group, a victim, and a record of what was submitted and seen.

    Args:
        group: the group.
        draw: the scenario's chance.
        failures: the errors that have ended the group, with the clock's reading.
    """

    def __init__(self, group: FaultyGroup, draw: random.Random, failures: list[tuple[float, StepcastError]]) -> None:
        self.group = group
        self.draw = draw
        self.victim = draw.randrange(group.config.world_size)
        self.fault_at = 0.0
        self.lost_steps = 0
        self.seen: StepcastError | None = None
        self.seen_at = 0.0
        self._failures = failures

    def fault(self, inject: Callable[[], object]) -> None:
        """Inject the fault, and note when."""
        self.fault_at = time.monotonic()
        inject()

    def steps(self, count: int, *, timeout_s: float | None = None) -> list[StepFuture]:
        """Submit steps; an error of the submission is seen."""
        futures = []
        for number in range(count):
            try:
                futures.append(self.group.executor.submit(number, gather=True, timeout_s=timeout_s))
            except StepcastError as error:
                self.lost_steps += 1
                self.see(error)
        return futures

    def answers(self, futures: list[StepFuture]) -> None:
        """Wait for all outcomes: right answers, or the error that is seen first."""
        for number, future in enumerate(futures):
            error = future.exception(_HANG_S)
            if error is None:
                expected = [number] * self.group.config.world_size
                if self.group.config.worker_options["stepcast.testing.worker"].endswith(":Collective"):
                    expected = [number * self.group.config.world_size] * self.group.config.world_size
                if future.result(0) != expected:
                    raise AssertionError(f"step {number} was answered {future.result(0)!r}")
            else:
                self.lost_steps += 1
                if isinstance(error, StepcastError):
                    self.see(error)

    def run(self, count: int = 4) -> None:
        """Submit steps, and wait for their outcomes."""
        self.answers(self.steps(count))

    def wait(self, seconds: float) -> None:
        """Let time pass in which nothing is submitted."""
        time.sleep(seconds)

    def await_failure(self) -> None:
        """Wait until the group has failed, with no step under way."""
        deadline = time.monotonic() + _HANG_S
        while not self._failures:
            if time.monotonic() > deadline:
                raise TimeoutError("the group did not fail")
            time.sleep(0.001)
        self.seen_at, self.seen = self._failures[0]

    def see(self, error: StepcastError) -> None:
        """Note the first error."""
        if self.seen is None:
            self.seen, self.seen_at = error, time.monotonic()


def play(scenario: Scenario, *, world_size: int, start_method: str, seed: int) -> Outcome:
    """Run one scenario on a group of its own.

    Args:
        scenario: the scenario.
        world_size: the number of ranks.
        start_method: how they are started; a scenario of frames is started by "spawn" in place of "fork".
        seed: decides what is drawn.

    Returns:
        What became of it.
    """
    if scenario.frames and start_method == "fork":
        start_method = "spawn"
    draw = random.Random(f"{seed} {scenario.name}")  # noqa: S311 - to be drawn again
    settings = {"worker": "stepcast.workers.echo:Echo", **SETTINGS, **scenario.settings}
    config = ExecutorConfig(world_size=world_size, start_method=start_method, backend="mp", **settings)
    failures: list[tuple[float, StepcastError]] = []
    in_setup = {} if scenario.in_setup is None else {draw.randrange(world_size): scenario.in_setup}
    census = Census()
    seen, detected_ms, released_ms, lost, problem = NO_ERROR, None, None, 0, None
    began = time.monotonic()
    try:
        group = FaultyGroup(
            config,
            frame_faults=scenario.frames,
            in_setup=in_setup,
            on_failure=lambda error: failures.append((time.monotonic(), error)),
        )
        with group:
            stage = Stage(group, draw, failures)
            pids = group.executor.worker_pids
            stage.fault_at = time.monotonic()
            scenario.play(stage)
            lost = stage.lost_steps
            if stage.seen is not None:
                seen = type(stage.seen).__name__
                detected_ms = (stage.seen_at - stage.fault_at) * 1e3
            if group.executor.state is GroupState.FAILED:
                if not wait_for_ends(pids, _GONE_WITHIN_S):
                    problem = f"processes are left {_GONE_WITHIN_S:g} s after the group has failed"
                released_ms = (time.monotonic() - stage.fault_at) * 1e3
    except StepcastError as error:
        seen, detected_ms = type(error).__name__, (time.monotonic() - began) * 1e3
        released_ms = detected_ms
    except Exception as error:  # noqa: BLE001 - a scenario that breaks must not end the others
        problem = f"{type(error).__name__}: {error}"
    leaks = census.leaks(_LEAK_GRACE_S)
    return Outcome(
        scenario=scenario.name,
        passed=seen == scenario.expected and problem is None and not leaks and (seen != NO_ERROR or lost == 0),
        expected=scenario.expected,
        seen=seen,
        detected_ms=detected_ms,
        released_ms=released_ms,
        lost_steps=lost,
        leaks=leaks,
        start_method=start_method,
        world_size=world_size,
        seed=seed,
        problem=problem,
    )
