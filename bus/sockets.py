"""What libzmq's sockets share, on the driver's side and on that of a rank of another host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

#: How long a tcp connection may carry nothing that it should, until the kernel gives it up. A link that is cut for less
#: loses nothing: TCP sends again. The host at the other end has gone, or is frozen with its buffers full.
LINK_TIMEOUT_S = 30.0
#: An idle connection is asked for a sign of life as often.
_KEEPALIVE_S = 10
#: How long the other side may take for the handshake. A rank whose key is not known yet tries again after this.
HANDSHAKE_TIMEOUT_S = 3.0

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


def tune_tcp(socket: zmq.Socket[bytes]) -> None:
    """Have a socket's tcp connections, from now on, notice in bounded time that the other host has gone.

    The kernels do it, not ZMTP's heartbeats: a process that is stopped for a while keeps its connections and what is on
    its way, since its kernel goes on to answer.

    Args:
        socket: the socket.
    """
    socket.setsockopt(zmq.TCP_MAXRT, int(LINK_TIMEOUT_S * 1000))  # TCP_USER_TIMEOUT: for data that is not acknowledged
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, int(LINK_TIMEOUT_S) // _KEEPALIVE_S)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000))
