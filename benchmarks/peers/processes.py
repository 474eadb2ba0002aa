"""Worker processes of the peers that start their own: spawned, watched, and gone when the driver is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from benchmarks.peer import PeerError

SPAWN = multiprocessing.get_context("spawn")

_STOP_LIMIT_S = 2.0


def boot_worker() -> None:
    """Leave Ctrl-C to the driver, and leave when the driver does. Call it first in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        raise PeerError("a worker is started by multiprocessing")
    # Blocked in the kernel without the GIL, so it costs the loop nothing.
    threading.Thread(target=_leave_after, args=(parent.sentinel,), name="driver-watch", daemon=True).start()


def _leave_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class WorkerProcesses:
    """One process per rank."""

    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []

    def start(self, target: Callable[..., None], *args: Any) -> None:
        """Start the next rank; `target` is a module's function."""
        process = SPAWN.Process(target=target, args=args, daemon=True)
        process.start()
        self._processes.append(process)

    def pids(self) -> tuple[int, ...]:
        """The process ids, by rank."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def check(self, wait_s: float = 0.0) -> None:
        """See that all of them run.

        Args:
            wait_s: how long one may take to end, where a broken connection says that it's about to.

        Raises:
            PeerError: some have ended; it names their ranks and exit codes.
        """
        ending = wait([process.sentinel for process in self._processes], wait_s)
        for process in self._processes:
            if process.sentinel in ending:  # it closes a moment before the exit code is known
                process.join(_STOP_LIMIT_S)
        ended = [(rank, process.exitcode) for rank, process in enumerate(self._processes) if not process.is_alive()]
        if ended:
            raise PeerError("; ".join(f"rank {rank} ended with exit code {code}" for rank, code in ended))

    def stop(self) -> None:
        """Wait for all of them to end by themselves, then end those that did not."""
        for end in (None, SpawnProcess.terminate, SpawnProcess.kill):
            deadline = time.monotonic() + _STOP_LIMIT_S
            for process in self._processes:
                if end is not None:
                    end(process)
                process.join(max(0.0, deadline - time.monotonic()))
            if not any(process.is_alive() for process in self._processes):
                break
        for process in self._processes:
            process.close()
        self._processes.clear()
