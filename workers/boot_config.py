"""What a launcher hands to a worker process, by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from stepcast.bus.keys import RankKeys


@dataclass(frozen=True, kw_only=True)
class BootConfig:
    """Everything that a rank's process is told before it can hear the bus.

    Attributes:
        rank, local_rank, local_world_size, world_size, epoch, output_rank, device, device_class, rendezvous,
            collective_timeout_s, options: as in `RankInfo`.
        worker: the worker's class as ``module:Class`` or ``path/to/script.py:Class``.
        run_id: 16 bytes.
        publish_endpoint: the driver's PUB socket.
        reply_endpoint: the driver's PULL socket.
        max_message_bytes: the largest frame that is accepted.
        driver_pid: the driver's process id.
        driver_start_time: the driver's start time in clock ticks after boot, which tells it from a later process with
            the same id.
        die_with_driver: whether the kernel may be asked to kill this process when the thread that started it ends.
        startup_timeout_s: the longest to wait for the driver's handshake.
        reply_timeout_s: the longest that a reply may wait for the driver to read it.
        resume_timeout_s: after the rank raised in a step, the longest to wait until every rank has answered it.
        linger_s: the longest that the responder thread may take to end at exit.
        own_process: whether the process is stepcast's own: then its logging and its signal handlers are too, for as
            long as it lives, and the driver reads its output.
        log_level: the level of its logging, as a name.
        check_collectives: whether the worker's collectives are counted.
        keepalive: as in `ExecutorConfig`.
        curve: the keys for a driver on another host, whose endpoints are ``tcp://``; None for one on this host.
        arguments: the driver's `sys.argv`: a script that is loaded for its worker class may read them.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    epoch: int
    output_rank: int
    device: str
    device_class: str
    rendezvous: str
    collective_timeout_s: float
    worker: str
    run_id: bytes
    publish_endpoint: str
    reply_endpoint: str
    max_message_bytes: int
    driver_pid: int
    driver_start_time: int
    die_with_driver: bool
    startup_timeout_s: float
    reply_timeout_s: float
    resume_timeout_s: float
    linger_s: float
    own_process: bool
    log_level: str
    check_collectives: bool
    keepalive: str
    arguments: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    curve: RankKeys | None = field(default=None, repr=False)

    def to_bytes(self) -> bytes:
        """Encode it for a pipe or a file.

        Returns:
            MessagePack bytes.
        """
        # Paths and arguments may hold undecodable bytes, as surrogates.
        packed: bytes = msgpack.packb(asdict(self), unicode_errors="surrogateescape")
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> BootConfig:
        """Decode what `to_bytes` made.

        Args:
            data: MessagePack bytes.

        Returns:
            The configuration.
        """
        fields = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape")
        curve = fields.pop("curve")
        return cls(**fields, curve=None if curve is None else RankKeys(**curve))
