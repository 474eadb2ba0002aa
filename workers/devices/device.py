"""`Device`: what a rank does with its device, whatever its kind."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from stepcast.bus.errors import ConfigError
from stepcast.workers.base import RankInfo


@dataclass(frozen=True)
class Memory:
    """A device's memory, in bytes.

    Attributes:
        free: what can be allocated.
        total: what there is.
    """

    free: int
    total: int


class Device:
    """One rank's device. A kind is a subclass; `DeviceKind.device_class` of the driver's side names it.

    Args:
        rank: the rank's place in the group.

    Attributes:
        backend: torch.distributed's name for the library of its collectives.
        waits_for_peers: whether a rank that leaves its process group waits for the others, without a limit. Such a
            rank never leaves it by an exit handler: it leaves with all others, or not at all.
        rank: the rank's place in the group.
        torch_device: torch's own object for it.
    """

    backend: ClassVar[str]
    waits_for_peers: ClassVar[bool] = True

    def __init__(self, rank: RankInfo) -> None:
        self.rank = rank
        self.torch_device = torch.device(rank.device)

    def bind(self) -> None:
        """Make the device this process's own. To do so again changes nothing.

        Raises:
            ConfigError: it can't be used.
        """
        raise NotImplementedError

    def join(self) -> None:
        """Make the default process group, together with all other ranks.

        Raises:
            RuntimeError: a rank did not come within the limit.
        """
        dist.init_process_group(self.backend, **self.meeting())
        self.warm_up()

    def meeting(self) -> dict[str, Any]:
        """Return where and how the ranks meet, as arguments of `init_process_group` that every kind accepts."""
        rank = self.rank
        return {
            "init_method": rank.rendezvous,
            "timeout": timedelta(seconds=rank.collective_timeout_s),
            "world_size": rank.world_size,
            "rank": rank.rank,
        }

    def warm_up(self) -> None:
        """Run a first collective, in which the connections are made, and see that all ranks are in it.

        Raises:
            RuntimeError: they are not.
        """
        ones = torch.ones(1, device=self.torch_device)
        dist.all_reduce(ones)
        if (total := int(ones.item())) != self.rank.world_size:
            raise RuntimeError(
                f"the first {self.backend} collective of rank {self.rank.rank} adds up to {total}, not to the "
                f"{self.rank.world_size} ranks of its group: look for other programs on the same devices, and compare "
                "the versions of driver and libraries on all ranks"
            )

    def leave(self) -> None:
        """Leave the process group, after the last work. Where `waits_for_peers`, all ranks must do so."""
        self.synchronize()
        dist.destroy_process_group()

    def seed(self, seed: int) -> None:
        """Seed the random numbers of Python, numpy (where it is imported) and torch, on every device.

        Args:
            seed: the seed.
        """
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        raise NotImplementedError

    def memory(self) -> Memory:
        """Ask the device for its memory."""
        raise NotImplementedError

    def unusable(self, reason: str) -> ConfigError:
        """Make the error for a device that can't be used.

        Args:
            reason: why, and what to do.
        """
        return ConfigError(f"rank {self.rank.rank} can't use its device {self.rank.device}: {reason}")
