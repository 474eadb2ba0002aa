"""A soak: one group that is restarted when it fails, steps without end, and a fault at random every few seconds."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
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

#: How long an outcome, or a restart, may take before the soak counts as hung; every limit is far below it.
_HANG_S = 90.0
_LEAK_GRACE_S = 5.0
#: Between two faults, in seconds.
_PAUSE_S = (0.5, 3.0)
_SAMPLE_INTERVAL_S = 0.5
_BATCH = 4
_STOPPED_S = 0.3
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
        submitted, answered, failed: steps; each one that was submitted was either answered or failed.
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
        worker="stepcast.workers.echo:Echo",
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
        with FaultyGroup(config) as group:
            _Soak(group, report).run()
            report.restarts = group.executor.health().restarts
    except Exception as error:  # noqa: BLE001 - the report tells it
        report.problem = f"{type(error).__name__}: {error}"
    report.leaks = census.leaks(_LEAK_GRACE_S)
    report.problem = report.problem or _growth(report)
    report.passed = report.problem is None and not report.leaks
    return report


class _Soak:
    """The loop: submit, disturb, wait for the outcomes."""

    def __init__(self, group: FaultyGroup, report: SoakReport) -> None:
        self._group = group
        self._report = report
        self._draw = random.Random(report.seed)  # noqa: S311 - to be drawn again
        self._samples: list[tuple[int, float]] = []

    def run(self) -> None:
        deadline = time.monotonic() + self._report.seconds
        next_fault = next_sample = time.monotonic()
        faults: Counter[str] = Counter()
        while (now := time.monotonic()) < deadline:
            futures = self._submit()
            if now >= next_fault:
                name = self._draw.choice(sorted(_FAULTS))
                faults[name] += 1
                # The group may be down just now: then it is no time for a fault.
                with contextlib.suppress(StepcastError, ProcessLookupError):
                    _FAULTS[name](self._group, self._draw.randrange(self._report.world_size))
                next_fault = time.monotonic() + self._draw.uniform(*_PAUSE_S)
            self._wait(futures)
            # Not while the group is down, and holds less than it does otherwise.
            if now >= next_sample and faults and self._group.executor.health().ok:
                self._samples.append(_footprint())
                next_sample = now + _SAMPLE_INTERVAL_S
        self._report.faults = dict(faults)
        self._report.descriptors = _ends([float(count) for count, _ in self._samples])
        self._report.memory_mib = _ends([memory for _, memory in self._samples])

    def _submit(self) -> list[tuple[int, StepFuture]]:
        futures = []
        for _ in range(_BATCH):
            number = self._report.submitted
            self._report.submitted += 1
            try:
                futures.append((number, self._group.executor.submit(number, gather=True)))
            except StepcastError:
                self._report.failed += 1
        return futures

    def _wait(self, futures: list[tuple[int, StepFuture]]) -> None:
        for number, future in futures:
            try:
                error = future.exception(_HANG_S)
            except StillWaiting:
                raise RuntimeError(f"step {number} had no outcome after {_HANG_S:g} s") from None
            if error is not None:
                self._report.failed += 1
            elif future.result() == [number] * self._report.world_size:
                self._report.answered += 1
            else:
                raise RuntimeError(f"step {number} was answered {future.result()!r}")


def _stop_and_resume(group: FaultyGroup, rank: int) -> None:
    group.stop(rank)
    time.sleep(_STOPPED_S)
    group.resume(rank)


def _kill_all(group: FaultyGroup, _rank: int) -> None:
    for rank in range(group.config.world_size):
        group.kill(rank)


def _in_step(fault: str, seconds: float = 0.2) -> Callable[[FaultyGroup, int], None]:
    return lambda group, rank: group.in_next_step(rank, fault, seconds)


_FAULTS: dict[str, Callable[[FaultyGroup, int], None]] = {
    "kill": lambda group, rank: group.kill(rank),
    "kill-all": _kill_all,
    "stop-and-resume": _stop_and_resume,
    **{name: _in_step(name) for name in ("raise", "exit", "os_exit", "segfault", "sleep", "hold_gil", "answer")},
}


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
