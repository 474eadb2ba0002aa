"""The driver's ends of the bus, from their bind to their close."""

from __future__ import annotations

import zmq

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.gate import Gate
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from stepcast.workers.loop import MAX_FAILURE_BYTES

from .config import ExecutorConfig
from .state import Life


class DriverSockets:
    """One life's sockets: on ipc for ranks of this host, and once `listen` was called, on tcp behind a gate.

    Args:
        config: the settings.
        directory: the run's private directory.
        life: run id and epoch.

    Attributes:
        publisher: publishes to the ranks.
        replies: reads what they answer.
        gate: decides which ranks of other hosts come in; None where there are none.
    """

    def __init__(self, config: ExecutorConfig, directory: RunDirectory, life: Life) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate: Gate | None = None
        self.publisher = Publisher(
            self._context,
            directory.endpoint("publish"),
            run_id=life.run_id,
            epoch=life.epoch,
            world_size=config.world_size,
            max_in_flight=config.max_in_flight,
            max_in_flight_bytes=config.max_in_flight_bytes,
        )
        self.replies = ReplyReader(
            self._context,
            directory.endpoint("replies"),
            run_id=life.run_id,
            epoch=life.epoch,
            world_size=config.world_size,
            max_message_bytes=max(config.max_message_bytes, MAX_FAILURE_BYTES),
        )

    def listen(self, address: str) -> Gate:
        """Let ranks of other hosts connect: before any step, in the thread that reads and publishes until then.

        Args:
            address: the address of this host at which they reach it.

        Returns:
            The gate, which is to be told their keys.

        Raises:
            ConfigError: the address is none of this host's.
        """
        self.gate = gate = Gate(self._context, address)
        self.publisher.listen(gate)
        self.replies.listen(gate)
        return gate

    def close(self) -> None:
        """Close the sockets. No other thread may use them any more."""
        if self.gate is not None:
            self.gate.close()
        self.publisher.close()
        self.replies.close()
        self._context.term()
