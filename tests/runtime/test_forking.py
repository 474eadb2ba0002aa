"""What is seen to before a fork: threads that it would wait for, and a parent that may have no children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DAEMON = """
import multiprocessing
from stepcast import ConfigError, Executor, ExecutorConfig

def start(method):
    config = ExecutorConfig(
        worker="stepcast.workers.echo:Echo", backend="mp", world_size=2, start_method=method, startup_timeout_s=30
    )
    try:
        with Executor(config) as executor:
            print(method, executor.step(1))
    except ConfigError as error:
        print(error)

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context("fork").Process(target=start, args=(method,), daemon=True)
        process.start()
        process.join(60)
        assert process.exitcode == 0
"""

OPENMP = """
import torch
from stepcast import Executor, ExecutorConfig, Worker

class Computing(Worker):
    def execute(self, step):
        return torch.zeros(1_000_000).exp().sum().item()

torch.set_num_threads(2)  # whatever this machine has
torch.zeros(1_000_000).exp()
config = ExecutorConfig(worker=Computing, backend="mp", start_method="fork", step_timeout_s=30)
with Executor(config) as executor:
    print(executor.step(None))
print(torch.zeros(1_000_000).exp().sum().item())
"""


def run(directory: Path, script: str) -> list[str]:
    path = directory / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_fork_computes_on_several_threads_after_its_parent_did(tmp_path: Path) -> None:
    """The library of both keeps threads that the fork has not; the parent goes on computing on several, too."""
    pytest.importorskip("torch")
    assert run(tmp_path, OPENMP) == ["1000000.0", "1000000.0"]


def test_a_daemon_is_told_what_to_do(tmp_path: Path) -> None:
    """It may have no children by multiprocessing; stepcast's spawned ranks are none of multiprocessing's."""
    spawned, *refused = run(tmp_path, DAEMON)
    assert spawned == "spawn 1"
    for method, line in zip(("fork", "forkserver"), refused, strict=True):
        assert line.startswith(f"start_method={method!r}: this process is a daemon of multiprocessing's")
        assert line.endswith("use start_method='spawn', or start this process with daemon=False")
