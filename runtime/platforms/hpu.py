"""Intel's Gaudi cards, with HCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .host import Host, Platform, found
from .kind import ALLOWED, DeviceKind, Ruling

_HABANA = "0x1da3"


class HPU(DeviceKind):
    """A card for each rank.

    A process is bound by its place in the group (RANK, LOCAL_RANK, WORLD_SIZE), which its environment must have before
    it imports torch: torch's plugin may look there as soon as that. It remembers the card in HLS_MODULE_ID, which
    overrules the place, and so must not be inherited.
    """

    name = "hpu"
    device_class = "stepcast.workers.devices.hpu:HPU"
    masks = ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID")
    not_inherited = ("HLS_MODULE_ID",)
    ray_resource = "HPU"

    def detect(self, host: Host) -> Platform | None:
        devices = [
            path for path in host.device_files("accel", r"accel\d+") if host.vendor("accel", path) == _HABANA
        ] + host.device_files("", r"hl\d+")  # the latter of drivers older than 1.11
        if not devices:
            return None
        version = host.version("habana-torch-plugin")
        software = None if host.find_module("habana_frameworks") is None else f"habana-torch-plugin {version or '?'}"
        problem = None
        if software is None:
            problem = (
                "habana_frameworks can't be imported: install the habana-torch-plugin that belongs to the driver's "
                "release (it is not on PyPI)"
            )
        return found(self.name, host, devices, self.masks, software=software, problem=problem)

    def count(self, platform: Platform) -> int:
        """As `DeviceKind.count`: HABANA_VISIBLE_MODULES names the cards of the whole job, one for each rank."""
        modules = platform.masks.get("HABANA_VISIBLE_MODULES")
        if modules is None:
            return len(platform.devices)
        return min(len([each for each in modules.split(",") if each.strip()]), len(platform.devices))

    def device(self, local_rank: int) -> str:  # noqa: ARG002
        """As `DeviceKind.device`; a process has one card, whose index in it is 0."""
        return "hpu"

    def visible(self, devices: Sequence[str]) -> Mapping[str, str | None]:
        """As `DeviceKind.visible`. A list of one card, as Ray gives it, has none for a local rank above 0."""
        return {"HABANA_VISIBLE_MODULES": ",".join(devices)}

    def start_method(self, method: str, modules: Mapping[str, Any]) -> Ruling:
        if method == "spawn":
            return ALLOWED
        if method == "fork" and "habana_frameworks" in modules:
            return Ruling(
                refused="this process has imported habana_frameworks, which binds a process when it is imported: "
                "a fork of it can't be bound to a card of its own"
            )
        return Ruling(
            warning="before Python 3.13 such a process ends without its exit handlers, in which HCCL leaves its "
            "group and waits for the others: stepcast's ranks leave theirs before, but a process group that a worker "
            "makes by itself may hang at exit"
        )
