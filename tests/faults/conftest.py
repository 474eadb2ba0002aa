"""The stage for the tests of faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rig import ERROR_WITHIN_S, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Where the test's workers leave their notes."""
    return Stage(tmp_path)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Puts a measurement into the report; as pytest's `record_property`, without its warning."""
    return lambda name, value: request.node.user_properties.append((name, value))


@pytest.fixture
def judge_time(measured: Callable[[str, object], None]) -> Callable[[float], None]:
    """Judges how long after a fault its error came, and puts that into the report."""

    def judge(took_s: float) -> None:
        measured("error_after_s", round(took_s, 4))
        assert took_s < ERROR_WITHIN_S

    return judge
