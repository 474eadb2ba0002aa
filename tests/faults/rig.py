"""What the tests of faults share: a stage on which workers take their places, and a census of what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stepcast import ExecutorConfig

from tests.faults import signs
from tests.harness import process_has_ended, wait_until
from tests.leaks import MARK, _marked_processes

HERE = Path(__file__).parent
VICTIM = f"{HERE}/victims.py:Victim"
TORCH = f"{HERE}/victims.py:Torch"
METHODS = ("spawn", "fork", "forkserver")
#: From a fault to its error: within a second, and as much again for a busy machine.
ERROR_WITHIN_S = 2.0
#: How long three ranks may take to start here.
START_WITHIN_S = 60.0
#: Settings under which nothing takes long.
SETTINGS: dict[str, Any] = {
    "startup_timeout_s": START_WITHIN_S,
    "step_timeout_s": 60.0,
    "stop_timeout_s": 10.0,
    "terminate_timeout_s": 1.0,
    "kill_timeout_s": 5.0,
}


@dataclass
class Stage:
    """Where the workers of one test leave their notes.

    Attributes:
        directory: the test's directory.
    """

    directory: Path

    def settings(
        self,
        world_size: int = 3,
        at: str | None = None,
        do: str = "block",
        ranks: Sequence[int] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Put a group's settings together, with a plan for its workers."""
        everyone = list(range(world_size))
        plan = {
            "dir": str(self.directory),
            "world_size": world_size,
            "at": at,
            "do": do,
            "ranks": everyone if ranks is None else list(ranks),
        }
        environment = {signs.PLAN: json.dumps(plan)}
        if at == "spawning":
            environment["PYTHONPATH"] = os.pathsep.join([f"{HERE}/site", *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            "worker": VICTIM,
            "backend": "mp",
            "world_size": world_size,
            "worker_env": environment,
            "worker_options": {"dir": str(self.directory)},
            **SETTINGS,
            **settings,
        }

    def config(self, world_size: int = 3, **arguments: Any) -> ExecutorConfig:
        """Configure a group whose workers play here; arguments as in `settings`."""
        return ExecutorConfig(**self.settings(world_size, **arguments))

    def there(self, name: str) -> bool:
        """Tell whether a note was left."""
        return (self.directory / name).exists()

    def wait_for(self, *names: str, by: subprocess.Popen[str] | None = None) -> None:
        """Wait until notes have been left, and no longer than the embedder lives that causes them."""
        missing = list(names)

        def are_there() -> bool:
            missing[:] = [name for name in missing if not self.there(name)]
            assert not missing or by is None or by.poll() is None, by.communicate()
            return not missing

        wait_until(are_there, START_WITHIN_S, lambda: f"the notes {', '.join(missing)}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Kill the process that has left a note; returns the clock's reading just before."""
        pid, _ = signs.read(self.directory, name)
        killed_at = time.monotonic()
        os.kill(pid, number)
        return killed_at

    def kill_pid(self, pid: int) -> None:
        """Kill a process that is no child of this one, and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process_has_ended(pid), message=f"the end of process {pid}")

    def killed_at(self) -> float:
        """When a worker has killed itself."""
        return signs.read(self.directory, signs.KILLED)[1]

    def forget(self) -> None:
        """Delete all notes."""
        for path in self.directory.iterdir():
            if path.is_file():
                path.unlink()


@contextlib.contextmanager
def embedder(
    scenario: str, settings: dict[str, Any], argument: Any = None, **popen: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a scenario of `embedders.py` in a process of its own; it is killed where the test does not end it."""
    command = [sys.executable, str(HERE / "embedders.py"), scenario, json.dumps(settings), json.dumps(argument)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], timeout_s: float = 30.0) -> tuple[int, str, str]:
    """Wait for an embedder's end: its exit code, stdout and stderr."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR2)  # it dumps its stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"the embedder hangs:\n{stdout}\n{stderr}") from None
    return process.returncode, stdout, stderr


def census() -> list[psutil.Process]:
    """The processes that this test has started, directly or not, and that live."""
    return list(_marked_processes(os.environ[MARK]))


def wait_for_none_left(timeout_s: float) -> float:
    """Wait until no process of this test is left; returns the seconds that it took."""
    began = time.monotonic()
    wait_until(lambda: not census(), timeout_s, lambda: f"the end of {[each.cmdline() for each in census()]}")
    return time.monotonic() - began


def run_directories() -> list[str]:
    """The run directories that are there."""
    return sorted(path.name for path in Path(os.environ["TMPDIR"]).glob("stepcast-*"))
