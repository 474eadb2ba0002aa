"""What the sockets of both sides share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

#: What a frame may have beside the payload.
HEAD_ROOM_BYTES = 256
_RCVMORE = int(zmq.RCVMORE)


def receive_buffers(socket: zmq.Socket[bytes]) -> list[memoryview]:
    """Receive the frames of a message that follow its head.

    Args:
        socket: the socket.

    Returns:
        Views on them.
    """
    buffers = []
    while socket.getsockopt(_RCVMORE):
        buffers.append(socket.recv(copy=False).buffer)
    return buffers


def plain_send(socket: zmq.Socket[bytes]) -> Callable[..., Any]:
    """Get a socket's `send` without pyzmq's layer for draft sockets, a Python call less in each message.

    Args:
        socket: the socket.

    Returns:
        A function of data, flags, and whether to copy.
    """
    backend_send: Callable[..., Any] = super(zmq.Socket, socket).send
    return backend_send
