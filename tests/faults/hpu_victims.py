"""Workers on the stand-in for Gaudi cards."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from stepcast import RankInfo, Worker
from stepcast.workers.process_group import destroy_process_group, init_process_group


class Summing(Worker):
    """Adds up over all ranks."""

    def setup(self, rank: RankInfo) -> None:
        self.rank = rank
        init_process_group(rank)

    def execute(self, step: float) -> Any:
        total = torch.full((1,), step + self.rank.rank, device=self.rank.device)
        dist.all_reduce(total)
        return [dist.get_backend(), self.rank.device, total.item()]

    def teardown(self) -> None:
        destroy_process_group()


class DiesInTeardown(Summing):
    """Its last rank is gone when the others leave the process group."""

    def teardown(self) -> None:
        if self.rank.rank == self.rank.world_size - 1:
            os._exit(5)
        super().teardown()


class Careless(Summing):
    """Leaves the process group to whoever comes after it."""

    def teardown(self) -> None:
        pass
