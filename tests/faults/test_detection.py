"""How soon the kill of a rank is told, and how soon the group is gone: promises, and so measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from stepcast.runtime.testing.chaos import Outcome, play
from stepcast.runtime.testing.scenarios import SCENARIOS

DETECTED_WITHIN_MS = 50.0
RELEASED_WITHIN_MS = 2000.0


def play_often(name: str, times: int) -> list[Outcome]:
    scenario = next(each for each in SCENARIOS if each.name == name)
    outcomes = [play(scenario, world_size=2, start_method="fork", seed=seed) for seed in range(times)]
    assert all(each.passed for each in outcomes), outcomes
    return outcomes


def median(values: list[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def test_the_kill_of_a_local_rank_is_told_within_fifty_milliseconds(
    measured: Callable[[str, object], None],
) -> None:
    """As the median of nine kills: the kernel tells the driver."""
    times = [each.detected_ms for each in play_often("kill-idle", 9)]
    measured("detected_ms", times)
    assert median(times) < DETECTED_WITHIN_MS


@pytest.mark.slow
def test_a_group_whose_ranks_wait_in_a_collective_is_gone_within_two_seconds(
    measured: Callable[[str, object], None],
) -> None:
    """As the median of three kills: the peers wait for the dead rank in gloo, and are not asked to come back."""
    pytest.importorskip("torch")
    outcomes = play_often("kill-in-collective", 3)
    measured("released_ms", [each.released_ms for each in outcomes])
    assert median([each.detected_ms for each in outcomes]) < DETECTED_WITHIN_MS
    assert median([each.released_ms for each in outcomes]) < RELEASED_WITHIN_MS
