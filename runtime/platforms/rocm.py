"""AMD's GPUs, with RCCL, which torch calls NCCL, as it calls the devices "cuda"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .cuda import CUDA
from .host import Host, Platform, count_masked, found_by_torch, read


class ROCm(CUDA):
    """A GPU for each rank; a rank chooses its own by its index."""

    name = "rocm"
    masks = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

    def detect(self, host: Host) -> Platform | None:
        if not (host.root / "dev/kfd").exists():
            return None
        nodes = (host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
        gpus = sorted(path.parent.name for path in nodes if read(path) not in ("", "0"))  # a CPU's node has gpu_id 0
        platform = found_by_torch(self.name, host, [f"/dev/kfd node {node}" for node in gpus], self.masks)
        if platform is not None and platform.problem is None:
            platform = replace(platform, problem=_contradiction(platform))
        return platform

    def count(self, platform: Platform) -> int:
        """As `DeviceKind.count`: the one mask hides devices, the other chooses among what is left."""
        masks = platform.masks
        visible = count_masked(len(platform.devices), masks.get("ROCR_VISIBLE_DEVICES"))
        return count_masked(visible, masks.get("HIP_VISIBLE_DEVICES", masks.get("CUDA_VISIBLE_DEVICES")))

    def visible(self, devices: Sequence[str]) -> Mapping[str, str | None]:
        """As `DeviceKind.visible`. ROCR_VISIBLE_DEVICES stays: it hides devices before these are numbered."""
        # HIP reads both, and they must not contradict each other.
        return {"HIP_VISIBLE_DEVICES": ",".join(devices), "CUDA_VISIBLE_DEVICES": None}


def _contradiction(platform: Platform) -> str | None:
    rocr, hip, cuda = (platform.masks.get(name) for name in ROCm.masks)
    if hip is not None and cuda is not None and hip != cuda:
        return f"HIP_VISIBLE_DEVICES={hip!r} and CUDA_VISIBLE_DEVICES={cuda!r} contradict each other: set one of them"
    if rocr is not None and hip is not None and len(hip.split(",")) > len(rocr.split(",")):
        return (
            f"HIP_VISIBLE_DEVICES={hip!r} names more devices than ROCR_VISIBLE_DEVICES={rocr!r} leaves, among which it "
            "chooses: name fewer"
        )
    return None
