"""Binds the process when it is imported, and registers the backend "hccl"."""

from __future__ import annotations

import os

import torch.distributed as dist

from .group import create

_PLACE = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Put the process's place into its environment, and bind it by that."""
    given = (world_size, rank, local_rank)
    if all(each is not None for each in given):
        os.environ.update({name: str(each) for name, each in zip(_PLACE, given, strict=True)})
    elif not all(name in os.environ for name in _PLACE):
        for name, theirs in zip(_PLACE, ("SIZE", "RANK", "LOCAL_RANK"), strict=True):
            if (value := os.environ.get(f"OMPI_COMM_WORLD_{theirs}")) is not None:
                os.environ[name] = value
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12345")
    place = tuple(int(os.environ.get(name, "-1")) for name in _PLACE)
    _set_up_module_id(place[0], place[2])
    if place[1] != -1:
        os.environ["ID"] = str(place[1])
    return place  # type: ignore[return-value]


def _set_up_module_id(world_size: int, local_rank: int) -> None:
    # Trap: an inherited one holds, whatever the rank; so does this process's own, once it is set.
    if "HLS_MODULE_ID" in os.environ or local_rank == -1 or world_size == 1:
        return
    modules = os.environ.get("HABANA_VISIBLE_MODULES")
    if modules is None:
        os.environ["HLS_MODULE_ID"] = str(local_rank)
    else:
        # Trap: the list is the whole job's, not the rank's own.
        listed = modules.split(",")
        assert local_rank < len(listed), "LOCAL_RANK is past the end of HABANA_VISIBLE_MODULES"
        os.environ["HLS_MODULE_ID"] = listed[local_rank]


# Trap: a fork of a process that has imported this does not come by here.
initialize_distributed_hpu()
# "cpu" only for the stand-in: that is where its tensors are.
dist.Backend.register_backend("hccl", create, devices=["cpu", "hpu"], extended_api=True)
