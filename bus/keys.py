"""The keys with which ranks of other hosts and the driver know each other: CURVE keys, made for one run.

Keys are in ZeroMQ's own notation (Z85): 40 printable bytes. Secret keys never show in a `repr`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field

from .errors import ConfigError, ProtocolError

KEY_BYTES = 40
_Z85 = frozenset((string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#").encode())


@dataclass(frozen=True)
class KeyPair:
    """One side's keys.

    Attributes:
        public: may be told to anybody.
        secret: never leaves the process, but to the child that it is made for.
    """

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> KeyPair:
        """Make a new pair.

        Returns:
            The pair.

        Raises:
            ConfigError: this libzmq was built without CURVE.
        """
        import zmq  # noqa: PLC0415 - a rank that stays on its driver's host has no use for it

        if not zmq.has("curve"):
            raise ConfigError(
                "this libzmq was built without CURVE, and tcp is never used without: install pyzmq from its wheel"
            )
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class RankKeys:
    """What a rank needs to reach a driver on another host.

    Attributes:
        server: the driver's public key.
        public, secret: the rank's own.
    """

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, server: bytes, own: KeyPair) -> RankKeys:
        """Put them together.

        Args:
            server: the driver's public key.
            own: the rank's pair.

        Returns:
            The keys.
        """
        return cls(check_public_key(server), own.public, own.secret)


def check_public_key(key: object) -> bytes:
    """Look whether something can be a public key; it may have come over the network.

    Args:
        key: what came.

    Returns:
        The key.

    Raises:
        ProtocolError: it is none.
    """
    if isinstance(key, bytes) and len(key) == KEY_BYTES and _Z85.issuperset(key):
        return key
    raise ProtocolError(
        f"not a public key: {key!r:.80}", expected=f"{KEY_BYTES} bytes of Z85", got=f"{type(key).__name__}"
    )
