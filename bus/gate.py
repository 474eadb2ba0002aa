"""The driver's gate for ranks of other hosts: tcp, always with CURVE, and for the group's own ranks alone.

libzmq asks for each connection, by ZAP (rfc.zeromq.org/spec/27), whether its key may come in; a thread of the gate's
answers. The answer names the rank that has this key, and libzmq puts the name on every message of the connection.

The answer to a stranger is "not now", not "never": after a "never" libzmq would not try again, and a rank may be
here before its key is known. Without an answer nobody comes in.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter, deque

import zmq
from zmq.utils import z85

from .errors import ConfigError, ProtocolError
from .keys import KeyPair, check_public_key
from .sockets import tune_tcp

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"stepcast"
_ZAP_VERSION = b"1.0"
_ADMITTED, _NOT_NOW = b"200", b"300"
#: How long the thread may take to end: it only ever answers.
_STOP_TIMEOUT_S = 5.0
_SHORT_KEY = 8
#: How the event begins, in a message of libzmq's own monitor.
_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL).to_bytes(2, sys.byteorder)

_log = logging.getLogger("stepcast.bus")


class Gate:
    """Binds a driver's sockets to tcp, and decides who may connect there.

    `bind` and `close` belong to the thread that uses the sockets; `admit` is safe in any thread.

    Args:
        context: the ZeroMQ context of those sockets.
        address: an address of this host, IPv4 or IPv6, where the ranks' hosts reach it.
        keys: the run's keys; new ones where there are none.

    Attributes:
        public_key: the driver's, which the ranks must know.
        refused: connections that were refused, by reason: "stranger" (its key is not of this group's ranks),
            "handshake" (it does not speak CURVE, or does not know the driver's key). One that tries again counts again.

    Raises:
        ConfigError: this libzmq was built without CURVE.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str = "127.0.0.1", keys: KeyPair | None = None
    ) -> None:
        self._keys = keys or KeyPair.make()
        self.public_key = self._keys.public
        self.refused: Counter[str] = Counter()
        self._context = context
        self._address = address
        self._ranks: dict[bytes, int] = {}
        self._bound: list[zmq.Socket[bytes]] = []
        self._new_monitors: deque[zmq.Socket[bytes]] = deque()  # the thread takes them from here
        self._closing = False
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="stepcast-gate", daemon=True)
        self._thread.start()

    def admit(self, rank: int, public_key: bytes) -> None:
        """Let a rank in, from now on.

        Args:
            rank: the rank.
            public_key: its key.

        Raises:
            ProtocolError: it is no key, or another rank's.
        """
        holder = self._ranks.setdefault(check_public_key(public_key), rank)
        if holder != rank:
            raise ProtocolError(f"rank {rank} has the public key of rank {holder}: each rank makes its own", rank=rank)

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Bind a socket to a port of its own, which the kernel chooses.

        libzmq gives each endpoint the options of the moment in which it is bound: those that were bound before, on ipc,
        stay as they are.

        Args:
            socket: the socket.

        Returns:
            The endpoint.

        Raises:
            ConfigError: the address is not one of this host's; the socket is closed then.
        """
        is_v6 = ":" in self._address
        socket.setsockopt(zmq.IPV6, int(is_v6))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        # Else everybody would come in who knows the driver's key when nobody answers for it.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        tune_tcp(socket)
        try:
            socket.bind(f"tcp://[{self._address}]:*" if is_v6 else f"tcp://{self._address}:*")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"can't listen on {self._address}: {error.strerror}; give an address of this host that the other "
                "hosts reach"
            ) from error
        endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        self._watch(socket, f"inproc://gate-{len(self._bound)}")
        return endpoint

    def rank_of(self, frame: zmq.Frame) -> int | None:
        """Tell whose connection a frame came over.

        Args:
            frame: a frame that was received without a copy.

        Returns:
            The rank; None where it did not come through the gate, but over ipc.
        """
        try:
            return int(frame.get("User-Id"))
        except zmq.ZMQError:  # it has none
            return None

    def close(self) -> None:
        """Let nobody in any more, and end the thread. Safe to call again."""
        if self._closing:
            return
        self._closing = True
        for socket in self._bound:
            if not socket.closed:
                socket.disable_monitor()
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_TIMEOUT_S)
        os.close(self._wake)

    def _watch(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.monitor(endpoint, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's own thread
        monitor.connect(endpoint)
        self._bound.append(socket)
        self._new_monitors.append(monitor)
        os.eventfd_write(self._wake, 1)

    # The thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        monitors: list[zmq.Socket[bytes]] = []
        try:
            while not self._closing:
                for ready, _ in poller.poll():
                    if ready is self._zap:
                        self._answer()
                    elif ready == self._wake:
                        os.eventfd_read(self._wake)
                    else:
                        self._note_failure(ready)
                while self._new_monitors:
                    monitors.append(self._new_monitors.popleft())
                    poller.register(monitors[-1], zmq.POLLIN)
        finally:
            for each in (self._zap, *monitors, *self._new_monitors):
                each.close()

    def _answer(self) -> None:
        _, request, _, address, _, _, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]) if credentials else b""
        rank = self._ranks.get(key)
        if rank is None:
            self._refuse(
                "stranger",
                f"from {address.decode(errors='replace')}: its key, {key[:_SHORT_KEY].decode()}..., is not that of a "
                "rank of this group",
            )
            self._zap.send_multipart([_ZAP_VERSION, request, _NOT_NOW, b"not a rank of this group", b"", b""])
        else:
            self._zap.send_multipart([_ZAP_VERSION, request, _ADMITTED, b"OK", str(rank).encode(), b""])

    def _note_failure(self, monitor: zmq.Socket[bytes]) -> None:
        event, endpoint = monitor.recv_multipart()
        if event.startswith(_FAILED) and endpoint.startswith(b"tcp:"):
            self._refuse("handshake", "it does not speak CURVE, or does not know this driver's key")

    def _refuse(self, reason: str, detail: str) -> None:
        if not self.refused[reason]:
            _log.warning("refused a connection: %s (later ones are only counted)", detail)
        self.refused[reason] += 1
