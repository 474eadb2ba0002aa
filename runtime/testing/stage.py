"""Where scenarios play whose victim is a rank: a live group in this process, and what is seen of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as StillWaiting  # the built-in one from Python 3.11 on
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stepcast.bus.errors import StepcastError
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.config import ExecutorConfig, started_by_torchrun
from stepcast.runtime.state import GroupState
from stepcast.runtime.step import StepFuture

from .chaos import HANG_S, Record, Scenario
from .group import FaultyGroup, wait_for_ends
from .job import play_in_job

#: Between two looks at the victim.
_LOOK_S = 0.01
_GONE_WITHIN_S = 10.0


class Stage:
    """A live group, a victim, and a record of what was submitted and seen.

    Args:
        group: the group.
        draw: the scenario's chance.
        failures: the errors that have ended the group, with the clock's reading.
        record: where to note what is seen.

    Attributes:
        victim: the rank that the fault is done to.
    """

    def __init__(
        self,
        group: FaultyGroup,
        draw: random.Random,
        failures: list[tuple[float, StepcastError]],
        record: Record,
    ) -> None:
        self.group = group
        self.draw = draw
        self.record = record
        self.victim = draw.randrange(group.config.world_size)
        self._failures = failures

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.group.config.world_size

    def fault(self, inject: Callable[[], object]) -> None:
        """Inject the fault, and note when."""
        self.record.fault_at = time.monotonic()
        inject()

    def steps(self, count: int, *, timeout_s: float | None = None) -> list[StepFuture]:
        """Submit steps, each with its number; an error of the submission is seen."""
        futures = []
        for number in range(count):
            try:
                futures.append(self.group.executor.submit(number, gather=True, timeout_s=timeout_s))
            except StepcastError as error:
                self.record.lost_steps += 1
                self.record.see(error)
        return futures

    def answers(self, futures: list[StepFuture]) -> None:
        """Wait for all outcomes, watching the victim: right answers, or the error that is seen first."""
        factor = self.world_size if str(self.group.config.worker_options["stepcast.testing.worker"]) in _SUMS else 1
        for number, future in enumerate(futures):
            error = self.outcome(future)
            if error is None:
                if future.result(0) != [number * factor] * self.world_size:
                    raise AssertionError(f"step {number} was answered {future.result(0)!r}")
            else:
                self.record.lost_steps += 1
                self.record.see(error)

    def outcome(self, future: StepFuture) -> StepcastError | None:
        """Wait for a step's outcome, watching the victim."""
        deadline = time.monotonic() + HANG_S
        self.look()
        while True:
            try:
                error = future.exception(_LOOK_S)
            except StillWaiting:
                self.look()
                if time.monotonic() > deadline:
                    raise
            else:
                if error is None or isinstance(error, StepcastError):
                    return error
                raise error

    def run(self, count: int = 4) -> None:
        """Submit steps, and wait for their outcomes."""
        self.answers(self.steps(count))

    def serve_on(self) -> None:
        """The group must serve one more step."""
        answer = self.group.executor.step("on", gather=True)
        if answer != ["on"] * self.world_size:
            raise AssertionError(f"the next step was answered {answer!r}")

    def call(self) -> None:
        """Call a method on every rank; each must give its own answer to this call."""
        word = self.draw.random()
        answers = self.group.executor.call("say", word)
        if answers != [[rank, word] for rank in range(self.world_size)]:
            raise AssertionError(f"the call with {word} was answered {answers!r}")

    def look(self) -> Verdict:
        """Look at the victim, as the embedder can: without asking it. The group is green only if all ranks are."""
        health = self.group.executor.health()
        verdict = self.record.judged(health.ranks[self.victim].verdict)
        if health.ok and not verdict.is_healthy:
            raise AssertionError(f"health() is ok, and rank {self.victim} is {verdict}")
        return verdict

    def watch_until(self, verdict: Verdict) -> None:
        """Watch the victim until it is judged so."""
        deadline = time.monotonic() + HANG_S
        while self.look() is not verdict:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.victim} is {self.record.verdicts[-1]}, and not {verdict}")
            time.sleep(_LOOK_S)

    def wait(self, seconds: float) -> None:
        """Let time pass in which nothing is submitted, watching the victim."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.look()
            time.sleep(min(_LOOK_S, left_s))

    def await_failure(self) -> StepcastError:
        """Wait until the group has failed, with no step under way; returns why."""
        deadline = time.monotonic() + HANG_S
        while not self._failures:
            if time.monotonic() > deadline:
                raise TimeoutError("the group did not fail")
            self.look()
            time.sleep(_LOOK_S)
        at, error = self._failures[0]
        self.record.see(error, at)
        return error


#: Workers whose answer is the sum of what every rank was sent.
_SUMS = frozenset(f"stepcast.runtime.testing.worker:{name}" for name in ("Collective", "ParkedCollective"))


@dataclass(frozen=True)
class RankScenario(Scenario):
    """A scenario whose victim is a rank of a group in this process.

    Attributes:
        play: does it, on a stage.
        frames: whether it disturbs frames; then nothing is started by "fork".
        in_setup: what the victim does in its setup.
    """

    play: Callable[[Stage], None]
    frames: bool = field(default=False, kw_only=True)
    in_setup: str | None = field(default=None, kw_only=True)
    level: ClassVar[str] = "rank"

    def method(self, wanted: str) -> str:
        """As `Scenario.method`; the proxy of frames is a thread, which has to be there before the ranks."""
        method = super().method(wanted)
        return "spawn" if self.frames and method == "fork" else method

    def run(self, config: ExecutorConfig, draw: random.Random, record: Record) -> None:
        """As `Scenario.run`; under torchrun, what torchrun starts does it."""
        if config.backend == "torchrun" and not started_by_torchrun():
            play_in_job(self, config, draw, record)
            return
        failures: list[tuple[float, StepcastError]] = []
        options: dict[str, Any] = {"on_failure": lambda error: failures.append((time.monotonic(), error))}
        if self.in_setup is not None:
            options["in_setup"] = {draw.randrange(config.world_size): self.in_setup}
        record.fault_at = time.monotonic()
        with FaultyGroup(config, frame_faults=self.frames, **options) as group:
            stage = Stage(group, draw, failures, record)
            pids = group.executor.worker_pids
            self.play(stage)
            if group.executor.state is GroupState.FAILED:
                if not wait_for_ends(pids, _GONE_WITHIN_S):
                    raise TimeoutError(f"processes are left {_GONE_WITHIN_S:g} s after the group has failed")
                record.released_at = time.monotonic()
            stage.look()
