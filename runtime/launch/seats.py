"""Which rank is computed where, in a group that lies on several nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Spot(NamedTuple):
    """Where a rank can be.

    Attributes:
        index: its number among those that there are.
        node: its node's id.
        address: its node's address.
        devices: the ids of the devices, among its node's, that belong to it.
        pid, start_time: the process that holds it, on its node.
        sees_driver: whether that process and the driver see each other as processes of one host, and the same files.
        listening: a port of its node at which it listens for what the rank may serve there, and the descriptor.
    """

    index: int  # type: ignore[assignment] # not the tuple's method
    node: str
    address: str
    devices: Sequence[str]
    pid: int
    start_time: int
    sees_driver: bool
    listening: tuple[int, int]

    @classmethod
    def from_report(cls, index: int, report: Mapping[str, Any]) -> Spot:
        """Take what the process that holds it has told.

        Args:
            index: its number.
            report: the other attributes by their names.
        """
        return cls(index=index, **report)


class Seat(NamedTuple):
    """A rank's place. The rank is its number in the sequence.

    Attributes:
        spot: where it is.
        local_rank: its number among the ranks of its node.
        local_world_size: their number.
        devices: the devices of all the ranks of its node, in the order of the local ranks.
    """

    spot: Spot
    local_rank: int
    local_world_size: int
    devices: Sequence[str]


def seat(spots: Sequence[Spot], driver_node: str) -> list[Seat]:
    """Give each rank a spot: node by node, the driver's first, and on each in the order of the devices.

    Args:
        spots: as many as there are ranks.
        driver_node: the id of the driver's node.

    Returns:
        The ranks' places, in order.
    """
    nodes: dict[str, list[Spot]] = {}
    for spot in sorted(spots, key=lambda each: (each.node != driver_node, each.address, each.node)):
        nodes.setdefault(spot.node, []).append(spot)
    seats = []
    for on_node in nodes.values():
        on_node.sort(key=lambda each: ([_number(device) for device in each.devices], each.index))
        devices = [device for spot in on_node for device in spot.devices]
        seats += [Seat(spot, local_rank, len(on_node), devices) for local_rank, spot in enumerate(on_node)]
    return seats


def _number(device: str) -> tuple[int, str]:
    """A device's place among others: ids are numbers, or names such as "GPU-1a2b"."""
    return (int(device), "") if device.isdecimal() else (-1, device)
