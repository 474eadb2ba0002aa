"""The driver's PUB socket: sequence numbers, credit, and the store that closes gaps.

Not thread-safe: the caller serialises.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from .errors import ProtocolError
from .frames import DRIVER_RANK, Flag, Wire, new_tuple, parse_presence
from .gate import Gate
from .sockets import plain_send

#: Messages beyond the window that a pipe holds before the socket refuses a send; the window keeps us well below it.
_HIGH_WATER_SLACK = 64
#: What comes over tcp is a handshake's commands and subscriptions: nothing larger is allocated for a stranger.
_MAX_SUBSCRIPTION_BYTES = 1024

_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_BUFFERS = int(Flag.BUFFERS)

_log = logging.getLogger("stepcast.bus")


class _Stored(NamedTuple):
    sequence: int
    size: int
    kind: int
    step: int
    flags: int
    frames: Sequence[bytes | memoryview]


class Publisher:
    """Publishes the run's messages to all ranks.

    Every step-class message has the next sequence number and is kept until every rank has answered it: what the credit
    windows bound is also what can be replayed.

    Args:
        context: the ZeroMQ context.
        endpoint: where to bind.
        run_id: 16 bytes.
        epoch: the life of the group.
        world_size: the number of ranks.
        max_in_flight: the window in messages.
        max_in_flight_bytes: the window in bytes of payload and buffers.
        gate: lets ranks of other hosts in; None where there are none.

    Attributes:
        endpoint: where the socket is bound.
        tcp_endpoint: where ranks of other hosts connect; None without a gate.
        present: the ranks of other hosts whose control socket is connected, as far as `drain_subscriptions` knows. One
            whose process ends is missed within milliseconds, and so is one whose connection will be restored.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        world_size: int,
        max_in_flight: int,
        max_in_flight_bytes: int,
        gate: Gate | None = None,
    ) -> None:
        self._wire = Wire(run_id, epoch)
        self._max_in_flight = max_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._store: deque[_Stored] = deque()
        self._in_flight_bytes = 0
        self._acknowledged = [0] * world_size
        self.sequence = 0
        self.refused = 0
        self._loses = False
        self.replayed = 0
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.SNDHWM, max_in_flight + _HIGH_WATER_SLACK)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._gate: Gate | None = None
        self.tcp_endpoint: str | None = None
        if gate is not None:
            self.listen(gate)
        self.present: set[int] = set()
        self._plain_send = plain_send(self._socket)

    def listen(self, gate: Gate) -> None:
        """Let ranks of other hosts connect.

        Args:
            gate: decides which.

        Raises:
            ConfigError: the gate's address is none of this host's; the socket is closed then.
        """
        self._gate = gate
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        self.tcp_endpoint = gate.bind(self._socket)

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when subscriptions may have come; only after `drain_subscriptions`."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def in_flight(self) -> int:
        """Messages that some rank has not answered."""
        return len(self._store)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of payload and buffers in those messages."""
        return self._in_flight_bytes

    def has_credit(self, size: int) -> bool:
        """Tell whether a message fits in both windows now.

        Args:
            size: bytes of payload and buffers.
        """
        return len(self._store) < self._max_in_flight and self._in_flight_bytes + size <= self._max_in_flight_bytes

    def acknowledged(self, rank: int) -> int:
        """The last message that a rank has answered.

        Args:
            rank: the rank.

        Returns:
            Its sequence number.
        """
        return self._acknowledged[rank]

    def working_on(self, rank: int) -> tuple[int, int] | None:
        """The oldest message that a rank has not answered.

        Args:
            rank: the rank.

        Returns:
            The message's kind and step id; None where it has answered all.
        """
        first = self._acknowledged[rank] + 1
        for stored in self._store:
            if stored.sequence >= first:
                return stored.kind, stored.step
        return None

    def slow_ranks(self) -> list[int]:
        """The ranks that have not answered the oldest message in flight."""
        if not self._store:
            return []
        oldest = self._store[0].sequence
        return [rank for rank, answered in enumerate(self._acknowledged) if answered < oldest]

    def unanswered(self, rank: int) -> int:
        """Messages that a rank has not answered.

        Args:
            rank: the rank.
        """
        return self.sequence - self._acknowledged[rank]

    def publish(
        self, kind: int, step: int, frames: Sequence[bytes | memoryview], size: int, flags: int = 0
    ) -> int | None:
        """Publish a step-class message. The caller has checked size and credit.

        Args:
            kind: a step-class `Kind`.
            step: the step's id.
            frames: payload and buffers. They must not change until every rank has answered.
            size: their bytes.
            flags: `Flag` values.

        Returns:
            The message's sequence number; None where a pipe was full: nothing was sent, try again.
        """
        sequence = self.sequence + 1
        if len(frames) > 1:
            flags |= _BUFFERS
        header = self._wire.pack(kind, sequence, step, DRIVER_RANK, flags)
        if not self._send(header, frames):
            return None
        self.sequence = sequence
        self._store.append(new_tuple(_Stored, (sequence, size, kind, step, flags, frames)))
        self._in_flight_bytes += size
        return sequence

    def control(self, kind: int, step: int = 0) -> bool:
        """Publish a control or probe message. HEARTBEAT carries the highest sequence number published.

        Args:
            kind: a control-class `Kind`, or PROBE.
            step: the step it is about.

        Returns:
            False where a pipe was full: nothing was sent. The next heartbeat tries again.
        """
        return self._send(self._wire.pack(kind, self.sequence, step), ())

    def lose_for_full_pipes(self) -> None:
        """From now on, lose to a full pipe what it can't take, instead of refusing it for all.

        The windows keep the ranks' pipes from filling up, so a full one is that of a stray that does not read. What a
        rank should lose all the same is found out as a gap, and replayed.
        """
        if self._loses:
            return
        self._loses = True
        self._socket.setsockopt(zmq.XPUB_NODROP, 0)
        _log.warning("a subscriber does not read: what its full pipe can't take is lost to it from now on")

    def acknowledge(self, rank: int, sequence: int) -> None:
        """Note that a rank has answered a message, and forget the messages that every rank has answered.

        Args:
            rank: the rank.
            sequence: the message's sequence number. A rank answers in order.
        """
        acknowledged = self._acknowledged
        if sequence <= acknowledged[rank]:
            return
        acknowledged[rank] = sequence
        store = self._store
        lowest = min(acknowledged)
        while store and store[0].sequence <= lowest:
            self._in_flight_bytes -= store.popleft().size

    def replay(self, first: int) -> int:
        """Publish again all that is stored from a sequence number on. Ranks that have it drop it as a duplicate.

        Args:
            first: the first sequence number that a rank misses.

        Returns:
            How many messages were published again.

        Raises:
            ProtocolError: the store does not reach back that far; the group must fail.
        """
        if first > self.sequence:
            return 0
        if not self._store or self._store[0].sequence > first:
            oldest = self._store[0].sequence if self._store else self.sequence + 1
            raise ProtocolError(
                f"message {first} can't be replayed: the store begins at {oldest}",
                expected=f"at least {oldest}",
                got=str(first),
            )
        count = 0
        for stored in self._store:
            if stored.sequence < first:
                continue
            flags = stored.flags | Flag.REPLAY
            header = self._wire.pack(stored.kind, stored.sequence, stored.step, DRIVER_RANK, flags)
            if not self._send(header, stored.frames):
                break
            count += 1
        self.replayed += count
        return count

    def drain_subscriptions(self) -> int:
        """Read the subscription messages that have come, which would pile up otherwise, and note who is `present`.

        Returns:
            How many came.
        """
        count = 0
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count
            count += 1
            if self._gate is not None:
                self._note_presence(frame, self._gate)

    def _note_presence(self, frame: zmq.Frame, gate: Gate) -> None:
        message = frame.bytes
        rank = parse_presence(message[1:])
        if rank is None:
            return
        if message[0] == 0:  # the last subscription of the kind has ended: libzmq does not say whose
            self.present.discard(rank)
        elif gate.rank_of(frame) == rank:
            self.present.add(rank)

    def close(self) -> None:
        """Close the socket, dropping what was not sent."""
        self._store.clear()
        self._socket.close()

    def _send(self, header: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        # With NODROP only the first part can be refused: a message is sent whole or not at all.
        send = self._plain_send
        last = len(frames) - 1
        try:
            send(b"".join((header, frames[0])) if frames else header, _NOBLOCK if last < 1 else _NOBLOCK | _SNDMORE)
        except zmq.Again:
            self.refused += 1
            return False
        for index in range(1, last + 1):
            # Small parts are copied; large ones are shared with every pipe (pyzmq's copy_threshold).
            send(frames[index], _NOBLOCK if index == last else _NOBLOCK | _SNDMORE, copy=False)
        return True
