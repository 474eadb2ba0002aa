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
def judge_time(record_property: Callable[[str, object], None]) -> Callable[[float], None]:
    """Judges how long after a fault its error came, and puts that into the report."""

    def judge(took_s: float) -> None:
        record_property("error_after_s", round(took_s, 4))
        assert took_s < ERROR_WITHIN_S

    return judge
