"""Parking inside a broadcast, for engines whose ranks wait for one another there: `Worker.idle = "collective"`.

Every rank's step socket is on the bus, whatever it waits in: the driver's messages, their order, the answers and the
replay of what is lost are the same. Only the word to go on comes another way. Rank 0 parks on the bus; when it has
taken a message, it broadcasts the message's sequence number, and the others, parked in that broadcast, read their own
sockets as far as that message. So the broadcast has eight bytes, and no message is ever taken from two sources.

The broadcast is over a gloo group of its own, on the CPU: control data must not pass a device's collectives, and its
place among the model's own is nobody's business. It has the process group's timeout all the same. A rank that parks for
longer dies of it, unless KEEPALIVE, taken by rank 0 from the bus like any other message, wakes it before.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from stepcast.bus.errors import ConfigError
from stepcast.bus.liveness import Phase
from stepcast.bus.subscriber import Gap, Message

from .board import Board
from .loop import StepSource

#: The rank that parks on the bus.
_LEADER = 0


def park_in_broadcast(steps: StepSource, board: Board, timeout_s: float) -> StepSource:
    """Have a rank take its messages when rank 0 has broadcast their numbers. Every rank calls it after `Worker.setup`.

    Args:
        steps: the rank's own step stream.
        board: where the loop tells what it is doing.
        timeout_s: the limit of each broadcast, in seconds.

    Returns:
        The step stream for the loop.

    Raises:
        ConfigError: there is no process group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            'Worker.idle is "collective", but setup() has not made a process group: call init_process_group'
        )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _Leader(steps, group) if dist.get_rank() == _LEADER else _Follower(steps, board, group)


class _Leader:
    """Parks on the bus, and tells the others how far to read."""

    def __init__(self, steps: StepSource, group: dist.ProcessGroup | None) -> None:
        self._steps = steps
        self._group = group

    def next(self) -> Message | Gap | None:
        """As `StepSource.next`."""
        item = self._steps.next()
        if isinstance(item, Message):
            dist.broadcast(torch.tensor([item.header.sequence]), _LEADER, self._group)
        return item


class _Follower:
    """Parks in the broadcast, and reads its own socket as far as it is told."""

    def __init__(self, steps: StepSource, board: Board, group: dist.ProcessGroup | None) -> None:
        self._steps = steps
        self._board = board
        self._group = group
        self._told = torch.zeros(1, dtype=torch.int64)
        self._taken = 0

    def next(self) -> Message | Gap | None:
        """As `StepSource.next`."""
        if self._told.item() == self._taken:
            self._board.enter(Phase.PARKED)
            dist.broadcast(self._told, _LEADER, self._group)
            # On the bus from here on: where the message is not there yet, the heartbeat may find that it was lost.
            self._board.enter(Phase.IDLE)
        item = self._steps.next()
        if isinstance(item, Message):
            self._taken = item.header.sequence
        return item
