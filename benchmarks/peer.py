"""What the runner asks of a peer, and which peers there are.

To add one: a file under `benchmarks/peers/`, and a line in `PEERS`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any, Protocol, cast

from benchmarks.codec import pack

Payload = dict[str, Any]

SMALLEST_PAYLOAD_BYTES = 64
"""Room for one sequence and the padding."""

_VOCABULARY = 49_152
_CONTEXT = 2_048


class PeerError(Exception):
    """A peer cannot go on; the message says which rank and why."""


class Peer(Protocol):
    """One way to bring a step to every rank and all answers back.

    Equal work for all: the driver encodes the step with MessagePack once, each worker decodes it and encodes it again
    as its answer, and the driver decodes every answer.
    """

    @property
    def name(self) -> str:
        """The name it has on the command line and in the results."""

    def start(self, world_size: int) -> None:
        """Start the workers; return once every rank can take a step."""

    def step(self, payload: Payload) -> list[Any]:
        """Bring `payload` to every rank; return the answers of all of them, in any order."""

    def pids(self) -> tuple[int, ...]:
        """Every process but the driver that does this peer's work; callable at any time."""

    def stop(self) -> None:
        """End the workers and release everything; also after a `start` that failed half-way."""


def _at(target: str) -> Callable[[], Peer]:
    """A factory that imports `module:Class` when called, so that one peer's missing library stops no other."""

    def make() -> Peer:
        module, _, name = target.partition(":")
        return cast("Peer", getattr(importlib.import_module(module), name)())

    return make


PEERS: dict[str, Callable[[], Peer]] = {
    "plain_zmq": _at("benchmarks.peers.plain_zmq:PlainZmqPeer"),
    "pipe": _at("benchmarks.peers.pipe:PipePeer"),
    "stepcast_bus": _at("benchmarks.peers.stepcast_bus:StepcastBusPeer"),
}
"""Every peer by name, in the order of the table."""


def decode_step(size: int, seed: int = 0) -> Payload:
    """What a decode step carries, made to encode to exactly `size` bytes of MessagePack.

    Args:
        size: bytes of the encoded step.
        seed: the same seed gives the same step.

    Returns:
        Request ids, their new tokens and positions, and a padding of some bytes.

    Raises:
        ValueError: `size` is below `SMALLEST_PAYLOAD_BYTES`.
    """
    if size < SMALLEST_PAYLOAD_BYTES:
        raise ValueError(f"a payload has at least {SMALLEST_PAYLOAD_BYTES} bytes, not {size}")
    values = random.Random(seed)
    batch = size // 19 + 1  # 13 bytes an id, 3 a token, 3 a position
    columns: dict[str, list[Any]] = {
        "ids": [f"req-{values.randrange(10**8):08d}" for _ in range(batch)],
        "tokens": [values.randrange(256, _VOCABULARY) for _ in range(batch)],
        "positions": [values.randrange(256, _CONTEXT) for _ in range(batch)],
    }
    while (missing := size - len(pack({"step": 4_242, **columns, "padding": b""}))) < 0:
        surplus = -(missing // 19)
        for column in columns.values():
            del column[-surplus:]
    return {"step": 4_242, **columns, "padding": bytes(missing)}
