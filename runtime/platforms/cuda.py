"""NVIDIA's GPUs, with NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .host import Host, Platform, count_masked, found_by_torch
from .kind import ALLOWED, DeviceKind, Ruling


class CUDA(DeviceKind):
    """A GPU for each rank; a rank chooses its own by its index."""

    name = "cuda"
    device_class = "stepcast.workers.devices.cuda:CUDA"
    masks: ClassVar[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES",)

    def detect(self, host: Host) -> Platform | None:
        devices = host.device_files("", r"nvidia\d+")
        if not devices and (host.root / "dev/dxg").exists():  # the one device of the Windows Subsystem for Linux
            devices = ["/dev/dxg"]
        return found_by_torch(self.name, host, devices, self.masks)

    def count(self, platform: Platform) -> int:
        return count_masked(len(platform.devices), platform.masks.get("CUDA_VISIBLE_DEVICES"))

    def device(self, local_rank: int) -> str:
        """As `DeviceKind.device`; torch calls AMD's GPUs by this name too."""
        return f"cuda:{local_rank}"

    def visible(self, devices: Sequence[str]) -> Mapping[str, str | None]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}

    def start_method(self, method: str, modules: Mapping[str, Any]) -> Ruling:
        """As `DeviceKind.start_method`: a fork of a process that uses a GPU can't use one."""
        if method == "fork" and "torch" in modules and modules["torch"].cuda.is_initialized():
            return Ruling(refused=f"this process has initialized {self.name} already, which no fork of it can use then")
        return ALLOWED
