"""What the tests of the runtime share."""

from __future__ import annotations

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
def gate(tmp_path: Path) -> Gate:
    """A closed gate. Close it behind nobody: what waits for it holds a worker for a minute."""
    return Gate(tmp_path / "gate")
