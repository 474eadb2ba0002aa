"""What a driver wants of Ray, as it tells the process that speaks with Ray."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack


@dataclass(frozen=True)
class Order:
    """What a driver wants of Ray.

    Attributes:
        descriptor: the connection to the driver.
        driver: its process id and start time.
        niceness: its niceness.
        run_directory: the run's private directory.
        address: the cluster's address; None to start one on this host, which ends with this process.
        temporary: where that one keeps its files; None for Ray's own choice.
        world_size: the number of ranks.
        resource: what Ray counts the ranks' devices as; one for each.
        timeout_s: how long all of it may take, in seconds.
    """

    descriptor: int
    driver: tuple[int, int]
    niceness: int
    run_directory: str
    address: str | None
    temporary: str | None
    world_size: int
    resource: str
    timeout_s: float

    def to_bytes(self) -> bytes:
        """Encode it for a file."""
        packed: bytes = msgpack.packb(vars(self), unicode_errors="surrogateescape")
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """Decode what `to_bytes` made.

        Args:
            data: MessagePack bytes.
        """
        return cls(**msgpack.unpackb(data, unicode_errors="surrogateescape"))
