"""A soak: one group that is restarted when it fails, steps without end, and a fault at random every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections import Counter
from concurrent.futures import TimeoutError as StillWaiting  # the built-in one from Python 3.11 on
from dataclasses import dataclass, field
from pathlib import Path
from resource import getpagesize

from stepcast.bus.errors import StepcastError
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.step import StepFuture

from .census import Census
from .chaos import SETTINGS
from .group import FaultyGroup
from .soak_faults import SoakFaults

#: How long an outcome, or a restart, may take before the soak counts as hung; every limit is far below it.
_HANG_S = 90.0
_LEAK_GRACE_S = 5.0
#: Between two faults, in seconds.
_PAUSE_S = (0.5, 3.0)
_SAMPLE_INTERVAL_S = 0.5
_BATCH = 4
#: What the last quarter of the samples may have more than the first: descriptors, and memory.
_DESCRIPTOR_SLACK = 8
_MEMORY_SLACK_MIB = 16.0
_MIB = 1 << 20


@dataclass(kw_only=True)
class SoakReport:
    """What became of a soak.

    Attributes:
        passed: whether nothing hung, grew or was left, and every step had one outcome.
        seconds, world_size, start_method, seed: what it ran with.
        faults: how often each fault was injected.
        submitted, answered, failed: steps; each one that was submitted was either answered, by every rank and with what
            was asked for, or failed, and once.
        refused: those of the failed ones that were not taken.
        errors: how often each error was the outcome of a step.
        restarts: how often the group was restarted.
        descriptors: this process's open descriptors, as medians of the first and the last quarter of the samples.
        memory_mib: its resident memory, likewise.
        leaks: what was left behind.
        problem: what else went wrong.
    """

    passed: bool = False
    seconds: float
    world_size: int
    start_method: str
    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    submitted: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    descriptors: tuple[float, float] = (0.0, 0.0)
    memory_mib: tuple[float, float] = (0.0, 0.0)
    leaks: list[str] = field(default_factory=list)
    problem: str | None = None


def soak(seconds: float, *, world_size: int, start_method: str, seed: int) -> SoakReport:
    """Run steps and faults for a while.

    Args:
        seconds: how long.
        world_size: the number of ranks.
        start_method: how they are started.
        seed: decides the faults, their victims and the pauses between them.

    Returns:
        What became of it.
    """
    report = SoakReport(seconds=seconds, world_size=world_size, start_method=start_method, seed=seed)
    census = Census()
    config = ExecutorConfig(
        worker="stepcast.runtime.testing.ledger:Ledger",
        world_size=world_size,
        start_method=start_method,
        backend="mp",
        **SETTINGS,
        restart="on_failure",
        max_restarts=1_000_000,
        restart_backoff_s=1e-9,
        restart_wait_s=_HANG_S,
    )
    try:
        frames = start_method != "fork"
        with FaultyGroup(config, frame_faults=frames) as group:
            run = _Soak(group, report, frames=frames)
            run.run()
            report.restarts = group.executor.health().restarts
        if (told := run.outcomes()) != (expected := report.submitted - report.refused):
            report.problem = f"{expected} futures told their callbacks {told} outcomes"
    except Exception as error:  # noqa: BLE001 - the report tells it
        report.problem = f"{type(error).__name__}: {error}"
    report.leaks = census.leaks(_LEAK_GRACE_S)
    report.problem = report.problem or _growth(report)
    report.passed = report.problem is None and not report.leaks
    return report


class _Soak:
    """The loop: submit, disturb, wait for the outcomes."""

    def __init__(self, group: FaultyGroup, report: SoakReport, *, frames: bool) -> None:
        self._group = group
        self._report = report
        self._draw = random.Random(report.seed)  # noqa: S311 - to be drawn again
        self._faults = SoakFaults(group, self._draw, self._submit, frames=frames)
        self._futures: list[tuple[int, StepFuture]] = []
        self._samples: list[tuple[int, float]] = []
        self._told = itertools.count()  # callbacks come in any thread

    def run(self) -> None:
        deadline = time.monotonic() + self._report.seconds
        next_fault = next_sample = time.monotonic()
        faults: Counter[str] = Counter()
        while (now := time.monotonic()) < deadline:
            for _ in range(_BATCH):
                self._submit()
            if now >= next_fault and self._group.executor.health().ok:
                name = self._draw.choice(self._faults.names)
                faults[name] += 1
                # The group may go down just now.
                with contextlib.suppress(StepcastError, ProcessLookupError):
                    self._faults.inject(name, self._draw.randrange(self._report.world_size))
                next_fault = time.monotonic() + self._draw.uniform(*_PAUSE_S)
            self._wait()
            # Not while the group is down, and holds less than it does otherwise.
            if now >= next_sample and faults and self._group.executor.health().ok:
                self._samples.append(_footprint())
                next_sample = now + _SAMPLE_INTERVAL_S
        self._faults.heal()
        self._report.faults = dict(faults)
        self._report.descriptors = _ends([float(count) for count, _ in self._samples])
        self._report.memory_mib = _ends([memory for _, memory in self._samples])

    def outcomes(self) -> int:
        """How many outcomes futures have told their callbacks; asked once, at the end."""
        return next(self._told)

    def _submit(self, timeout_s: float | None = None) -> StepFuture | None:
        number = self._report.submitted
        self._report.submitted += 1
        try:
            future = self._group.executor.submit(number, gather=True, timeout_s=timeout_s)
        except StepcastError as error:
            self._failed(error)
            self._report.refused += 1
            return None
        self._futures.append((number, future))
        future.add_done_callback(lambda _: next(self._told))
        return future

    def _wait(self) -> None:
        futures, self._futures = self._futures, []
        for number, future in futures:
            try:
                error = future.exception(_HANG_S)
            except StillWaiting:
                raise RuntimeError(f"step {number} had no outcome after {_HANG_S:g} s") from None
            if error is not None:
                self._failed(error)
            elif future.result() == [number] * self._report.world_size:
                self._report.answered += 1
            else:
                raise RuntimeError(f"step {number} was answered {future.result()!r}")

    def _failed(self, error: BaseException) -> None:
        name = type(error).__name__
        self._report.failed += 1
        self._report.errors[name] = self._report.errors.get(name, 0) + 1


def _footprint() -> tuple[int, float]:
    """Descriptors, and resident memory in MiB, of this process."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return len(list(Path("/proc/self/fd").iterdir())), resident_pages * getpagesize() / _MIB


def _ends(values: list[float]) -> tuple[float, float]:
    """The medians of the first and of the last quarter."""
    quarter = max(1, len(values) // 4)
    return (statistics.median(values[:quarter]), statistics.median(values[-quarter:])) if values else (0.0, 0.0)


def _growth(report: SoakReport) -> str | None:
    if report.submitted != report.answered + report.failed:
        return f"{report.submitted} steps were submitted, {report.answered} answered and {report.failed} failed"
    for name, (first, last), slack in (
        ("descriptors", report.descriptors, _DESCRIPTOR_SLACK),
        ("memory in MiB", report.memory_mib, _MEMORY_SLACK_MIB),
    ):
        if last > first + slack:
            return f"{name} grew from {first:g} to {last:g}"
    return None
