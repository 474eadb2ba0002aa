"""Intel's GPUs, with oneCCL, which torch calls XCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .host import Host, Platform, count_masked, found_by_torch
from .kind import ALLOWED, DeviceKind, Ruling

_INTEL = "0x8086"


class XPU(DeviceKind):
    """A GPU for each rank; a rank chooses its own by its index."""

    name = "xpu"
    device_class = "stepcast.workers.devices.xpu:XPU"
    masks = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")

    def detect(self, host: Host) -> Platform | None:
        render_nodes = host.device_files("dri", r"renderD\d+")
        devices = [path for path in render_nodes if host.vendor("drm", path) == _INTEL]
        return found_by_torch(self.name, host, devices, self.masks)

    def count(self, platform: Platform) -> int:
        """As `DeviceKind.count`; a mask of tiles ("0.0,0.1") makes each a device."""
        return count_masked(len(platform.devices), platform.masks.get("ZE_AFFINITY_MASK"))

    def environment(self) -> Mapping[str, str]:
        """As `DeviceKind.environment`: oneCCL reads these when torch is imported."""
        return {"CCL_ATL_TRANSPORT": "ofi"}

    def visible(self, devices: Sequence[str]) -> Mapping[str, str | None]:
        """As `DeviceKind.visible`. A selector, such as older versions of Ray set, would choose among these again."""
        return {"ZE_AFFINITY_MASK": ",".join(devices), "ONEAPI_DEVICE_SELECTOR": None}

    def start_method(self, method: str, modules: Mapping[str, Any]) -> Ruling:  # noqa: ARG002
        if method == "fork":
            return Ruling(refused="Intel's runtime does not survive a fork")
        return ALLOWED
