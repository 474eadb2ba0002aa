"""Workers that enter collectives, each rank as it is told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from stepcast import RankInfo, Worker

_POLL_INTERVAL_S = 0.005
_LIMIT_S = 60.0


def wait_for(path: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has written {path}")
        time.sleep(_POLL_INTERVAL_S)


class Collectives(Worker):
    """A step is a list of words for every rank, or a dict of such lists by rank; answers with what they computed."""

    def setup(self, rank: RankInfo) -> None:
        import torch  # noqa: PLC0415 - in the worker's process alone
        import torch.distributed as dist  # noqa: PLC0415

        from stepcast.workers.process_group import init_process_group  # noqa: PLC0415

        self.torch, self.dist, self.info = torch, dist, rank
        init_process_group(rank)
        self.pair = dist.new_group([0, 1])

    def execute(self, step: Any) -> Any:
        words = step[str(self.info.rank)] if isinstance(step, dict) else step
        if words[:1] == ["nap"]:
            time.sleep(0.2)
        return [self.act(word) for word in words]

    def act(self, word: str) -> Any:
        torch, dist = self.torch, self.dist
        name, _, argument = word.partition(" ")
        tensor = torch.full((int(argument) if argument.isdecimal() else 1,), self.info.rank + 1.0)
        if name == "gate":
            wait_for(argument)
        elif name == "all_reduce":
            dist.all_reduce(tensor)
        elif name == "broadcast":
            dist.broadcast(tensor, 0)
        elif name == "functional":
            functional = torch.ops._c10d_functional
            tensor = functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name))
        elif name == "gathered":
            out = torch.empty(self.info.world_size)
            dist.all_gather_single(out, tensor)
            return out.tolist()
        elif name == "asynchronous":
            dist.all_reduce(tensor, async_op=True).wait()
        elif name == "pair" and self.info.rank in (0, 1):
            dist.all_reduce(tensor, group=self.pair)
        elif name == "abandoned":
            self.work = dist.all_reduce(tensor, async_op=True)
        elif name == "no":
            raise ValueError(word)
        return tensor[0].item()

    def pids(self) -> int:
        return os.getpid()

    def backend(self) -> str:
        name: str = self.dist.get_backend()
        return name

    def teardown(self) -> None:
        from stepcast.workers.process_group import destroy_process_group  # noqa: PLC0415

        destroy_process_group()


class Parked(Collectives):
    """The same, parked inside a broadcast."""

    idle: ClassVar[str] = "collective"


class ParkedWithoutGroup(Worker):
    """Wants to park where there is nothing to park in."""

    idle: ClassVar[str] = "collective"


class LeavesTogether(Collectives):
    """Its teardown is a collective, which rank 1 never enters."""

    def teardown(self) -> None:
        if self.info.rank == 1:
            time.sleep(_LIMIT_S)
        self.dist.barrier()
