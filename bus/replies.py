"""Workers answer on PUSH sockets; the driver reads them all on one PULL socket."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from .frames import BadFrame, Header, Kind, Times, pack_header, pack_times, parse_header, parse_times

_log = logging.getLogger("stepcast.bus")
_NO_TIMES = Times(0, 0, 0)


class Reply(NamedTuple):
    """A worker's message.

    Attributes:
        header: its header; the rank is known to be one of the group's.
        times: the rank's times, zero where the kind has none.
        frames: payload (bytes) and buffers (memoryviews), not yet decoded.
    """

    header: Header
    times: Times
    frames: list[bytes | memoryview]


class ReplyReader:
    """The driver's PULL socket.

    Not thread-safe: the caller serialises.

    Args:
        context: the ZeroMQ context.
        endpoint: where to bind.
        run_id: 16 bytes.
        epoch: the life of the group.
        world_size: the number of ranks.
        max_message_bytes: the largest frame that is accepted, checked by ZeroMQ before it allocates.

    Attributes:
        dropped: counts of what was dropped, by reason: "foreign" (not of this run), "epoch" (an earlier life of the
            group), "rank" (no such rank).
    """

    def __init__(  # noqa: PLR0913 - the wire's parameters, given once
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        world_size: int,
        max_message_bytes: int,
    ) -> None:
        self._run_id = run_id
        self._epoch = epoch
        self._world_size = world_size
        self.dropped: Counter[str] = Counter()
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.bind(endpoint)

    @property
    def endpoint(self) -> str:
        """Where the socket is bound."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when `read` may have something; only after `read` has returned None."""
        return int(self._socket.getsockopt(zmq.FD))

    def read(self) -> Reply | None:
        """Take the next reply, without waiting.

        Returns:
            The reply, or None when there is no more. What is not of this run, epoch and group is dropped and counted.
        """
        socket = self._socket
        while True:
            try:
                first = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            frames: list[bytes | memoryview] = []
            if socket.getsockopt(zmq.RCVMORE):
                frames.append(socket.recv())
                while socket.getsockopt(zmq.RCVMORE):
                    frames.append(socket.recv(copy=False).buffer)
            try:
                header = parse_header(first, self._run_id)
            except BadFrame as problem:
                self._drop("foreign", str(problem))
                continue
            if header.epoch != self._epoch:
                self._drop("epoch", f"epoch {header.epoch}, expected {self._epoch}")
            elif not 0 <= header.rank < self._world_size:
                self._drop("rank", f"rank {header.rank} of a group of {self._world_size}")
            else:
                timed = header.kind in (Kind.RESULT, Kind.FAILURE)
                return Reply(header, parse_times(first) if timed else _NO_TIMES, frames)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            _log.warning("dropped a message on the reply endpoint: %s (further ones are only counted)", detail)
        self.dropped[reason] += 1


class ReplySender:
    """A worker's PUSH socket. Each of its threads has its own.

    Args:
        context: the worker's ZeroMQ context.
        endpoint: the driver's PULL endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
        rank: this rank.
        timeout_s: the longest that a send may wait for the driver to read, in seconds.
        linger_s: the longest that closing waits for what was sent to leave, in seconds.
    """

    def __init__(  # noqa: PLR0913 - the wire's parameters, given once
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        rank: int,
        timeout_s: float,
        linger_s: float,
    ) -> None:
        self._run_id = run_id
        self._epoch = epoch
        self._rank = rank
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        self._socket.connect(endpoint)

    def send(  # noqa: PLR0913 - one argument for each field of the wire
        self,
        kind: int,
        sequence: int = 0,
        step: int = 0,
        frames: Sequence[bytes | memoryview] = (),
        flags: int = 0,
        times: Times | None = None,
    ) -> None:
        """Send a message to the driver.

        Args:
            kind: a reply `Kind`.
            sequence: the sequence number answered, where there is one.
            step: the step's id, where there is one.
            frames: payload and buffers.
            flags: `Flag` values.
            times: given with RESULT and FAILURE.

        Raises:
            zmq.Again: the driver has not read for the time limit.
        """
        header = pack_header(kind, self._run_id, self._epoch, sequence, step, self._rank, flags)
        if times is not None:
            header += pack_times(*times)
        socket = self._socket
        last = len(frames)
        if not last:
            socket.send(header)
            return
        socket.send(header, zmq.SNDMORE)
        for index, frame in enumerate(frames, 1):
            socket.send(frame, 0 if index == last else zmq.SNDMORE, copy=index == 1)

    def close(self) -> None:
        """Close the socket; what was sent is given `linger_s` to leave."""
        self._socket.close()
