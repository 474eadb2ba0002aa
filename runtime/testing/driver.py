"""A driver in a process of its own, for `stepcast chaos` to kill, freeze and interrupt.

``python -m stepcast.runtime.testing.driver JSON``, by torchrun too, starts a group, prints a line of JSON with the
pids, then obeys lines on stdin, each a list of JSON with a command's name and its arguments, and answers each with a
line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from stepcast.bus.errors import StepcastError
from stepcast.runtime.config import ExecutorConfig

from .group import FaultyGroup

#: Between two steps of `run`, and between two looks at the state.
_PAUSE_S = 0.002
_HALT_TIMEOUT_S = 60.0


class Commands:
    """What the driver can be told; each method is a command, and returns its answer.

    Args:
        group: the group.
        failures: the errors that have ended it.
    """

    def __init__(self, group: FaultyGroup, failures: list[StepcastError]) -> None:
        self._executor = group.executor
        self._group = group
        self._failures = failures
        self._halt = threading.Event()
        self._answered = 0
        self._problem: str | None = None
        self._runner = threading.Thread(target=self._run, daemon=True)

    def step(self, value: Any) -> Any:
        """Run a step, and wait for it."""
        return self._executor.step(value, gather=True)

    def order(self, rank: int, fault: str, seconds: float) -> None:
        """As `FaultyGroup.in_next_step`."""
        self._group.in_next_step(rank, fault, seconds)

    def submit(self, size: int) -> None:
        """Submit a step of so many bytes; 0 stands for the number 1."""
        self._executor.submit(bytes(size) if size else 1, gather=True)

    def health(self) -> dict[str, Any]:
        """Tell how the group is doing."""
        return self._executor.health().as_dict()

    def failure(self) -> str | None:
        """Tell the name of the error that has ended the group, if one has."""
        return type(self._failures[0]).__name__ if self._failures else None

    def run(self) -> None:
        """Run steps in a thread, until `halt`."""
        self._runner.start()

    def halt(self) -> dict[str, Any]:
        """End them: how many were answered, and what went wrong."""
        self._halt.set()
        self._runner.join(_HALT_TIMEOUT_S)
        return {"answered": self._answered, "problem": self._problem}

    def answered(self) -> int:
        """How many of them were answered so far."""
        return self._answered

    def tell_state(self) -> None:
        """Print a line as soon as the group takes no steps any more."""
        threading.Thread(target=self._tell_state, daemon=True).start()

    def leave(self) -> NoReturn:
        """Shut the group down, and exit."""
        sys.exit(0)

    def _run(self) -> None:
        while self._problem is None and not self._halt.wait(_PAUSE_S):
            number = self._answered
            try:
                answer = self._executor.step(number, gather=True)
            except StepcastError as error:
                self._problem = f"{type(error).__name__}: {error}"
            else:
                if answer != [number] * self._group.config.world_size:
                    self._problem = f"step {number} was answered {answer!r}"
                self._answered += 1

    def _tell_state(self) -> None:
        while self._executor.state.accepts_steps:
            time.sleep(_PAUSE_S)
        say(str(self._executor.state.value))


def say(answer: Any) -> None:
    """Print a line of JSON."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def obey(commands: Commands) -> None:
    """Obey lines on stdin, until it ends."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            say({"answer": getattr(commands, name)(*arguments)})
        except StepcastError as error:
            say({"error": type(error).__name__, "text": str(error)})


def compute() -> None:
    """Have torch start its threads, as an embedder may have that forks later."""
    import torch  # noqa: PLC0415 - where it was asked for

    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)


def main() -> None:
    """Start what the command line says: a group, or a front end that does nothing but start another driver."""
    told = json.loads(sys.argv[1])
    if told.pop("front_end", False):
        command = [sys.executable, "-m", "stepcast.runtime.testing.driver", json.dumps(told)]
        with subprocess.Popen(command) as driver:
            driver.wait()
        return
    if told.pop("computes", False):
        compute()
    if told.pop("outlives_sigterm", False):
        signal.signal(signal.SIGTERM, lambda *_: None)
    in_setup = {int(rank): fault for rank, fault in told.pop("in_setup", {}).items()}
    failures: list[StepcastError] = []
    made = FaultyGroup(ExecutorConfig(**told), in_setup=in_setup, on_failure=failures.append)
    with contextlib.suppress(BrokenPipeError), made as group:
        say({"driver": os.getpid(), "workers": group.executor.worker_pids})
        obey(Commands(group, failures))


if __name__ == "__main__":
    main()
