"""What the tests of faults share: a stage on which workers take their places, and a census of what is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stepcast import ExecutorConfig
from stepcast.bus.endpoints import sweep
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
        others: str = "block",
        **settings: Any,
    ) -> dict[str, Any]:
        """Put a group's settings together, with a plan for its workers: in which phase which ranks do what."""
        everyone = list(range(world_size))
        plan = {
            "dir": str(self.directory),
            "world_size": world_size,
            "at": at,
            "do": do,
            "ranks": everyone if ranks is None else list(ranks),
            "others": others,
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

    def wait_for(self, *names: str, by: Embedder | None = None) -> None:
        """Wait until notes have been left, and no longer than the embedder lives that causes them."""
        missing = list(names)

        def are_there() -> bool:
            missing[:] = [name for name in missing if not self.there(name)]
            assert not missing or by is None or by.process.poll() is None, by.output
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

    def wait_for_ends(self) -> None:
        """Wait until each process that has left a note has ended with all its threads, and so has closed its files."""
        for pid in {signs.read(self.directory, path.name)[0] for path in self.directory.glob("*-[0-9]")}:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    assert select.select([pidfd], [], [], 10.0)[0], f"process {pid} has not ended"
                finally:
                    os.close(pidfd)

    def sweep(self) -> None:
        """Delete what dead processes have left in the temporary directory: run directories as the next start does."""
        root = Path(os.environ["TMPDIR"])
        sweep(root)
        for path in root.glob("pymp-*"):  # multiprocessing's own
            shutil.rmtree(path)

    def killed_at(self) -> float:
        """When a worker has killed itself."""
        return signs.read(self.directory, signs.KILLED)[1]

    def forget(self) -> None:
        """Delete all notes."""
        for path in self.directory.iterdir():
            if path.is_file():
                path.unlink()


class Embedder:
    """A scenario of `embedders.py`, in a process of its own.

    Args:
        stage: where it takes place.
        scenario: its name.
        settings: its group's, as `Stage.settings` puts them together.
        argument: what the scenario is told beside.

    Attributes:
        process: the process.
    """

    def __init__(
        self, stage: Stage, scenario: str, settings: dict[str, Any], argument: Any = None, **popen: Any
    ) -> None:
        self._output = stage.directory / "output"
        command = [sys.executable, str(HERE / "embedders.py"), scenario, json.dumps(settings), json.dumps(argument)]
        # A file, not a pipe: who is left holding it does not matter.
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, **popen
            )

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return self._output.read_text(encoding="utf-8")

    def finish(self, timeout_s: float = 30.0) -> int:
        """Wait for its end; returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR2)  # it dumps its stacks
            wait_until(lambda: "most recent call first" in self.output, 2.0, "the embedder's stacks")
            raise AssertionError(f"the embedder hangs:\n{self.output}") from None


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
