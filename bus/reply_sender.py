"""A worker's PUSH socket, over which it answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .frames import TIMED_PLACE, Flag, Kind, Wire, pack_times
from .keys import RankKeys
from .links import connect
from .zmtp import LinkLost

_BUFFERS = int(Flag.BUFFERS)
_RESULT = int(Kind.RESULT)


class ReplySender:
    """A worker's PUSH socket. Each of its threads has its own.

    Args:
        endpoint: the driver's PULL endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
        rank: this rank.
        timeout_s: the longest that a send may wait for the driver to read, in seconds.
        reconnect_timeout_s: how long a send tries to restore a connection that has ended; zero for one attempt. On
            tcp libzmq tries by itself, and a send waits where its queue is full.
        keys: for a driver on another host.

    Raises:
        OSError: the driver is not there. On tcp it may still come.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        rank: int,
        timeout_s: float,
        reconnect_timeout_s: float,
        keys: RankKeys | None = None,
    ) -> None:
        self._wire = Wire(run_id, epoch)
        self._rank = rank
        self._reconnect_timeout_s = reconnect_timeout_s
        self._plain_result = self._wire.start(_RESULT, 0)
        self._socket = connect(endpoint, "PUSH", keys, send_timeout_s=timeout_s)

    def send(
        self,
        kind: int,
        sequence: int = 0,
        step: int = 0,
        frames: Sequence[bytes | memoryview] = (),
        flags: int = 0,
        times: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        """Send a message to the driver.

        Args:
            kind: a reply `Kind`.
            sequence: the sequence number answered, where there is one.
            step: the step's id, where there is one.
            frames: payload and buffers; they may change once this returns.
            flags: `Flag` values.
            times: given with RESULT and FAILURE, as in `Times`.

        Raises:
            TimeoutError: the driver has not read for the time limit.
            LinkLost: the connection has ended, and could not be restored.
        """
        parts: Sequence[bytes | memoryview]
        buffers = frames[1:]
        if kind == _RESULT and times is not None and not buffers:  # the way of every step, with few calls
            parts = (self._plain_result, TIMED_PLACE.pack(sequence, step, self._rank, *times), *frames)
        else:
            if buffers:
                flags |= _BUFFERS
            head = self._wire.pack(kind, sequence, step, self._rank, flags)
            parts = (head, pack_times(times) if times is not None else b"", *frames[:1])
        try:
            self._socket.send(parts, buffers)
        except ConnectionError:
            self._send_again(parts, buffers)

    def _send_again(self, parts: Sequence[bytes | memoryview], buffers: Sequence[bytes | memoryview]) -> None:
        deadline = time.monotonic() + self._reconnect_timeout_s
        while True:
            self._socket.reconnect(max(0.0, deadline - time.monotonic()))
            try:
                self._socket.send(parts, buffers)
            except ConnectionError as error:  # it has come back, and ended again
                if time.monotonic() >= deadline:
                    raise LinkLost(f"the connection to the driver ends again and again: {error}") from error
            else:
                return

    def close(self) -> None:
        """Close the socket. What was sent still arrives."""
        self._socket.close()
