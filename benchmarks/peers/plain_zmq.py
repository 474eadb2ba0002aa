"""A plain PUB/SUB + PUSH/PULL loop: what stepcast's bus is measured against.

The least that the same sockets need: no header, no sequence numbers, no heartbeat, no second lane. Workers block in
`recv`; the driver's own thread sends the step and reads the answers, so no thread hop is added to ZeroMQ's own.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import zmq

from benchmarks.codec import pack, unpack
from benchmarks.limits import START_LIMIT_S
from benchmarks.peer import Payload, PeerError
from benchmarks.peers.processes import WorkerProcesses, boot_worker

_PROBE = b"probe"
_GO = b"go"
_STOP = b""
_PROBE_INTERVAL_MS = 20
_ANSWER_LIMIT_MS = 10_000
_LONGEST_DIRECTORY = 80
"""A Unix socket's path has at most 107 bytes."""


class PlainZmqPeer:
    """The driver publishes the step once, then reads one answer per rank."""

    name = "plain_zmq"

    def __init__(self) -> None:
        self._workers = WorkerProcesses()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._directory = ""

    def start(self, world_size: int) -> None:
        """Bind, start the workers, and probe until every rank has received something on its SUB socket."""
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._steps = self._context.socket(zmq.PUB)
        self._answers = self._context.socket(zmq.PULL)
        self._steps.bind(_steps_endpoint(self._directory))
        self._answers.bind(_answers_endpoint(self._directory))
        self._ranks = range(world_size)
        for rank in self._ranks:
            self._workers.start(_serve, rank, self._directory)
        self._probe()
        self._answers.setsockopt(zmq.RCVTIMEO, _ANSWER_LIMIT_MS)
        self._open()
        # All are connected, so the paths have served: a driver that is killed now leaves nothing behind.
        shutil.rmtree(self._directory)

    def step(self, payload: Payload) -> list[Any]:
        """Publish once, then read as many answers as there are ranks."""
        self._steps.send(pack(payload))
        receive = self._answers.recv
        try:
            return [unpack(receive()) for _ in self._ranks]
        except zmq.Again:
            raise self._silence() from None

    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return self._workers.pids()

    def stop(self) -> None:
        """Tell every worker to leave, and close the sockets."""
        if self._workers.pids():
            self._steps.send(_STOP)
            self._workers.stop()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _probe(self) -> None:
        """Publish probes until every rank has answered one: a message sent before a subscription arrives is lost."""
        deadline = time.monotonic() + START_LIMIT_S
        missing = set(self._ranks)
        while missing:
            if time.monotonic() > deadline:
                raise PeerError(f"ranks {sorted(missing)} did not answer within {START_LIMIT_S:g} s")
            self._workers.check()
            self._steps.send(_PROBE)
            while missing and self._answers.poll(_PROBE_INTERVAL_MS):
                missing.discard(int(self._answers.recv()))

    def _open(self) -> None:
        """Tell the ranks that probing is over, and drain the answers to probes that are still under way."""
        self._steps.send(_GO)
        waiting = len(self._ranks)
        try:
            while waiting:
                waiting -= self._answers.recv() == _GO
        except zmq.Again:
            raise self._silence() from None

    def _silence(self) -> PeerError:
        self._workers.check()
        return PeerError(f"an answer did not come within {_ANSWER_LIMIT_MS / 1000:g} s")


def _private_directory() -> str:
    directory = tempfile.mkdtemp(prefix="stepcast-bench-")
    if len(directory) <= _LONGEST_DIRECTORY:
        return directory
    shutil.rmtree(directory)
    return tempfile.mkdtemp(prefix="stepcast-bench-", dir="/tmp")


def _steps_endpoint(directory: str) -> str:
    return f"ipc://{directory}/steps"


def _answers_endpoint(directory: str) -> str:
    return f"ipc://{directory}/answers"


def _serve(rank: int, directory: str) -> None:
    boot_worker()
    with zmq.Context() as context, context.socket(zmq.SUB) as steps, context.socket(zmq.PUSH) as answers:
        answers.linger = 0
        steps.subscribe(b"")
        answers.connect(_answers_endpoint(directory))
        steps.connect(_steps_endpoint(directory))
        while steps.recv() != _GO:
            answers.send(b"%d" % rank)
        answers.send(_GO)
        _echo(steps, answers)


def _echo(steps: zmq.Socket[bytes], answers: zmq.Socket[bytes]) -> None:
    receive, send = steps.recv, answers.send
    while frame := receive():
        send(pack(unpack(frame)))
