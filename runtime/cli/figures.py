"""How long steps take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stepcast.runtime.executor import Executor
from stepcast.runtime.step import StepFuture


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of the steps' times, in microseconds.

    Attributes:
        p50: half of the steps took no longer.
        p99: 99 % of them took no longer.
    """

    p50: float
    p99: float


def percentiles(samples: Iterable[float]) -> Percentiles:
    """Return the 50th and the 99th percentile, linear between neighbours.

    Args:
        samples: at least one.
    """
    ordered = sorted(samples)

    def at(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        return round(below + (above - below) * (place - math.floor(place)), 1)

    return Percentiles(p50=at(0.5), p99=at(0.99))


class StepClock:
    """Runs steps on an executor, and notes how long each takes.

    Args:
        executor: the executor.
        clock: a monotonic clock, in nanoseconds.
    """

    def __init__(self, executor: Executor, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._executor = executor
        self._clock = clock
        self._taken: list[tuple[int, StepFuture]] = []

    def step(self, payload: Any) -> Any:
        """Run a step.

        Args:
            payload: as in `Executor.step`.

        Returns:
            The output rank's result.

        Raises:
            StepcastError: as `Executor.step`.
        """
        began = self._clock()
        future = self._executor.submit(payload)
        result = future.result()
        self._taken.append((self._clock() - began, future))
        return result

    @property
    def steps(self) -> int:
        """The number of steps that were answered."""
        return len(self._taken)

    def latencies_us(self) -> list[float]:
        """Microseconds from each step's publication to its result."""
        return [taken_ns / 1000 for taken_ns, _ in self._taken]

    def overheads_us(self) -> list[float]:
        """The same less what the slowest rank computed. Below 0 where a rank was still at it when the result came."""
        return [
            (taken_ns - max(times.compute_ns for times in future.times.values())) / 1000
            for taken_ns, future in self._taken
        ]
