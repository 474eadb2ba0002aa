"""What a scenario of `stepcast chaos` is, and what became of one that was played."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from stepcast.bus.errors import StepcastError, WorkerLost
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.config import ExecutorConfig

from .census import Census

NO_ERROR = "none"
#: How steps go to the ranks.
LANE = "bus"
#: How long an outcome may take before the scenario counts as hung; every limit of `SETTINGS` is far below it.
HANG_S = 45.0
#: How long what is held may take to go away.
LEAK_GRACE_S = 5.0
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


class Record:
    """What is seen while a scenario plays.

    Attributes:
        fault_at: when the fault was injected, by `time.monotonic`.
        seen: the name of the error that the embedder saw first, or "none".
        detected_at: when it saw it, or whatever else the scenario takes for the fault's detection.
        released_at: when no process was left.
        lost_steps: steps that were submitted and not answered.
        verdicts: what the driver has made of the victim since the fault, each change once.
    """

    def __init__(self) -> None:
        self.fault_at = time.monotonic()
        self.seen = NO_ERROR
        self.detected_at: float | None = None
        self.released_at: float | None = None
        self.lost_steps = 0
        self.verdicts: list[Verdict] = []

    def see(self, error: StepcastError | str, at: float | None = None) -> None:
        """Note an error, or its name, and when it was seen; the first one counts."""
        if self.seen == NO_ERROR:
            self.seen = error if isinstance(error, str) else type(error).__name__
            self.detect(at)

    def detect(self, at: float | None = None) -> None:
        """Note when the fault was detected; the first time counts."""
        if self.detected_at is None:
            self.detected_at = time.monotonic() if at is None else at

    def judged(self, verdict: str) -> Verdict:
        """Note a verdict on the victim."""
        judged = Verdict(verdict)
        if self.verdicts[-1:] != [judged]:
            self.verdicts.append(judged)
        return judged

    def verdict(self, expected: Verdict | None) -> Verdict | None:
        """The verdict to tell of: the expected one, if nothing contradicts it; else the one that does, or the last.

        A rank that should stay healthy must never have been judged otherwise; but a group that ends for another reason
        than a lost rank takes its ranks along.
        """
        if expected is None:
            return None
        if expected.is_healthy:
            wrong = [each for each in self.verdicts if not each.is_healthy]
            if self.seen != WorkerLost.__name__:
                wrong = [each for each in wrong if each is not Verdict.GONE]
            if wrong:
                return wrong[0]
        return expected if expected in self.verdicts else next(reversed(self.verdicts), None)

    def to_json(self) -> dict[str, Any]:
        """What was seen, for another process of this host."""
        return {**vars(self), "verdicts": [each.value for each in self.verdicts]}

    def restore(self, told: dict[str, Any]) -> None:
        """Take over what was seen in another process of this host: the attributes, as JSON has brought them."""
        vars(self).update(told, verdicts=[Verdict(each) for each in told["verdicts"]])

    def since_fault_ms(self, at: float | None) -> float | None:
        """Milliseconds from the fault until then."""
        return None if at is None else (at - self.fault_at) * 1e3


@dataclass(frozen=True)
class Scenario:
    """A fault, and what should come of it.

    Attributes:
        name: its name.
        expected: the error's type that the embedder should see, or "none".
        settings: the group's, beside `SETTINGS`.
        verdict: what the driver should make of the victim, while the fault lasts or after it; None where there is
            nobody to judge it, or no victim.
        start_method: how the ranks have to be started; None where it does not matter.
        not_under: the backends under which it does not apply, each with the reason.
    """

    name: str
    expected: str
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    verdict: Verdict | None = field(default=None, kw_only=True)
    start_method: str | None = field(default=None, kw_only=True)
    not_under: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    #: "rank" or "driver": which processes the fault is done to.
    level: ClassVar[str]

    def run(self, config: ExecutorConfig, draw: random.Random, record: Record) -> None:
        """Play it.

        Args:
            config: the group's settings.
            draw: the scenario's chance.
            record: where to note what is seen.

        Raises:
            Exception: something happened that should not have.
        """
        raise NotImplementedError

    def method(self, wanted: str) -> str:
        """How the ranks are started where `wanted` was asked for."""
        return self.start_method or wanted


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        scenario: its name.
        passed: whether what was seen is what was expected, nothing hung and nothing was left.
        expected, seen: the error's type, or "none".
        expected_verdict, verdict: what the driver made of the victim; None where nobody could.
        detected_ms: from the fault until the embedder knew; None where it is not to know.
        released_ms: from the fault until no process of the group was left; None where the group lived on.
        lost_steps: steps that were submitted and not answered.
        leaks: what was left behind.
        lane: how steps went to the ranks.
        backend, start_method, world_size, seed: what it ran with.
        problem: what else went wrong.
    """

    scenario: str
    passed: bool
    expected: str
    seen: str
    expected_verdict: str | None
    verdict: str | None
    detected_ms: float | None
    released_ms: float | None
    lost_steps: int
    leaks: list[str]
    lane: str
    backend: str
    start_method: str
    world_size: int
    seed: int
    problem: str | None = None


@dataclass(frozen=True)
class NotApplicable:
    """A scenario that was not played.

    Attributes:
        scenario: its name.
        backend: under which it was to be.
        not_applicable: why it was not.
    """

    scenario: str
    backend: str
    not_applicable: str


def play(scenario: Scenario, *, world_size: int, start_method: str, seed: int, backend: str = "mp") -> Outcome:
    """Run one scenario on a group of its own.

    Args:
        scenario: the scenario.
        world_size: the number of ranks.
        start_method: how they are started; some scenarios have to have it their own way.
        seed: decides what is drawn.
        backend: what runs them; the scenario applies under it.

    Returns:
        What became of it.
    """
    start_method = scenario.method(start_method)
    draw = random.Random(f"{seed} {scenario.name}")  # noqa: S311 - to be drawn again
    root = Path(tempfile.mkdtemp(prefix="chaos-"))  # other runs on this host are not to be blamed on this one
    census, record, problem = Census(root), Record(), None
    settings = {"worker": "stepcast.workers.echo:Echo", "run_dir": str(root), **SETTINGS, **scenario.settings}
    config = ExecutorConfig(world_size=world_size, start_method=start_method, backend=backend, **settings)
    try:
        scenario.run(config, draw, record)
    except StepcastError as error:
        record.see(error)
        record.released_at = record.detected_at
    except Exception as error:  # noqa: BLE001 - a scenario that breaks must not end the others
        problem = f"{type(error).__name__}: {error}"
    leaks = census.leaks(LEAK_GRACE_S)
    shutil.rmtree(root)
    verdict = record.verdict(scenario.verdict)
    as_expected = (record.seen, verdict) == (scenario.expected, scenario.verdict)
    return Outcome(
        scenario=scenario.name,
        passed=as_expected and problem is None and not leaks and (record.seen != NO_ERROR or record.lost_steps == 0),
        expected=scenario.expected,
        seen=record.seen,
        expected_verdict=None if scenario.verdict is None else str(scenario.verdict),
        verdict=None if verdict is None else str(verdict),
        detected_ms=record.since_fault_ms(record.detected_at),
        released_ms=record.since_fault_ms(record.released_at),
        lost_steps=record.lost_steps,
        leaks=leaks,
        lane=LANE,
        backend=backend,
        start_method=start_method,
        world_size=world_size,
        seed=seed,
        problem=problem,
    )
