"""What runs in Ray's processes: an actor for each rank, which starts the rank's process and holds it.

The rank is a process of its own, the same as under "mp": so its environment is complete before its interpreter starts,
it has none of Ray's threads and signal handlers, and its exit code and its last words are told as exactly.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepcast.workers.death_watch import process_start_time

from .interpreter import run_main
from .plan import Variables, identity

#: Set by Ray for its own processes: a debugger that only works in these.
_DEBUGGER = "PYTHONBREAKPOINT"


class RankActor:
    """Holds one rank's process. Ends it by ending itself: the kernel kills the rank with it."""

    def __init__(self) -> None:
        self._rank: subprocess.Popen[bytes] | None = None
        # Ray's own processes may outlive the one that they belong to by seconds, or for good where nobody reaps it.
        threading.Thread(target=_end_with, args=(os.pidfd_open(os.getppid()),), daemon=True).start()

    def place(self, resource: str, driver: tuple[int, int], run_directory: str, niceness: int) -> dict[str, Any]:
        """Tell where this is.

        Args:
            resource: what Ray counts the ranks' devices as.
            driver: the driver's process id and start time.
            run_directory: the run's private directory.
            niceness: how nice the rank's process shall be; Ray's are nicer than others by default.

        Returns:
            The attributes of a `Spot`.
        """
        import ray  # noqa: PLC0415 - here is Ray

        with contextlib.suppress(OSError):  # only root may
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = listener = socket.create_server((address, 0), family=family)
        pid, start_time = identity(os.getpid())
        return {
            "node": context.get_node_id(),
            "address": address,
            "devices": context.get_accelerator_ids().get(resource, []),
            "pid": pid,
            "start_time": start_time,
            "listening": (listener.getsockname()[1], listener.fileno()),
            "sees_driver": process_start_time(driver[0]) == driver[1] and Path(run_directory).is_dir(),
        }

    def start(
        self,
        boot: bytes,
        variables: tuple[Collection[str], Mapping[str, str], Mapping[str, str]],
        path: Sequence[str],
        directory: str,
        outputs: Sequence[str],
        inherited: Sequence[int],
    ) -> tuple[int, int]:
        """Start the rank's process.

        Args:
            boot: what it is told, encoded.
            variables: how its environment differs from this process's: `Variables`.
            path: where the driver finds modules.
            directory: the driver's working directory.
            outputs: files for its stdout and stderr; empty for this process's own, which Ray keeps.
            inherited: descriptors that it has too: what listens here, or nothing.

        Returns:
            Its process id and start time.
        """
        environment = Variables(*variables).applied_to(os.environ)
        if environment.get(_DEBUGGER, "").startswith("ray."):
            del environment[_DEBUGGER]
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(Path(each).open("wb", buffering=0)) for each in outputs]
            stdout, stderr = files or (None, None)
            opened.enter_context(self._listener)
            opened.enter_context(_no_signal_blocked())
            self._rank = run_main(
                "stepcast.workers.boot",
                boot,
                environment,
                stdout=stdout,
                stderr=stderr,
                path=[*path, *(each for each in sys.path if each not in path)],
                directory=directory if Path(directory).is_dir() else None,
                inherited=inherited,
            )
        return identity(self._rank.pid)  # it can't be gone altogether: nobody but this process reaps it

    def end(self) -> None:
        """Kill the rank's process, unless it has ended, and reap it. Until then the driver can read its exit code."""
        if self._rank is not None:
            self._rank.kill()
            self._rank.wait()


def _end_with(parent: int) -> None:
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _no_signal_blocked() -> Iterator[None]:
    """Let a child have all signals: it inherits what is blocked, and Ray blocks SIGINT."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
