"""Where scenarios play whose victim is the driver: it runs in a process of its own, and obeys."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from stepcast.bus.endpoints import sweep
from stepcast.runtime.config import ExecutorConfig

from .census import MARK, children_of, has_variable, marked
from .chaos import HANG_S, Record, Scenario
from .group import wait_for_ends
from .job import agent_command, as_json

_DRIVER = "stepcast.runtime.testing.driver"
_POLL_S = 0.01
#: What the driver's end may take, and that of all that it has started.
GONE_WITHIN_S = 5.0
_STDERR_CHARACTERS = 600


class DriverStage:
    """A driver in a process of its own, or a front end and its driver: under torchrun always so, and that is the agent.

    Args:
        config: the group's settings; `run_dir` is a directory of the scenario's own.
        draw: the scenario's chance.
        record: where to note what is seen.

    Attributes:
        victim: the rank to which something happens, where it happens to a rank.
        under_torchrun: whether torchrun starts the driver, and the other ranks.
        process: the process that was started: the driver, or its front end.
        pid: the driver's, once it has told.
        workers: the ranks', likewise.
    """

    def __init__(self, config: ExecutorConfig, draw: random.Random, record: Record) -> None:
        self.config = config
        self.record = record
        self.victim = draw.randrange(config.world_size)
        self.under_torchrun = config.backend == "torchrun"
        self.root = Path(str(config.run_dir))
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self.workers: list[int] = []
        self._there: list[int] = []
        self._mark = uuid.uuid4().hex
        self._lines = b""

    def start(self, *, wait: bool = True, front_end: bool = False, **told: Any) -> None:
        """Start the driver.

        Args:
            wait: for the group to be ready.
            front_end: below another process.
            told: what it is told beside the settings.
        """
        # Ray's actors, which start the ranks, do not have the driver's environment.
        told = {**as_json(self.config), "worker_env": {MARK: self._mark}, **told}
        if self.under_torchrun:
            command = agent_command(self.config, _DRIVER, told)
        else:
            command = [sys.executable, "-m", _DRIVER, json.dumps({**told, "front_end": front_end})]
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, MARK: self._mark, "TMPDIR": str(self.root)},
                start_new_session=True,  # Ctrl-C is for its whole process group
            )
        if wait:
            told_back = self.read()
            self.pid, self.workers = told_back["driver"], told_back["workers"]

    def start_and_stay(self) -> None:
        """Start the driver of a group of which one rank never gets through its setup, and wait for all processes."""
        self.start(wait=False, in_setup={self.victim: "sleep"})
        helpers = 2 if self.config.start_method == "forkserver" else 0  # the server, and the tracker of resources
        helpers += self.config.backend in ("torchrun", "ray")  # the agent; the process that speaks with Ray
        self.wait_until(lambda: len(self.left()) > self.config.world_size + helpers, "the processes of the group")
        self.pid = self._rank_0_of_agent() if self.under_torchrun else self._started.pid

    def ask(self, *command: Any) -> Any:
        """Tell the driver to do something, and wait for its answer; an error is seen, and None returned."""
        self.tell(*command)
        told = self.read()
        if "error" in told:
            self.record.see(told["error"])
            return None
        return told["answer"]

    def tell(self, *command: Any) -> None:
        """Tell the driver to do something."""
        stdin = self._started.stdin
        assert stdin is not None  # noqa: S101 - as it was started
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()

    def read(self) -> Any:
        """Read what the driver says next."""
        stdout = self._started.stdout
        assert stdout is not None  # noqa: S101 - as it was started
        deadline = time.monotonic() + HANG_S
        while b"\n" not in self._lines:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the driver says nothing for {HANG_S:g} s: {self.said}")
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError(f"the driver has ended: {self.said}")
            self._lines += data
        line, _, self._lines = self._lines.partition(b"\n")
        return json.loads(line)

    def serve_on(self) -> None:
        """The group must serve one more step."""
        answer = self.ask("step", "on")
        if answer != ["on"] * self.config.world_size:
            raise AssertionError(f"the next step was answered {answer!r}")

    def await_failure(self) -> None:
        """Wait until the group has failed, and note the error."""
        self.wait_until(lambda: self.ask("failure") is not None, "the failure of the group")
        self.record.see(self.ask("failure"))

    def be_in_step(self, *, fault: str = "sleep", seconds: float = 3600.0, size: int = 0, others: str = "idle") -> None:
        """Have the victim stay in a step of so many bytes, and wait until its peers are in that phase."""
        self.ask("order", self.victim, fault, seconds)
        self.ask("submit", size)

        def is_there() -> bool:
            phases = [rank["phase"] for rank in self.ask("health")["ranks"]]
            mine = phases.pop(self.victim)
            return mine == "step" and set(phases) == {others}

        self.wait_until(is_there, "the ranks in their step")

    def fault(self, inject: Callable[[], object]) -> None:
        """Inject the fault, and note when."""
        self._there = self.left()
        self.record.fault_at = time.monotonic()
        inject()

    def signal(self, number: signal.Signals) -> None:
        """Send the driver a signal; a Ctrl-C goes to its process group, as a terminal sends it."""
        if number is signal.SIGINT:
            os.killpg(self._started.pid, number)
        else:
            os.kill(self.pid, number)

    def kill_front_end(self) -> None:
        """Kill the process that has started the driver."""
        self._started.kill()

    def end(self, code: int, *, agents: int | None = None) -> None:
        """Wait until nothing is left, and note when.

        Args:
            code: the exit code that the process must have had that was started.
            agents: the one that torchrun's agent must have had; None for 1 where something has failed.
        """
        if self.under_torchrun:
            code = int(code != 0) if agents is None else agents
        self.wait_until(lambda: self._started.poll() is not None, "the driver's end", GONE_WITHIN_S)
        self.wait_until(lambda: not self.left(), "the end of all processes", GONE_WITHIN_S)
        # Now without their memory, they may still be closing their files: the lock on the run directory is one.
        self.wait_until(lambda: wait_for_ends(self._there, 0.0), "all files to be closed", GONE_WITHIN_S)
        self.record.released_at = time.monotonic()
        if self._started.returncode != code:
            raise AssertionError(f"the exit code is {self._started.returncode}, not {code}: {self.said}")

    def left(self) -> list[int]:
        """The processes that live, the driver's own included."""
        return marked(self._mark)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
        """Wait for a condition.

        Args:
            condition: it.
            what: what is waited for, in words.
            timeout_s: the longest to wait.

        Raises:
            TimeoutError: it did not come true.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}: {self.said}")
            time.sleep(_POLL_S)

    @property
    def run_directory(self) -> Path:
        """Where the group's sockets are."""
        (directory,) = self.root.glob("stepcast-*")
        return directory

    @property
    def said(self) -> str:
        """The last that the driver has written to stderr."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")[-_STDERR_CHARACTERS:]

    def close(self) -> None:
        """End what is left; it was told of."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            with self.process:  # which closes the pipes, and waits
                self.process.kill()

    def _rank_0_of_agent(self) -> int:
        (pid,) = (each for each in children_of(self._started.pid) if has_variable(each, "RANK", "0"))
        return pid

    @property
    def _stderr(self) -> Path:
        return self.root / "stderr"

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self.process is not None  # noqa: S101 - `start` comes first
        return self.process


@dataclass(frozen=True)
class DriverScenario(Scenario):
    """A scenario whose victim is the driver, in a process of its own.

    Attributes:
        play: does it, on a stage; starts the driver, too.
        sweeps: whether the driver can't remove its run directory, so that the next start has to.
    """

    play: Callable[[DriverStage], None]
    sweeps: bool = field(default=False, kw_only=True)
    level: ClassVar[str] = "driver"

    def run(self, config: ExecutorConfig, draw: random.Random, record: Record) -> None:
        """As `Scenario.run`."""
        stage = DriverStage(config, draw, record)
        try:
            self.play(stage)
        finally:
            stage.close()
            if self.sweeps:
                sweep(stage.root)
