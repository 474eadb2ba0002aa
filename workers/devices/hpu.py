"""A Gaudi card, with HCCL.

habana_frameworks replaces functions of torch.distributed by its own, with fewer parameters: only what both accept may
be passed. What it does at import, and what it leaves to exit handlers, is why this file is as it is.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from .device import Device, Memory


class HPU(Device):
    """The one card of this process. Its index is always 0, whichever card of the host it is: torch calls it "hpu"."""

    backend = "hccl"

    def bind(self) -> None:
        """As `Device.bind`.

        The card is only opened at its first use. Until then HLS_MODULE_ID says which it is to be; from then on it can't
        be another one.
        """
        self._check_environment()
        # Importing any part of it registers "hpu" and "hccl" with torch, and binds the process by its environment.
        importlib.import_module("habana_frameworks.torch.hpu")
        hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
        rank = self.rank
        if rank.world_size > 1:  # a single rank takes the first card that is free
            # Not left to the import: a fork may have it behind it.
            hccl.initialize_distributed_hpu(world_size=rank.world_size, rank=rank.rank, local_rank=rank.local_rank)
            self._check_module()

    def _check_environment(self) -> None:
        rank = self.rank
        place = {"RANK": rank.rank, "LOCAL_RANK": rank.local_rank, "WORLD_SIZE": rank.world_size}
        for name, value in place.items():
            if rank.world_size > 1 and os.environ.get(name) != str(value):
                raise self.unusable(
                    f"{name} is {os.environ.get(name)!r} in its environment, not '{value}': it must be there before "
                    "torch is imported, which may bind the process by it"
                )

    def _check_module(self) -> None:
        local_rank = self.rank.local_rank
        modules = os.environ.get("HABANA_VISIBLE_MODULES")
        expected = str(local_rank) if modules is None else modules.split(",")[local_rank].strip()
        bound = os.environ.get("HLS_MODULE_ID")
        if bound != expected:
            raise self.unusable(
                f"it is bound to module {bound} (HLS_MODULE_ID), where local rank {local_rank} has module {expected}: "
                "HLS_MODULE_ID must not be set for the ranks of a group"
            )

    def leave(self) -> None:
        """As `Device.leave`. Every rank waits for every other, and HCCL has no limit for it: the driver has."""
        internal = importlib.import_module("habana_frameworks.torch.utils.internal")
        if internal.is_lazy():  # else it is only a warning in the log
            importlib.import_module("habana_frameworks.torch.core").mark_step()
        super().leave()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._hpu.random.manual_seed_all(seed)

    def synchronize(self) -> None:
        """As `Device.synchronize`; in lazy mode it also runs what was only recorded."""
        self._hpu.synchronize()

    def memory(self) -> Memory:
        """As `Device.memory`; opens the card."""
        return Memory(*self._hpu.mem_get_info())

    @property
    def _hpu(self) -> Any:
        return torch.get_device_module("hpu")
