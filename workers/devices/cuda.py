"""A GPU of NVIDIA's with NCCL, or of AMD's with RCCL: torch calls both by the first ones' names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .device import Device, Memory


class CUDA(Device):
    """A GPU, chosen by its index among those that this process sees."""

    backend = "nccl"

    def bind(self) -> None:
        if not dist.is_nccl_available():
            raise self.unusable(f"torch {torch.__version__} has no NCCL: install the build for these GPUs")
        torch.cuda.set_device(self.torch_device)

    def join(self) -> None:
        """As `Device.join`. With its device told, NCCL connects at once, and a barrier knows where to run."""
        dist.init_process_group(self.backend, device_id=self.torch_device, **self.meeting())
        self.warm_up()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> Memory:
        return Memory(*torch.cuda.mem_get_info(self.torch_device))
