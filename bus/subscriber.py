"""A worker's two SUB sockets: steps for the loop thread, control for the responder thread."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from .frames import (
    CONTROL_CLASS,
    FLAGS_AT,
    HEAD_ROOM_BYTES,
    HEADER_BYTES,
    PLACE,
    PLACE_START,
    PROBE_CLASS,
    STEP_CLASS,
    BadFrame,
    Flag,
    Header,
    Kind,
    Wire,
    new_tuple,
    presence_topic,
)
from .keys import RankKeys
from .links import connect
from .zmtp import RECONNECT_TIMEOUT_S

_BUFFERS = int(Flag.BUFFERS)
_GATHER = int(Flag.GATHER)
_STEP = int(Kind.STEP)

_log = logging.getLogger("stepcast.bus")


class Message(NamedTuple):
    """A message as it came.

    Attributes:
        header: its header.
        frames: payload and buffers, not yet decoded: views on the received message.
    """

    header: Header
    frames: list[bytes | memoryview]


class Gap(NamedTuple):
    """Messages are missing.

    Attributes:
        expected: the first sequence number that is missing.
        got: the one that came instead.
    """

    expected: int
    got: int


class _Subscriber:
    """One SUB socket that judges each message before it is decoded.

    Attributes:
        foreign: messages dropped because their header was not one of this run and epoch.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        message_class: bytes,
        run_id: bytes,
        epoch: int,
        max_message_bytes: int,
        keys: RankKeys | None,
        presence: bytes = b"",
    ) -> None:
        self._wire = Wire(run_id, epoch)
        self.foreign = 0
        # What can be queued here is bounded by the driver's windows.
        self.socket = connect(endpoint, "SUB", keys, max_frame_bytes=max_message_bytes + HEAD_ROOM_BYTES)
        if presence:
            self.socket.subscribe(presence)
        # PROBE is subscribed to last: subscriptions travel in order, so a PROBE that arrives proves the other one.
        self.socket.subscribe(message_class)
        self.socket.subscribe(PROBE_CLASS)

    def wait_for_probe(self, timeout_s: float) -> bool:
        """Wait for the driver's PROBE, past all else that comes, then unsubscribe from it.

        Args:
            timeout_s: the longest to wait, in seconds.

        Returns:
            Whether it came.
        """
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0.0, deadline - time.monotonic())):
            message = self.receive()
            if message is not None and message.header.kind == Kind.PROBE:
                self.probed()
                return True
        return False

    def probed(self) -> None:
        """Unsubscribe from PROBE: it has come."""
        self.socket.unsubscribe(PROBE_CLASS)

    def receive(self) -> Message | None:
        """Block until a message comes, and judge it.

        Returns:
            The message; None where it was not one of this run and epoch: counted, logged once, dropped undecoded.

        Raises:
            ConnectionError: the connection to the driver has ended.
        """
        return self._judge(self.socket.recv())

    def _judge(self, head: bytes | bytearray) -> Message | None:
        try:
            header = self._wire.parse(head)
        except BadFrame as problem:
            self.socket.recv_rest()
            if not self.foreign:
                _log.warning("dropped a message from the driver's endpoint: %s (later ones are only counted)", problem)
            self.foreign += 1
            return None
        frames: list[bytes | memoryview] = [memoryview(head)[HEADER_BYTES:]]
        if header.flags & _BUFFERS:
            frames += self.socket.recv_rest()
        return new_tuple(Message, (header, frames))

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class StepSubscriber(_Subscriber):
    """The loop thread's socket: the step stream, in order and without gaps.

    Args:
        endpoint: the driver's PUB endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
        max_message_bytes: the largest frame that is accepted, checked before it is allocated.
        keys: for a driver on another host.

    Attributes:
        sequence: the sequence number of the last message taken in order.
        duplicates: messages dropped because they had come before.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        max_message_bytes: int,
        keys: RankKeys | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            message_class=STEP_CLASS,
            run_id=run_id,
            epoch=epoch,
            max_message_bytes=max_message_bytes,
            keys=keys,
        )
        self.sequence = 0
        self.duplicates = 0
        self._plain_steps = (self._wire.start(_STEP, 0), self._wire.start(_STEP, _GATHER))

    def next(self) -> Message | Gap | None:
        """Block until something comes over the socket, and put it in order.

        Returns:
            The next message of the stream; a `Gap` where messages before it are missing, which must be asked for and
            will come again, this one included; None where what came was dropped.

        Raises:
            LinkLost: the connection to the driver has ended, and did not come back within `RECONNECT_TIMEOUT_S`.
            ProtocolError: the driver sends what is over the limit.
        """
        try:
            return self._take(self.socket.recv())
        except ConnectionError:
            # What was on its way is lost, and shows as a gap once the connection is back.
            _log.warning("the connection to the driver has ended; trying for %g s to restore it", RECONNECT_TIMEOUT_S)
            self.socket.reconnect(RECONNECT_TIMEOUT_S)
            return None

    def _take(self, head: bytes | bytearray) -> Message | Gap | None:
        # The step that is due, judged here: the usual way, with few calls. All else goes the long way.
        if len(head) >= HEADER_BYTES and head.startswith(self._plain_steps):
            sequence, step, rank = PLACE.unpack_from(head, PLACE_START)
            if sequence == self.sequence + 1:
                self.sequence = sequence
                header = new_tuple(Header, (_STEP, head[FLAGS_AT], sequence, step, rank))
                return new_tuple(Message, (header, [memoryview(head)[HEADER_BYTES:]]))
        message = self._judge(head)
        if message is None or message.header.kind == Kind.PROBE:
            return None
        sequence = message.header.sequence
        if sequence == self.sequence + 1:
            self.sequence = sequence
            return message
        if sequence <= self.sequence:
            self.duplicates += 1
            return None
        return Gap(self.sequence + 1, sequence)


class ControlSubscriber(_Subscriber):
    """The responder thread's socket: PROBE, HEARTBEAT, ABORT, RESUME, DUMP and STOP-NOW.

    Args:
        endpoint: the driver's PUB endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
        presence_of: the rank, where the driver is to learn at once that this connection ends; it sees a process of its
            own host end without.
        keys: for a driver on another host.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        presence_of: int | None = None,
        keys: RankKeys | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            message_class=CONTROL_CLASS,
            run_id=run_id,
            epoch=epoch,
            max_message_bytes=1024,  # control messages are a header and nothing else
            keys=keys,
            presence=b"" if presence_of is None else presence_topic(presence_of),
        )
