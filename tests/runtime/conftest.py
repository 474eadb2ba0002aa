"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Gate:
    """A file that a worker of `workers_for_tests` waits for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def new_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Makes closed gates. They are open after the test, so that none holds a worker for the next one."""
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate(tmp_path / f"gate-{len(gates)}"))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@pytest.fixture
def gate(new_gate: Callable[[], Gate]) -> Gate:
    """A closed gate."""
    return new_gate()
