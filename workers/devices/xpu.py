"""A GPU of Intel's, with oneCCL, which torch calls XCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .device import Device, Memory


class XPU(Device):
    """A GPU, chosen by its index among those that this process sees."""

    backend = "xccl"

    def bind(self) -> None:
        if not dist.is_xccl_available():
            raise self.unusable(f"torch {torch.__version__} has no XCCL: install the build for these GPUs")
        torch.xpu.set_device(self.torch_device)

    def synchronize(self) -> None:
        torch.xpu.synchronize(self.torch_device)

    def memory(self) -> Memory:
        return Memory(*torch.xpu.mem_get_info(self.torch_device))
