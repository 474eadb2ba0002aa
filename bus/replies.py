"""The driver's PULL socket, on which it reads what all workers answer."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sized
from typing import NamedTuple

import zmq

from .frames import (
    HEAD_ROOM_BYTES,
    HEADER_BYTES,
    PLACE,
    PLACE_START,
    TIMES_BYTES,
    BadFrame,
    Flag,
    Header,
    Kind,
    Wire,
    new_tuple,
)
from .gate import Gate
from .sockets import receive_buffers

_WAKE_ENDPOINT = "inproc://wake"

_log = logging.getLogger("stepcast.bus")
_NOBLOCK = int(zmq.NOBLOCK)
_BUFFERS = int(Flag.BUFFERS)
_RESULT = int(Kind.RESULT)
_ANSWER_BYTES = HEADER_BYTES + TIMES_BYTES
_TIMED = frozenset({int(Kind.RESULT), int(Kind.FAILURE)})
_PAYLOAD_START = {int(kind): HEADER_BYTES + (TIMES_BYTES if kind in _TIMED else 0) for kind in Kind}


class Reply(NamedTuple):
    """A worker's message.

    Attributes:
        header: its header; the rank is known to be one of the group's.
        times: for `parse_times`, in RESULT and FAILURE; else empty.
        frames: payload and buffers, not yet decoded; none where there is no payload.
    """

    header: Header
    times: bytes
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
        gate: lets ranks of other hosts in; None where there are none.

    Attributes:
        endpoint: where the socket is bound.
        dropped: counts of what was dropped, by reason: "foreign" (not of this run), "epoch" (an earlier life of the
            group), "rank" (no such rank), "impostor" (it came over another rank's connection).
        tcp_endpoint: where ranks of other hosts connect; None without a gate.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        run_id: bytes,
        epoch: int,
        world_size: int,
        max_message_bytes: int,
        gate: Gate | None = None,
    ) -> None:
        self._wire = Wire(run_id, epoch)
        self._plain_result = self._wire.start(_RESULT, 0)
        self._world_size = world_size
        self.dropped: Counter[str] = Counter()
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + HEAD_ROOM_BYTES)
        # What wakes a thread that is blocked in `receive` comes the same way as the replies.
        self._socket.bind(_WAKE_ENDPOINT)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.tcp_endpoint: str | None = None
        self._receive: Callable[..., bytes] = self._socket.recv
        if gate is not None:
            self.listen(gate)
        self._timeout_ms = -1
        self._heads: list[bytes] = []
        self._wake_lock = threading.RLock()  # a signal handler or a finalizer may come in between
        self._wake_socket = context.socket(zmq.PUSH)
        self._wake_socket.setsockopt(zmq.LINGER, 0)
        self._wake_socket.connect(_WAKE_ENDPOINT)

    def listen(self, gate: Gate) -> None:
        """Let ranks of other hosts connect.

        Args:
            gate: decides which, and knows whose connection a message came over.

        Raises:
            ConfigError: the gate's address is none of this host's; the socket is closed then.
        """
        self._gate = gate
        self.tcp_endpoint = gate.bind(self._socket)
        self._receive = self._receive_checked

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when `read` may have something; only after `read` has returned None."""
        return int(self._socket.getsockopt(zmq.FD))

    def read(self) -> Reply | None:
        """Take the next reply, without waiting.

        Returns:
            The reply, or None when there is no more. What is not of this run, epoch and group is dropped and counted.
        """
        while True:
            try:
                head = self._heads.pop(0) if self._heads else self._receive(_NOBLOCK)
            except zmq.Again:
                return None
            reply = self._judge(head)
            if reply is not None:
                return reply

    def receive(self, timeout_s: float, answers: int = 1, under_way: Sized = (None,)) -> list[Reply]:
        """Wait for the next reply, or for several answers that are of use only together.

        A thread that is woken finds the processor's caches cold: to look at four answers at once costs little more than
        to look at one.

        Args:
            timeout_s: the longest to wait for each, in seconds.
            answers: how many RESULTs to wait for. Whatever else comes ends the wait.
            under_way: the messages that wait for answers; the wait ends too where there is not just one of them.

        Returns:
            The replies; none where the time passed, `wake` was called, or what came was dropped.
        """
        # Rounded up: a wait that ends a moment too early would spin.
        timeout_ms = int(timeout_s * 1000) + 1
        if timeout_ms != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        receive, plain_result = self._receive, self._plain_result
        # Not a local list: where a signal handler raises in between, what has come is kept for the next one who reads.
        heads = self._heads
        plain = False
        try:
            while not heads or plain:
                head = receive()
                heads.append(head)
                # Of this run: after another's frame may come one of the same message, which is judged with it.
                plain = head.startswith(plain_result)
                if len(heads) >= answers or len(under_way) != 1:
                    break
        except zmq.Again:
            pass
        replies = [reply for head in heads if (reply := self._judge(head)) is not None]
        self._heads = []
        return replies

    def wake(self) -> None:
        """Have a thread that is blocked in `receive` return. Safe in any thread."""
        with self._wake_lock:
            if not self._wake_socket.closed:
                try:
                    self._wake_socket.send(b"", _NOBLOCK)
                except zmq.Again:  # so many lie there unread that nobody needs another
                    return

    def _receive_checked(self, flags: int = 0) -> bytes:
        """Receive a head, as `recv` does; where the connection is a rank's, it must be of that rank."""
        frame = self._socket.recv(flags, copy=False)
        head = frame.bytes
        rank = self._gate.rank_of(frame)
        if rank is not None and len(head) >= HEADER_BYTES:
            _, _, claimed = PLACE.unpack_from(head, PLACE_START)
            if claimed != rank:
                receive_buffers(self._socket)
                self._drop("impostor", f"rank {rank}'s connection brought one that claims to be rank {claimed}'s")
                return b""  # as `wake`: who waits asks again whether to go on
        return head

    def _judge(self, head: bytes) -> Reply | None:
        # An answer is judged here: the way of every step, with few calls. All else goes the long way.
        size = len(head)
        if size >= _ANSWER_BYTES and head.startswith(self._plain_result):
            sequence, step, rank = PLACE.unpack_from(head, PLACE_START)
            if 0 <= rank < self._world_size:
                frames: list[bytes | memoryview] = [memoryview(head)[_ANSWER_BYTES:]] if size > _ANSWER_BYTES else []
                header = new_tuple(Header, (_RESULT, 0, sequence, step, rank))
                return new_tuple(Reply, (header, head[HEADER_BYTES:_ANSWER_BYTES], frames))
        return self._judge_rare(head)

    def _judge_rare(self, head: bytes) -> Reply | None:
        try:
            header = self._wire.parse(head)
        except BadFrame as problem:
            receive_buffers(self._socket)
            if head:  # else it was `wake`
                self._drop(problem.reason, str(problem))
            return None
        start = _PAYLOAD_START[header.kind]
        frames: list[bytes | memoryview] = [memoryview(head)[start:]] if len(head) > start else []
        if header.flags & _BUFFERS:
            frames += receive_buffers(self._socket)
        if 0 <= header.rank < self._world_size and len(head) >= start:
            return Reply(header, head[HEADER_BYTES:start], frames)
        if len(head) < start:
            self._drop("foreign", f"a {Kind(header.kind).name} without its times")
        else:
            self._drop("rank", f"rank {header.rank} of a group of {self._world_size}")
        return None

    def close(self) -> None:
        """Close the sockets."""
        with self._wake_lock:
            self._wake_socket.close()
        self._socket.close()

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            _log.warning("dropped a message on the reply endpoint: %s (later ones are only counted)", detail)
        self.dropped[reason] += 1
