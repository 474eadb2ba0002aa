"""CPUs, with gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .host import Host, Platform
from .kind import ALLOWED, DeviceKind, Ruling


class CPU(DeviceKind):
    """The host's processors, which every rank shares."""

    name = "cpu"
    device_class = "stepcast.workers.devices.cpu:CPU"
    ray_resource = "CPU"

    def detect(self, host: Host) -> Platform:
        """As `DeviceKind.detect`; they are always there."""
        version = host.version("torch")
        return Platform(
            name=self.name,
            software=version and f"torch {version}",
            problem=None if version else "torch is not installed",
        )

    def count(self, platform: Platform) -> None:
        """As `DeviceKind.count`."""

    def device(self, local_rank: int) -> str:  # noqa: ARG002
        return "cpu"

    def start_method(self, method: str, modules: Mapping[str, Any]) -> Ruling:  # noqa: ARG002
        return ALLOWED
