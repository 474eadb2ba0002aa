"""Runs programs under torchrun: for a bounded time, and with nothing left of them afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from stepcast.bus.endpoints import sweep
from tests.faults import signs
from tests.faults.rig import census
from tests.harness import wait_until

HERE = Path(__file__).parent
#: How long a program may take here in all, or to come to a certain point.
WITHIN_S = 60.0
#: How long torchrun's agent waits after SIGTERM before it sends SIGKILL.
AGENTS_GRACE_S = 30.0


class Job:
    """torchrun, with a program of `programs.py` as each rank.

    Args:
        directory: where the ranks leave notes and findings.
        program: the program's name; or a whole command, as a list, that starts no program of ours.
        ranks: how many.
        options: torchrun's own.
        settings: of the ranks' `ExecutorConfig`.
        variables: of the ranks' environment.

    Attributes:
        process: the agent.
    """

    def __init__(
        self,
        directory: Path,
        program: str | list[str],
        *,
        ranks: int = 3,
        options: tuple[str, ...] = (),
        settings: dict[str, Any] | None = None,
        **variables: str,
    ) -> None:
        self.directory = directory
        self._output = directory / "output"
        if isinstance(program, str):
            program = [str(HERE / "programs.py"), program, str(directory), json.dumps(settings or {})]
        logs = f"--log-dir={directory / 'logs'}"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", logs, *options, *program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"), **variables},
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [psutil.Process(self.process.pid), *census()] if self.process.poll() is None else census():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()
        sweep(Path(os.environ["TMPDIR"]))  # what a killed driver has left there, as the next start does

    @property
    def output(self) -> str:
        """What agent and ranks have written so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def finish(self, timeout_s: float = WITHIN_S) -> int:
        """Wait for the agent's end; returns its exit code."""
        wait_until(lambda: self.process.poll() is not None, timeout_s, lambda: f"the agent's end:\n{self.output}")
        return self.process.returncode

    def there(self, name: str) -> bool:
        """Tell whether a note or a finding was left."""
        return (self.directory / name).exists()

    def wait_for(self, *names: str) -> None:
        """Wait until all these were left, and no longer than the agent lives."""

        def are_there() -> bool:
            missing = [name for name in names if not self.there(name)]
            assert not missing or self.process.poll() is None, f"{missing}:\n{self.output}"
            return not missing

        wait_until(are_there, WITHIN_S, lambda: f"{names}:\n{self.output}")

    def found(self, name: str) -> Any:
        """Read a finding."""
        assert self.there(name), f"{name}:\n{self.output}"
        return json.loads((self.directory / name).read_text(encoding="utf-8"))

    def pid(self, note: str) -> int:
        """Read whose note it is."""
        return signs.read(self.directory, note)[0]

    def kill(self, note: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the process that has left a note; returns its id."""
        pid = self.pid(note)
        os.kill(pid, number)
        return pid

    @contextlib.contextmanager
    def agent_stopped(self) -> Any:
        """Keep the agent from doing anything."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
