"""Some of the scenarios of `stepcast chaos`, or with `--all-chaos` all that apply, on a real Ray."""

from __future__ import annotations

import pytest

from stepcast.runtime.testing import suite
from stepcast.runtime.testing.chaos import Outcome
from tests.ray.cluster import Cluster

SOME = ("kill-in-step", "kill-in-collective", "stopped-is-found", "raise-in-step", "drop-step", "kill-driver-in-step")
SEED = 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        applicable = [each.name for each in suite.choose((), "ray")[0]]
        metafunc.parametrize("name", applicable if metafunc.config.getoption("--all-chaos") else SOME)


def test_a_scenario_ends_as_under_mp(on_cluster: Cluster, name: str) -> None:
    """The same error, the same verdict; nothing hangs, and nothing is left."""
    if "collective" in name:
        pytest.importorskip("torch")
    chosen, _ = suite.choose((name,), "ray")
    [outcome] = suite.play_each(chosen, backend="ray", start_method=None, world_size=2, seed=SEED)
    assert isinstance(outcome, Outcome)
    assert outcome.passed, outcome
