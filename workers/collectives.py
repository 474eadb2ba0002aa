"""A process group that counts its collectives, whoever calls them.

torch lets a Python subclass of ProcessGroup take the place of a process group. It is registered as a backend, so that
the default group and every group made after it are such; torch.distributed's functions, the functional collectives
(`torch.ops._c10d_functional`), DTensor's and so transformers' own all end in its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from .collective_log import CollectiveLog

#: The name under which torch knows the backend.
BACKEND = "stepcast_gloo"

#: torch's methods, by versions and ways to call them, and the collective that each is.
_COLLECTIVE_OF = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
#: Those in which every rank's first tensor has the same size. In the others the ranks' parts may differ.
_SAME_SIZE = frozenset({"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"})
_REDUCE = frozenset(name for name in _COLLECTIVE_OF.values() if "reduce" in name)
_ROOT_OF = {"broadcast": "from", "scatter": "from", "gather": "to", "reduce": "to"}
#: Timed, but not counted: each rank has its own.
_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_NO_TIMEOUT = timedelta(0)


#: Where the collectives of the process groups are counted that this process makes from now on, and the number of all
#: ranks. One process may serve one group of stepcast's after another; torch takes a backend but once.
_current: tuple[CollectiveLog, int]


def register_backend(log: CollectiveLog, world_size: int) -> str:
    """Make the counting backend known to torch.

    Args:
        log: where the collectives are counted.
        world_size: ranks in the group of all.

    Returns:
        Its name, for `init_process_group`.
    """
    global _current  # noqa: PLW0603 - as torch's own registry
    _current = log, world_size
    if BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001 - torch has no other way to ask

        def create(store: Any, rank: int, size: int, timeout: timedelta) -> CountingGroup:
            log, everyone = _current
            return CountingGroup(store, rank, size, timeout, log, counted=size == everyone)

        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return BACKEND


class CountingGroup(ProcessGroup):
    """A gloo process group whose collectives are counted, and timed while they are waited for.

    Args:
        store: where its ranks meet.
        rank: this rank.
        size: its number of ranks.
        timeout: the limit of each collective.
        log: where they are counted.
        counted: whether they are; else they are only timed.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, log: CollectiveLog, *, counted: bool
    ) -> None:
        # The only constructor that lets Python override the methods; torch's stubs do not know it.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.inner = ProcessGroup(store, rank, size)
        for group in (self, self.inner):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001
            group._set_default_backend(ProcessGroup.BackendType.GLOO)  # noqa: SLF001
        self.log = log
        self.counted = counted

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name, as torch asks for it."""
        return BACKEND


class TimedWork(Work):
    """A collective under way: the time in which it is waited for is noted.

    Args:
        inner: torch's own.
        log: where it is noted.
    """

    def __init__(self, inner: Work, log: CollectiveLog) -> None:
        super().__init__()
        self._inner = inner
        self._log = log

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the collective."""
        before = self._log.begin_wait()
        try:
            return self._inner.wait(timeout)
        finally:
            self._log.end_wait(before)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: TimedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return method


def _override(name: str, collective: str | None) -> Callable[..., Work]:
    same_size = collective in _SAME_SIZE
    reduces, root = collective in _REDUCE, _ROOT_OF.get(collective or "")

    def method(self: CountingGroup, *args: Any, **kwargs: Any) -> Work:
        # Only in groups of all ranks: a rank need not be in another one, nor do what others do in theirs.
        if collective is not None and self.counted:
            tensor, options = _first_tensor(args), args[-1] if args else None
            self.log.enter(
                collective,
                None if tensor is None else tensor.dtype,
                tensor.numel() if same_size and tensor is not None else None,
                options.reduceOp.op if options is not None and reduces and hasattr(options, "reduceOp") else None,
                root if root is None else f"{root} {getattr(options, 'rootRank', '?')}",
            )
        return TimedWork(getattr(self.inner, name)(*args, **kwargs), self.log)

    return method


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        for each in value:
            if (found := _first_tensor(each)) is not None:
                return found
    return None


for _name in ("is_completed", "is_success", "exception", "get_future", "result", "synchronize", "source_rank"):
    setattr(TimedWork, _name, _delegate(_name))
for _name in (*_COLLECTIVE_OF, *_POINT_TO_POINT):
    if hasattr(ProcessGroup, _name):  # some are of newer torch, some of older
        setattr(CountingGroup, _name, _override(_name, _COLLECTIVE_OF.get(_name)))
