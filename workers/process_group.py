"""Joining and leaving a rank's torch.distributed process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from .base import RankInfo
from .collectives import register_backend

#: Rendezvous that only ranks of one host can share, so that their traffic may stay on the loopback interface.
_SINGLE_HOST = ("file://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


def init_process_group(rank: RankInfo) -> None:
    """Join the group's gloo process group. Every rank calls it in `Worker.setup`, before it loads sharded weights.

    Where collectives are checked, torch knows the backend as "stepcast_gloo": gloo, with each collective counted.

    Also limits torch to one thread: ranks that share a host's cores gain nothing from more, and lose much where their
    threads outnumber the cores.

    Args:
        rank: this rank's place in the group. `rendezvous` is where the ranks meet, and `collective_timeout_s` the
            limit of this call and of each collective after it.

    Raises:
        RuntimeError: a rank did not come within the limit (torch's own `DistError`s are among them).
    """
    if rank.rendezvous.startswith(_SINGLE_HOST):
        # gloo looks up its own host's name, which fails where the name has no address, as in many containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    log = rank.collective_log
    dist.init_process_group(
        "gloo" if log is None else register_backend(log, rank.world_size),
        init_method=rank.rendezvous,
        timeout=timedelta(seconds=rank.collective_timeout_s),
        world_size=rank.world_size,
        rank=rank.rank,
    )


def keep_alive(device: str) -> None:
    """Run a tiny collective where there is a process group, so that no connection of it is idle for long.

    Args:
        device: where the rank computes.

    Raises:
        RuntimeError: a rank did not come within the group's limit.
    """
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1, device=device))


def destroy_process_group() -> None:
    """Leave the process group; does nothing where there is none. With gloo no rank waits for another here."""
    if dist.is_initialized():
        dist.destroy_process_group()
