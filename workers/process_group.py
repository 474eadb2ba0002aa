"""Joining and leaving a rank's torch.distributed process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from .base import RankInfo
from .devices import Device, open_device

#: Rendezvous that only ranks of one host can share, so that their traffic may stay on the loopback interface.
_SINGLE_HOST = ("file://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")

#: The device whose process group this process has joined.
_joined: Device | None = None


def init_process_group(rank: RankInfo) -> Device:
    """Join the group's process group. Every rank calls it in `Worker.setup`, before it loads sharded weights.

    The rank's device tells the backend: gloo, nccl, hccl or xccl. With gloo, where collectives are checked, torch knows
    it as "stepcast_gloo": gloo, with each collective counted.

    Also limits torch to one thread: ranks that share a host's cores gain nothing from more, and lose much where their
    threads outnumber the cores.

    Args:
        rank: this rank's place in the group. `rendezvous` is where the ranks meet, and `collective_timeout_s` the
            limit of this call and, with gloo and nccl, of each collective after it.

    Returns:
        The rank's device.

    Raises:
        ConfigError: the device can't be used.
        RuntimeError: a rank did not come within the limit (torch's own `DistError`s are among them).
    """
    global _joined  # noqa: PLW0603 - as torch's default process group, whose device this is
    if rank.rendezvous.startswith(_SINGLE_HOST):
        # gloo looks up its own host's name, which fails where the name has no address, as in many containers. Beside
        # other backends it is what control data takes.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = open_device(rank)
    _joined = device
    device.join()
    return device


def keep_alive(device: str) -> None:
    """Run a tiny collective where there is a process group, so that no connection of it is idle for long.

    Args:
        device: where the rank computes.

    Raises:
        RuntimeError: a rank did not come within the group's limit.
    """
    if dist.is_initialized():
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        ones.item()  # elsewhere than on CPUs, only now has it happened


def destroy_process_group() -> None:
    """Leave the process group; does nothing where there is none.

    With gloo no rank waits for another here. With others every rank waits for all, and must not be kept from it.
    """
    global _joined  # noqa: PLW0603
    if dist.is_initialized():
        if _joined is None:  # the worker has made it by itself
            dist.destroy_process_group()
        else:
            _joined.leave()
    _joined = None


def exit_waits_for_peers() -> bool:
    """Tell whether this process is in a process group that its exit handlers would leave, and wait for its peers."""
    return _joined is not None and _joined.waits_for_peers
