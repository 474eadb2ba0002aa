"""How a rank reaches its driver: over the endpoint's own kind of socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .errors import ConfigError
from .keys import RankKeys
from .zmtp import ZmtpSocket

_TCP = "tcp://"


class RankSocket(Protocol):
    """A SUB or PUSH socket with one connection. `ZmtpSocket` tells of each method, `CurveSocket` of what differs."""

    @property
    def look_interval_s(self) -> float | None:
        """How often `poll` must be called though the descriptor stays silent, in seconds; None for never."""

    @property
    def has_unread(self) -> bool:
        """Whether something lies here that `recv` has not returned yet."""

    def fileno(self) -> int:
        """The descriptor, for a poller."""

    def subscribe(self, topic: bytes) -> None:
        """Have messages sent here that begin with some bytes."""

    def unsubscribe(self, topic: bytes) -> None:
        """Have them no longer sent."""

    def poll(self, timeout_s: float) -> bool:
        """Wait until `recv` has something to read, if only the end of the connection."""

    def recv(self) -> bytes | bytearray:
        """Block until a frame has come."""

    def recv_rest(self) -> list[memoryview]:
        """Receive the frames of a message that follow one that was received."""

    def send(self, head: Sequence[bytes | memoryview], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message."""

    def reconnect(self, timeout_s: float) -> None:
        """Restore a connection that has ended."""

    def close(self) -> None:
        """Close the connection."""


def connect(
    endpoint: str,
    socket_type: str,
    keys: RankKeys | None = None,
    *,
    max_frame_bytes: int = 0,
    send_timeout_s: float | None = None,
) -> RankSocket:
    """Connect a socket to one of the driver's.

    Args:
        endpoint: ``ipc://`` on the driver's own host, else ``tcp://``.
        socket_type: "SUB" or "PUSH".
        keys: for tcp; ipc has no use for them.
        max_frame_bytes, send_timeout_s: as in `ZmtpSocket`.

    Returns:
        The socket.

    Raises:
        ConfigError: tcp without keys.
        OSError: nobody greets on ipc. On tcp libzmq tries until somebody does.
    """
    if not endpoint.startswith(_TCP):
        return ZmtpSocket(endpoint, socket_type, max_frame_bytes=max_frame_bytes, send_timeout_s=send_timeout_s)
    if keys is None:
        raise ConfigError(f"{endpoint} needs keys: tcp is never used without CURVE")
    from .curve_socket import CurveSocket  # noqa: PLC0415 - libzmq, for ranks of other hosts alone

    return CurveSocket(endpoint, socket_type, keys, max_frame_bytes=max_frame_bytes, send_timeout_s=send_timeout_s)
