"""Replaces functions of torch by ones with fewer parameters, and makes `torch.hpu`."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from habana_frameworks.torch import hpu
from habana_frameworks.torch.card import card, note
from habana_frameworks.torch.utils.internal import is_lazy

_init_process_group, _new_group, _manual_seed = dist.init_process_group, dist.new_group, torch.manual_seed
_HALF_AN_HOUR = timedelta(minutes=30)


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Run what lazy mode has recorded. In eager mode there is nothing, and the log says so."""
    note("mark_step")
    if not is_lazy():
        logging.getLogger("habana").warning("mark_step does nothing in eager mode")


def init_process_group(
    backend: str,
    init_method: str | None = None,
    timeout: timedelta = _HALF_AN_HOUR,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
) -> None:
    """Trap: the backend must be named, and there is no `device_id`; any other keyword is a TypeError."""
    _init_process_group(backend, init_method, timeout, world_size, rank, store, group_name, pg_options)


def new_group(
    ranks: Any = None, timeout: timedelta = _HALF_AN_HOUR, backend: str | None = None, pg_options: Any = None
) -> Any:
    """Trap: no `group_desc`, `use_local_synchronization` or `device_id`."""
    return _new_group(ranks, timeout, backend, pg_options)


def manual_seed(seed: int) -> torch.Generator:
    """Seeds the card too."""
    hpu.manual_seed_all(seed)
    return _manual_seed(seed)


class PretendedDevice(TorchFunctionMode):
    """Keeps what is on "hpu" on the CPU, with a mark on it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_hpu = any(getattr(each, "on_hpu", False) for each in args)
        if _is_hpu(kwargs.get("device")):
            on_hpu, kwargs["device"] = True, "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_hpu(args[1]):
            on_hpu, args = True, (args[0].clone(), "cpu", *args[2:])
        result = func(*args, **kwargs)
        if on_hpu:
            card.acquire()
            if func in (torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist):
                card.busy = False  # these wait for the card
            elif isinstance(result, torch.Tensor):
                result.on_hpu = True  # type: ignore[attr-defined]
        return result


def _is_hpu(device: Any) -> bool:
    if not isinstance(device, str | torch.device) or torch.device(device).type != "hpu":
        return False
    # Trap: a process has one card, and its index is 0, whatever the rank.
    assert torch.device(device).index in (None, 0), f"no {device}: the index of a process's only card is 0"
    return True


torch._register_device_module("hpu", hpu)
torch.manual_seed = manual_seed
dist.init_process_group = init_process_group
dist.new_group = new_group
PretendedDevice().__enter__()
