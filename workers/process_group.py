"""Joining and leaving a rank's torch.distributed process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from .base import RankInfo
from .devices import Device, open_device

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
    if rank.local_world_size == rank.world_size:
        # On one host the traffic may stay on the loopback interface. gloo looks up its own host's name, which fails
        # where the name has no address, as in many containers. Beside other backends it is what control data takes.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = open_device(rank)
    _joined = device
    device.join()
    return device


def _meet_in_store(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Any, int, int]]:
    """Torch's way to "stepcast://HOST:PORT/PREFIX": to meet under a prefix in a store.

    Another process serves it; or, with "listen_fd=N" in the query, this one does.
    """
    parts = urlsplit(url)
    query = {name: int(values[0]) for name, values in parse_qs(parts.query).items()}
    assert parts.hostname is not None  # noqa: S101 - the launcher has made it
    assert parts.port is not None  # noqa: S101
    serves = "listen_fd" in query  # with a socket that this process was given
    served: dict[str, Any] = {"master_listen_fd": query["listen_fd"], "use_libuv": False} if serves else {}
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined] # torch's stubs lack these
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store = tcp_store(parts.hostname, parts.port, is_master=serves, wait_for_workers=False, timeout=timeout, **served)
    yield prefixed(parts.path.strip("/"), store), query["rank"], query["world_size"]
    raise RuntimeError("this rendezvous is good for one process group")


register_rendezvous_handler("stepcast", _meet_in_store)  # type: ignore[no-untyped-call]


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
