"""Models to generate with, and what comes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model, which speaks in bytes: loading it takes no longer than the libraries do."""
    directory = tmp_path_factory.mktemp("tiny")
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([sys.executable, script, directory], check=True, capture_output=True, timeout=100)
    return str(directory)


@pytest.fixture(autouse=True)
def _torch_keeps_its_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # torch makes a directory for compiled code, and leaves it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
