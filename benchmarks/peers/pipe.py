"""A bare `multiprocessing.Pipe` per rank: the least that a round trip through the kernel costs from Python."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.codec import pack, unpack
from benchmarks.limits import START_LIMIT_S
from benchmarks.peer import Payload, PeerError
from benchmarks.peers.processes import SPAWN, WorkerProcesses, boot_worker

_READY = b"ready"
_STOP = b""
_END_LIMIT_S = 1.0
"""For a worker to end once its pipe is closed."""


class PipePeer:
    """The driver writes the step to each pipe, then reads each pipe's answer."""

    name = "pipe"

    def __init__(self) -> None:
        self._workers = WorkerProcesses()
        self._connections: list[Connection[Any, Any]] = []

    def start(self, world_size: int) -> None:
        """Start the workers; return once every rank has said that it is ready."""
        for _ in range(world_size):
            ours, theirs = SPAWN.Pipe()
            self._connections.append(ours)
            with theirs:  # theirs alone once the worker has it, so that its end shows here
                self._workers.start(_serve, theirs)
        deadline = time.monotonic() + START_LIMIT_S
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise PeerError(f"rank {rank} did not come up within {START_LIMIT_S:g} s")
            self._hear(connection)

    def step(self, payload: Payload) -> list[Any]:
        """Write to every pipe, then read from every pipe."""
        frame = pack(payload)
        try:
            for connection in self._connections:
                connection.send_bytes(frame)
            return [unpack(connection.recv_bytes()) for connection in self._connections]
        except (EOFError, OSError):
            self._workers.check(wait_s=_END_LIMIT_S)
            raise

    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return self._workers.pids()

    def stop(self) -> None:
        """Tell every worker to leave, and close the pipes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(_STOP)
        self._workers.stop()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _hear(self, connection: Connection[Any, Any]) -> None:
        try:
            connection.recv_bytes()
        except (EOFError, OSError):
            self._workers.check(wait_s=_END_LIMIT_S)
            raise


def _serve(connection: Connection[Any, Any]) -> None:
    boot_worker()
    receive, send = connection.recv_bytes, connection.send_bytes
    with contextlib.suppress(EOFError, OSError):  # the driver is gone
        send(_READY)
        while frame := receive():
            send(pack(unpack(frame)))
