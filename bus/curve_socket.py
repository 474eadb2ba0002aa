"""A rank's end of a connection to a driver on another host: libzmq's, over tcp with CURVE.

It does what `ZmtpSocket` does, with libzmq's thread in between, which encrypts, and which connects again by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import zmq

from .keys import RankKeys
from .sockets import HANDSHAKE_TIMEOUT_S, plain_send, receive_buffers, tune_tcp
from .zmtp import LinkLost

#: How long `close` waits until what was sent is in the kernel's hands.
LINGER_S = 5.0
#: How often a thread that is blocked in `recv` looks whether the connection is still there.
LOOK_INTERVAL_S = 1.0
#: Messages that may lie here unsent while the link is cut; then `send` waits.
_SEND_QUEUE = 64
#: What the handshake's commands may have; the limit holds for them too.
_HANDSHAKE_BYTES = 1024
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 1000

_POLLIN, _NOBLOCK, _SNDMORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.SNDMORE)
_MONITOR = "inproc://monitor"
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED).to_bytes(2, sys.byteorder)
_WATCHED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


class CurveSocket:
    """A SUB or PUSH socket with one connection, which need not be there yet: libzmq tries until it is.

    Not thread-safe: it belongs to one thread. It has a ZeroMQ context of its own, so that a large step that is being
    decrypted does not hold up a heartbeat, and so that `close` waits for its own messages alone.

    A message that was sent is in libzmq's queue, and outlives a connection that ends there. What was in the kernel's
    buffers by then is lost, and nothing tells: the driver finds a missing answer by its number, and ends the group.

    Args:
        endpoint: a ``tcp://`` endpoint.
        socket_type: "SUB" or "PUSH".
        keys: the driver's public key, and the rank's own.
        max_frame_bytes: the largest frame that is accepted, checked before it is allocated. A PUSH socket gets none.
        send_timeout_s: the longest that a send may wait for room in the queue, in seconds; None without limit.

    Attributes:
        look_interval_s: how often `poll` must be called though the descriptor stays silent.
    """

    look_interval_s: float | None = LOOK_INTERVAL_S

    def __init__(
        self,
        endpoint: str,
        socket_type: str,
        keys: RankKeys,
        *,
        max_frame_bytes: int = 0,
        send_timeout_s: float | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._max_frame_bytes = max_frame_bytes
        self._send_timeout_s = send_timeout_s
        self._topics: set[bytes] = set()
        #: Whether there is a connection, and whether there was one that has ended since.
        self._connected = self._ended = False
        self._monitor: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.SUB if socket_type == "SUB" else zmq.PUSH)
            self._set_up(keys, is_push=socket_type == "PUSH")
            if socket_type == "SUB":
                self._monitor = self._watch()
            self._socket.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._plain_send = plain_send(self._socket)

    def _set_up(self, keys: RankKeys, *, is_push: bool) -> None:
        options: dict[int, int | bytes] = {
            zmq.CURVE_SERVERKEY: keys.server,
            zmq.CURVE_PUBLICKEY: keys.public,
            zmq.CURVE_SECRETKEY: keys.secret,
            zmq.IPV6: int("[" in self._endpoint),
            zmq.LINGER: int(LINGER_S * 1000) if is_push else 0,
            zmq.SNDHWM: _SEND_QUEUE,
            zmq.SNDTIMEO: -1 if self._send_timeout_s is None else int(self._send_timeout_s * 1000),
            zmq.RCVTIMEO: int(LOOK_INTERVAL_S * 1000),
            zmq.MAXMSGSIZE: max(self._max_frame_bytes, _HANDSHAKE_BYTES),
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _MAX_RECONNECT_MS,
            zmq.CONNECT_TIMEOUT: int(HANDSHAKE_TIMEOUT_S * 1000),
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        tune_tcp(self._socket)

    def _watch(self) -> zmq.Socket[bytes]:
        self._socket.monitor(_MONITOR, _WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's own thread
        monitor.connect(_MONITOR)
        return monitor

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have come, once; only `poll` knows."""
        return int(self._socket.getsockopt(zmq.FD))

    def subscribe(self, topic: bytes) -> None:
        """Have messages sent here that begin with some bytes."""
        self._topics.add(topic)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Have them no longer sent. Safe to call again."""
        if topic in self._topics:
            self._topics.remove(topic)
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def poll(self, timeout_s: float) -> bool:
        """Wait until something has come.

        Args:
            timeout_s: the longest to wait, in seconds.

        Returns:
            Whether `recv` has something to read, if only the end of the connection.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            if self._ended or self.has_unread:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._wait(left_s, self._socket)

    @property
    def has_unread(self) -> bool:
        """Whether something lies here that `recv` has not returned yet."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    @property
    def more(self) -> int:
        """Whether frames of the same message follow the one received last."""
        return int(self._socket.getsockopt(zmq.RCVMORE))

    def recv(self) -> bytes:
        """Block until a frame has come.

        Returns:
            The frame.

        Raises:
            ConnectionError: the connection has ended; libzmq tries to restore it, and `reconnect` waits for that.
        """
        while True:
            try:
                return self._socket.recv(_NOBLOCK if self._ended else 0)
            except zmq.Again:
                self._look()
            if self._ended:
                raise ConnectionResetError("the connection to the driver has ended")

    def recv_rest(self) -> list[memoryview]:
        """Receive the frames of a message that follow one that was received: they are here already.

        Returns:
            Read-only views on them.
        """
        return [buffer.toreadonly() for buffer in receive_buffers(self._socket)]

    def send(self, head: Sequence[bytes | memoryview], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message: put a copy in libzmq's queue.

        Args:
            head: the parts of its first frame.
            buffers: the frames that follow.

        Raises:
            TimeoutError: the queue was full for the time limit: the driver does not read, or the link is cut.
        """
        last = len(buffers)
        try:
            self._plain_send(b"".join(head), _SNDMORE if last else 0)
            for number, buffer in enumerate(buffers, 1):
                self._plain_send(buffer, 0 if number == last else _SNDMORE)
        except zmq.Again:
            raise TimeoutError(
                f"the driver has not read for {self._send_timeout_s:g} s, or the link to it is cut"
            ) from None

    def reconnect(self, timeout_s: float) -> None:
        """Wait until libzmq has restored a connection that has ended; it has subscribed again then.

        Args:
            timeout_s: how long to wait, in seconds; zero to look once.

        Raises:
            LinkLost: it did not come back.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            self._socket.getsockopt(zmq.EVENTS)  # this thread subscribes again, and does so when it asks
            if not self._ended:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkLost(
                    f"the connection to the driver at {self._endpoint} has ended, and did not come back within "
                    f"{timeout_s:.3g} s: its host or process has gone, the link is cut, or it has sent a frame over "
                    f"the limit of {self._max_frame_bytes} bytes"
                )
            self._wait(left_s)

    def close(self) -> None:
        """Close the connection, once what was sent is in the kernel's hands, or `LINGER_S` have passed."""
        self._socket.close()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._context.term()

    def _look(self) -> None:
        """Learn what has become of the connection."""
        while self._monitor is not None:
            try:
                event, _ = self._monitor.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            # One that ends in its handshake was none.
            was_connected, self._connected = self._connected, event.startswith(_CONNECTED)
            self._ended = not self._connected and (was_connected or self._ended)

    def _wait(self, timeout_s: float, *sockets: zmq.Socket[bytes]) -> None:
        """Wait until something has come to one of the sockets, or of the connection."""
        poller = zmq.Poller()
        for each in (*sockets, self._monitor):
            if each is not None:
                poller.register(each, _POLLIN)
        poller.poll(int(timeout_s * 1000) + 1)
