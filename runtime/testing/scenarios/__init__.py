"""The scenarios of `stepcast chaos`, by what they do a fault to."""

from __future__ import annotations

from stepcast.runtime.testing.chaos import Scenario

from . import driver, frames, idle, ranks, steps, strays

SCENARIOS: tuple[Scenario, ...] = (
    *ranks.SCENARIOS,
    *steps.SCENARIOS,
    *idle.SCENARIOS,
    *frames.SCENARIOS,
    *strays.SCENARIOS,
    *driver.SCENARIOS,
)
