"""What the tests with a real Ray share. They are skipped where Ray is not installed: `tests/run_ray.sh` installs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.cluster import Cluster, running_cluster, wait_for_nothing_left

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed"))


@pytest.fixture(scope="session")
def cluster(session_guard: None) -> Iterator[Cluster]:
    """A cluster of one node with three CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPCAST_TESTS_PYTHON", sys.executable)
        with running_cluster(3) as running:
            yield running


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test for processes of a group that it leaves in a cluster, which are not this process's children."""
    monkeypatch.setenv("STEPCAST_TESTS_PYTHON", sys.executable)
    yield
    wait_for_nothing_left()


@pytest.fixture
def on_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Has groups run on the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return cluster
