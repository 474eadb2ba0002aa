"""What a worker author writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .collective_log import CollectiveLog


def _never(_step: int) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What one rank knows of its place in the group.

    Attributes:
        rank: this rank, from 0 to `world_size` - 1.
        local_rank: its index among the ranks of this host.
        local_world_size: ranks on this host.
        world_size: ranks in the group.
        epoch: the life of the group that this process belongs to, from 1.
        output_rank: the rank whose result answers a step.
        device: the device to compute on, as torch calls it in this process: "cpu", "cuda:1", "hpu".
        device_class: what knows how to use it, as ``module:Class``; `open_device` makes one.
        rendezvous: torch.distributed's `init_method`, as `init_process_group` of `stepcast.workers.process_group`
            understands it; new in each epoch.
        collective_timeout_s: the limit of each collective, in seconds.
        options: `ExecutorConfig.worker_options`, as plain MessagePack values.
        collective_log: where `init_process_group` has the collectives counted; None where they are not.
        is_aborted: asks whether the embedder has aborted a step (by its id). It becomes true at different moments on
            different ranks: never branch on it between collectives, only where the rank computes alone.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    epoch: int
    output_rank: int
    device: str
    rendezvous: str
    collective_timeout_s: float
    device_class: str = "stepcast.workers.devices.cpu:CPU"
    options: Mapping[str, Any] = field(default_factory=dict)
    collective_log: CollectiveLog | None = None
    is_aborted: Callable[[int], bool] = _never


class Worker:
    """One rank's part of the model. Subclass it; the loop that calls it is stepcast's.

    Every method runs in the loop's thread, in the same order on every rank. Any other public method can be reached by
    `Executor.call(name, ...)`; names that begin with an underscore can't.

    Attributes:
        idle: where the ranks wait for the next message: each on the bus ("bus"), or rank 0 there and the others inside
            a torch.distributed broadcast from it ("collective"), for which `setup` must have made a process group.
            docs/keepalive.md compares the two.
    """

    idle: ClassVar[str] = "bus"

    def setup(self, rank: RankInfo) -> None:
        """Bind the device, join the process group, load the weights. Runs once, before the first step.

        Args:
            rank: this rank's place in the group; keep it if you need it later.
        """

    def execute(self, step: Any) -> Any:
        """Compute one step.

        Args:
            step: what the driver passed to `Executor.step`: plain MessagePack values, numpy arrays and CPU tensors.
                Arrays and tensors are views of the received message: read-only, and theirs alone.

        Returns:
            The result, of the same kinds. Only the output rank's travels, unless the driver gathers all of them.

        Raises:
            Exception: anything; the driver sees `StepFailed` with the rank, the type and the traceback.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute(): override it to compute a step")

    def abort(self, request_id: Any) -> None:
        """Forget a request; called between two steps, the same two on every rank.

        Args:
            request_id: what the embedder passed to `Executor.abort`.
        """

    def teardown(self) -> None:
        """Release what `setup` took. Runs when the group stops in good order, on every rank at once."""
