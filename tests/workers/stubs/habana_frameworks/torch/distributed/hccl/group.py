"""A process group that behaves like HCCL's, where that matters, and computes by gloo."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from habana_frameworks.torch.card import card, note

_POLL_S = 0.01


def create(options: Any, _pg_options: Any) -> ProcessGroupHCCL:
    """Trap: `options.timeout` is dropped."""
    return ProcessGroupHCCL(options.store, options.group_rank, options.group_size)


class ProcessGroupHCCL(ProcessGroup):
    """Opens the card, refuses what is not on it, waits for dead peers, and leaves together or never."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(days=1))
        self.inner = ProcessGroup(store, rank, size)
        for group in (self, self.inner):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.store, self.members = store, size
        self.has_left = False
        # Trap: the exit handlers leave every group that is left, as a destroy does. A fork before Python 3.13 has none.
        atexit.register(self.shutdown)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name, as torch asks for it."""
        return "hccl"

    def shutdown(self) -> None:
        """Trap: waits until every rank is here, and there is no limit to it."""
        if self.has_left:
            return
        assert not card.busy, "left with work under way"
        note("leaving")
        self.store.add("leaving", 1)
        while self.store.add("leaving", 0) < self.members:
            note("waiting for peers")
            time.sleep(_POLL_S)
        self.has_left = True
        note("left")


def _collective(name: str) -> Callable[..., Any]:
    def method(self: ProcessGroupHCCL, tensors: Any, *args: Any) -> Any:
        for each in tensors if isinstance(tensors, list) else [tensors]:
            # Trap: it takes tensors of the card alone, and computes all others than these two in float32.
            assert getattr(each, "on_hpu", False), "No backend type associated with device type cpu"
            assert each.dtype in (torch.float32, torch.bfloat16), f"{each.dtype} would lose digits"
        card.acquire()
        card.busy = True
        note(name)
        work = getattr(self.inner, name)(tensors, *args)
        try:
            work.wait()
        except RuntimeError:  # gloo tells of a dead peer
            note("in a collective without end")
            while True:  # Trap: HCCL has no watchdog, and a wait's own limit is ignored.
                time.sleep(_POLL_S)
        return work

    return method


for _name in ("allreduce", "broadcast", "reduce"):
    setattr(ProcessGroupHCCL, _name, _collective(_name))
