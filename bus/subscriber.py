"""A worker's two SUB sockets: steps for the loop thread, control for the responder thread."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import zmq

from .frames import (
    CONTROL_CLASS,
    GROUPED,
    HEADER_BYTES,
    OPENING_OF,
    PROBE_CLASS,
    STEP_CLASS,
    BadFrame,
    Flag,
    Header,
    Kind,
    Wire,
    new_tuple,
)
from .sockets import HEAD_ROOM_BYTES, receive_buffers

_BUFFERS = int(Flag.BUFFERS)
_STEP_OPENING = OPENING_OF[Kind.STEP]

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
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        message_class: bytes,
        run_id: bytes,
        epoch: int,
        max_message_bytes: int,
    ) -> None:
        self._wire = Wire(run_id, epoch)
        self._identity = self._wire.identity
        self.foreign = 0
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # the driver's windows bound what can be queued
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + HEAD_ROOM_BYTES)
        self.socket.connect(endpoint)
        # PROBE is subscribed to last: subscriptions travel in order, so a PROBE that arrives proves the other one.
        self.socket.setsockopt(zmq.SUBSCRIBE, message_class)
        self.socket.setsockopt(zmq.SUBSCRIBE, PROBE_CLASS)

    def wait_for_probe(self, timeout_s: float) -> bool:
        """Wait for the driver's PROBE, past all else that comes, then unsubscribe from it.

        Args:
            timeout_s: the longest to wait, in seconds.

        Returns:
            Whether it came.
        """
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = self.receive()
            if message is not None and message.header.kind == Kind.PROBE:
                self.probed()
                return True
        return False

    def probed(self) -> None:
        """Unsubscribe from PROBE: it has come."""
        self.socket.setsockopt(zmq.UNSUBSCRIBE, PROBE_CLASS)

    def receive(self) -> Message | None:
        """Block until a message comes, and judge it.

        Returns:
            The message; None where it was not one of this run and epoch: counted, logged once, dropped undecoded.
        """
        return self._judge(self.socket.recv())

    def _judge(self, head: bytes) -> Message | None:
        try:
            header = self._wire.parse(head)
        except BadFrame as problem:
            receive_buffers(self.socket)
            if not self.foreign:
                _log.warning("dropped a message from the driver's endpoint: %s (later ones are only counted)", problem)
            self.foreign += 1
            return None
        frames: list[bytes | memoryview] = [memoryview(head)[HEADER_BYTES:]]
        if header.flags & _BUFFERS:
            frames += receive_buffers(self.socket)
        return new_tuple(Message, (header, frames))

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class StepSubscriber(_Subscriber):
    """The loop thread's socket: the step stream, in order and without gaps.

    Args:
        context: the worker's ZeroMQ context.
        endpoint: the driver's PUB endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
        max_message_bytes: the largest frame that is accepted, checked by ZeroMQ before it allocates.

    Attributes:
        sequence: the sequence number of the last message taken in order.
        duplicates: messages dropped because they had come before.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        max_message_bytes: int,
    ) -> None:
        super().__init__(
            context,
            endpoint,
            message_class=STEP_CLASS,
            run_id=run_id,
            epoch=epoch,
            max_message_bytes=max_message_bytes,
        )
        self.sequence = 0
        self.duplicates = 0

    def next(self) -> Message | Gap | None:
        """Block until something comes over the socket, and put it in order.

        Returns:
            The next message of the stream; a `Gap` where messages before it are missing, which must be asked for and
            will come again, this one included; None where what came was dropped.
        """
        head = self.socket.recv()
        # The message that is due, judged here: the way of every step, with few calls. All else goes the long way.
        if len(head) >= HEADER_BYTES:
            opening, kind, flags, identity, sequence, step, rank = GROUPED.unpack_from(head)
            if (
                sequence == self.sequence + 1
                and identity == self._identity
                and opening == _STEP_OPENING
                and OPENING_OF.get(kind) == opening
            ):
                self.sequence = sequence
                frames: list[bytes | memoryview] = [memoryview(head)[HEADER_BYTES:]]
                if flags & _BUFFERS:
                    frames += receive_buffers(self.socket)
                return new_tuple(Message, (new_tuple(Header, (kind, flags, sequence, step, rank)), frames))
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
    """The responder thread's socket: PROBE, HEARTBEAT, ABORT, DUMP and STOP-NOW.

    Args:
        context: the worker's ZeroMQ context.
        endpoint: the driver's PUB endpoint.
        run_id: 16 bytes.
        epoch: the life of the group.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, run_id: bytes, epoch: int) -> None:
        # Control messages are a header and nothing else.
        super().__init__(
            context, endpoint, message_class=CONTROL_CLASS, run_id=run_id, epoch=epoch, max_message_bytes=1024
        )
