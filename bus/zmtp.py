"""A rank's end of a ZeroMQ connection, spoken by the thread that uses it.

The driver's sockets are libzmq's. A rank on the same machine talks to them in ZMTP 3.0 (rfc.zeromq.org/spec/23) over
the Unix socket of their ``ipc://`` endpoint. libzmq in the rank would read and write in a thread of its own: a step
would wake four threads on its way through the rank, where this wakes one, which costs a third of the step.

Only what the bus needs is here: SUB and PUSH, the NULL mechanism, one connection for a socket.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

from .errors import ProtocolError

#: How long the driver may take to greet: its own I/O thread does, whatever its Python threads do.
HANDSHAKE_TIMEOUT_S = 10.0
#: How long a connection that broke is tried again, and how often.
RECONNECT_TIMEOUT_S = 30.0
_RECONNECT_INTERVAL_S = 0.05

_SCHEME = "ipc://"
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MAJOR_VERSION = 3
_GREETING_BYTES = 64
_GREETING = (_SIGNATURE + bytes([_MAJOR_VERSION, 0]) + b"NULL").ljust(_GREETING_BYTES, b"\0")
_MECHANISM = slice(12, 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_HEAD_BYTES, _LONG_HEAD_BYTES = 2, 9
_MAX_SHORT_BYTES = 255
_SIZE = struct.Struct(">Q")
_LONG_HEAD = struct.Struct(">BQ")
_UNSUBSCRIBE, _SUBSCRIBE = b"\0", b"\1"
#: One read takes a step of usual size whole; what is larger is read straight to where it stays.
_READ_BYTES = 1 << 16


class LinkLost(ConnectionError):
    """A connection to the driver has ended, and did not come back in time."""


class ZmtpSocket:
    """A SUB or PUSH socket with one connection, to a socket that libzmq has bound on this machine.

    Not thread-safe: it belongs to one thread.

    Args:
        endpoint: an ``ipc://`` endpoint.
        socket_type: "SUB" or "PUSH".
        max_frame_bytes: the largest frame that is accepted, checked before it is allocated. A PUSH socket gets none.
        send_timeout_s: the longest that a send may wait for the other side to read, in seconds; None without limit.

    Attributes:
        more: frames of the same message follow the one received last.

    Raises:
        ConnectionError, FileNotFoundError, TimeoutError: nobody greets there.
    """

    #: The kernel wakes who waits whenever there is something.
    look_interval_s: float | None = None

    def __init__(
        self, endpoint: str, socket_type: str, *, max_frame_bytes: int = 0, send_timeout_s: float | None = None
    ) -> None:
        assert endpoint.startswith(_SCHEME), endpoint  # noqa: S101 - the launcher made it
        self._path = endpoint.removeprefix(_SCHEME)
        self._type = socket_type
        self._max_frame_bytes = max_frame_bytes
        self._max_short_read = min(_READ_BYTES, max_frame_bytes + _LONG_HEAD_BYTES)
        self._send_timeout_s = send_timeout_s
        self._topics: list[bytes] = []
        self.more = 0
        self._unread = b""
        self._connect()

    def fileno(self) -> int:
        """The descriptor, for a poller; `poll` knows too what was read already."""
        return self._socket.fileno()

    def subscribe(self, topic: bytes) -> None:
        """Have messages sent here that begin with some bytes."""
        self._topics.append(topic)
        self.send((_SUBSCRIBE + topic,))

    def unsubscribe(self, topic: bytes) -> None:
        """Have them no longer sent. Safe to call again."""
        if topic in self._topics:
            self._topics.remove(topic)
            self.send((_UNSUBSCRIBE + topic,))

    def poll(self, timeout_s: float) -> bool:
        """Wait until something has come.

        Args:
            timeout_s: the longest to wait, in seconds.

        Returns:
            Whether `recv` has something to read, if only the end of the connection.
        """
        if self._unread:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    @property
    def has_unread(self) -> bool:
        """Whether something was read that `recv` has not returned yet: no poller sees it."""
        return bool(self._unread)

    def recv(self) -> bytes | bytearray:
        """Block until a frame has come.

        Returns:
            The frame; `more` tells whether it is the last one of its message.

        Raises:
            ConnectionError: the connection has ended, and with it what was received of a message.
            ProtocolError: the frame is over the limit; nothing can be received any more.
        """
        data = self._unread or self._receive(_READ_BYTES)
        # The usual case with few calls: one whole frame and nothing more.
        size = len(data)
        if (
            _LONG_HEAD_BYTES < size <= self._max_short_read
            and data[0] == _LONG
            and _SIZE.unpack_from(data, 1)[0] == size - _LONG_HEAD_BYTES
        ):
            self._unread = b""
            self.more = 0
            return data[_LONG_HEAD_BYTES:]
        return self._take_frame(data)

    def recv_rest(self) -> list[memoryview]:
        """Receive the frames of a message that follow one that was received.

        Returns:
            Read-only views on them.

        Raises:
            ConnectionError, ProtocolError: as `recv`.
        """
        frames = []
        while self.more:
            frames.append(memoryview(self.recv()).toreadonly())
        return frames

    def send(self, head: Sequence[bytes | memoryview], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message, waiting until all of it is on its way.

        Args:
            head: the parts of its first frame.
            buffers: the frames that follow.

        Raises:
            ConnectionError: the connection has ended; the message does not arrive.
            TimeoutError: the other side has not read for the time limit; the connection can't be used any more.
        """
        last = len(buffers)
        try:
            self._send(b"".join((_frame_head(_MORE if last else 0, sum(map(len, head))), *head)))
            for number, buffer in enumerate(buffers, 1):
                self._send(_frame_head(0 if number == last else _MORE, len(buffer)))
                self._send(buffer)
        except BlockingIOError:
            self._socket.close()  # it may be in the middle of a frame
            raise TimeoutError(f"the driver has not read for {self._send_timeout_s:g} s") from None

    def reconnect(self, timeout_s: float) -> None:
        """Replace a connection that has ended, and subscribe again.

        Args:
            timeout_s: how long to try, in seconds; zero for one attempt.

        Raises:
            LinkLost: it did not come back.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._socket.close()
            try:
                self._connect()
                for topic in self._topics:
                    self.send((_SUBSCRIBE + topic,))
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise LinkLost(
                        f"the connection to the driver has ended, and did not come back within {timeout_s:.3g} s: "
                        f"{error}"
                    ) from error
            else:
                return
            time.sleep(_RECONNECT_INTERVAL_S)

    def close(self) -> None:
        """Close the connection. What was sent still arrives."""
        self._socket.close()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unread = b""
        self.more = 0
        try:
            self._socket.settimeout(HANDSHAKE_TIMEOUT_S)
            self._socket.connect(self._path)
            self._greet()
            self._socket.settimeout(None)
            if self._send_timeout_s is not None:
                # Not the socket's own timeout, which would cost a system call more with each message.
                seconds, microseconds = divmod(int(self._send_timeout_s * 1e6), 1_000_000)
                limit = struct.pack("ll", seconds, microseconds)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            self._socket.close()
            raise
        self._receive_raw = self._socket.recv
        self._send = self._socket.sendall

    def _greet(self) -> None:
        """Greet, and say what kind of socket this is: the NULL mechanism's handshake."""
        name = self._type.encode()
        ready = b"\5READY\x0bSocket-Type" + struct.pack(">I", len(name)) + name
        self._socket.sendall(_GREETING + bytes((_COMMAND, len(ready))) + ready)
        greeting = self._read_exactly(_GREETING_BYTES)
        mechanism = greeting[_MECHANISM].rstrip(b"\0")
        if greeting[0] != _SIGNATURE[0] or greeting[10] < _MAJOR_VERSION or mechanism != b"NULL":
            raise ConnectionError(f"{self._path}: not a ZMTP 3 socket without a security mechanism")
        flags, size = self._read_exactly(_SHORT_HEAD_BYTES)
        command = self._read_exactly(size)
        if flags != _COMMAND or not command.startswith(b"\5READY"):
            raise ConnectionError(f"{self._path}: the handshake was refused: {bytes(command)!r}")

    def _receive(self, size: int) -> bytes:
        data = self._receive_raw(size)
        if not data:
            raise ConnectionResetError("the driver's end of the connection has gone")
        return data

    def _take_frame(self, data: bytes) -> bytes | bytearray:
        """Take the first frame of what was read, reading on where it is not whole."""
        self._unread = b""
        while True:
            while len(data) < _SHORT_HEAD_BYTES or (data[0] & _LONG and len(data) < _LONG_HEAD_BYTES):
                data += self._receive(_READ_BYTES)
            flags = data[0]
            if flags & _LONG:
                start, size = _LONG_HEAD_BYTES, _SIZE.unpack_from(data, 1)[0]
            else:
                start, size = _SHORT_HEAD_BYTES, data[1]
            if size > self._max_frame_bytes:
                self._socket.close()
                raise ProtocolError(
                    f"a frame of {size} bytes came from the driver, over the limit of {self._max_frame_bytes}",
                    expected=f"at most {self._max_frame_bytes}",
                    got=str(size),
                )
            end = start + size
            frame: bytes | bytearray
            if len(data) >= end:
                frame, data = data[start:end], data[end:]
            else:
                frame, data = self._read_large(memoryview(data)[start:], size), b""
            if not flags & _COMMAND:  # none is needed without a security mechanism
                self._unread = data
                self.more = flags & _MORE
                return frame

    def _read_large(self, begun: memoryview, size: int) -> bytearray:
        frame = bytearray(size)
        frame[: len(begun)] = begun
        self._read_into(memoryview(frame)[len(begun) :])
        return frame

    def _read_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the driver's end of the connection has gone")
            view = view[count:]


def _frame_head(flags: int, size: int) -> bytes:
    if size <= _MAX_SHORT_BYTES:
        return bytes((flags, size))
    return _LONG_HEAD.pack(flags | _LONG, size)
