"""What a rank does with its device: one small file for each kind. Imports torch."""

from __future__ import annotations

import pkgutil

from stepcast.bus.errors import ConfigError
from stepcast.workers.base import RankInfo

from .device import Device, Memory

__all__ = ["Device", "Memory", "open_device"]


def open_device(rank: RankInfo) -> Device:
    """Bind this process to the rank's device, where it isn't yet: for all but CPUs that was done before `Worker.setup`.

    Args:
        rank: this rank's place in the group, with the device and its class.

    Returns:
        The device: to seed it, wait for it, and ask for its memory.

    Raises:
        ConfigError: the device can't be used.
    """
    device_class = pkgutil.resolve_name(rank.device_class)
    if not (isinstance(device_class, type) and issubclass(device_class, Device)):
        raise ConfigError(f"{rank.device_class} must be a subclass of stepcast.workers.devices.Device")
    device = device_class(rank)
    device.bind()
    return device
