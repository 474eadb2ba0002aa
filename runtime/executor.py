"""`Executor`: what an embedder holds."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from stepcast.bus import codec
from stepcast.bus.errors import ConfigError, StepcastError, StepFailed
from stepcast.bus.frames import Kind, new_tuple
from stepcast.workers.loading import stop_if_loading_script

from . import failures
from .config import ExecutorConfig
from .followed import FollowedGroup
from .health import GroupHealth
from .launch.agent import is_follower
from .processes import RankGroup
from .state import GroupState
from .step import Limit, Request, StepFuture
from .supervisor import RestartingGroup
from .uni import UniGroup

_NOT_CALLABLE = frozenset({"setup", "execute", "teardown", "abort"})

_log = logging.getLogger("stepcast.runtime")


class Executor:
    """Runs one model on a group of ranks.

    Building it starts the group, and returns when every rank is ready. Use it as a context manager, or call `shutdown`.
    It may be used from any thread. It leaves this process's signal handlers, logging and environment alone.

    Under torchrun every rank's program builds it. In rank 0's it is this; in the others' the process serves the group
    as one rank from here, and ends with it, or goes on where `followers_return` says so: then with an executor that
    takes no steps (`is_driver`).

    Args:
        config: the settings.
        on_failure: called with the error that has ended the group, in a thread of its own that nothing
            waits for but `shutdown`; once, or with `restart="on_failure"` each time.

    Raises:
        ConfigError: a setting does not fit this process.
        StartupError: the group did not come up; nothing of it is left.
    """

    def __init__(self, config: ExecutorConfig, *, on_failure: Callable[[StepcastError], None] | None = None) -> None:
        stop_if_loading_script()
        self.config = config
        self._step_limit = Limit(config.step_timeout_s, "step_timeout_s")
        self._call_limit = Limit(config.call_timeout_s, "call_timeout_s")
        self._group: RankGroup | RestartingGroup | UniGroup | FollowedGroup
        if config.resolved_backend == "uni":
            self._group = UniGroup(config)
        elif is_follower(config):
            self._group = FollowedGroup(config)
        else:
            self._group = RankGroup(config) if config.restart == "never" else RestartingGroup(config)
        if on_failure is not None:
            self._group.on_failure.append(on_failure)
        self._group.start()
        # Dropped without shutdown, the group ends all the same; it sees to the interpreter's exit itself.
        weakref.finalize(self, self._group.request_stop).atexit = False

    def step(self, payload: Any, *, gather: bool = False, timeout_s: float | None = None) -> Any:
        """Run one step on every rank, and wait for its result.

        Args:
            payload: what each worker's `execute` gets: plain MessagePack values, numpy arrays and CPU tensors. Arrays
                and tensors are not copied: leave them alone until the result is there.
            gather: whether to get every rank's result, instead of the output rank's.
            timeout_s: the longest to wait, in seconds; past it this step fails and the group lives on. None for
                `step_timeout_s`, past which the group ends. It counts from the publication; a wait for the group to be
                restarted, before, is as long at most.

        Returns:
            The output rank's result; with `gather` a list of all ranks' results.

        Raises:
            ProtocolError: the payload can't be sent; nothing was published.
            Backpressure: there was no room for it.
            StepFailed: a rank raised.
            StepTimeout: the limit passed.
            WorkerLost: a rank died.
            Closed: the executor takes no steps any more.
        """
        return self._group.run(self._step_request(payload, gather=gather, timeout_s=timeout_s))

    def submit(self, payload: Any, *, gather: bool = False, timeout_s: float | None = None) -> StepFuture:
        """Publish one step, and return without waiting for its result.

        Up to `max_in_flight` steps run at once, in order; one more waits for room.

        Args:
            payload, gather, timeout_s: as in `step`.

        Returns:
            The step's future. Futures are resolved in the order of submission.

        Raises:
            ProtocolError, Backpressure, Closed: as in `step`.
            StepFailed: an earlier step failed on some rank after its own future had been resolved.
        """
        return self._group.submit(self._step_request(payload, gather=gather, timeout_s=timeout_s))

    def try_submit(self, payload: Any, *, gather: bool = False, timeout_s: float | None = None) -> StepFuture | None:
        """As `submit`, but without waiting for room.

        Returns:
            The step's future; None where there is no room now.
        """
        return self._group.try_submit(self._step_request(payload, gather=gather, timeout_s=timeout_s))

    def call(
        self,
        method: str,
        *args: Any,
        rank: int | None = None,
        timeout_s: float | None = None,
        undo: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the worker on every rank, in order with the steps.

        Args:
            method: the name of a public method.
            args, kwargs: its arguments, of the kinds that a step may hold.
            rank: the rank whose answer is wanted; the method runs on every rank all the same. None for all of them.
            timeout_s: the longest to wait, in seconds; past it this call fails and the group lives on. None for
                `call_timeout_s`, past which the group ends.
            undo: a method that is called with the same arguments on the ranks where it worked, if it failed on some;
                not where the group was restarted since: new workers have nothing to undo.

        Returns:
            A list of every rank's answer, or the one that was asked for.

        Raises:
            ConfigError: the method can't be called, or there is no such rank.
            StepcastError: as in `step`.
        """
        if rank is not None and not 0 <= rank < self.config.world_size:
            raise ConfigError(f"call(rank={rank}): must be a rank of the group, 0 to {self.config.world_size - 1}")
        for name in (method, undo):
            if name is not None and (name.startswith("_") or name in _NOT_CALLABLE):
                raise ConfigError(f"call({name!r}): private methods and the loop's own can't be called")
        future = self._group.submit(self._call_request(method, args, kwargs, timeout_s=timeout_s))
        try:
            answers = future.result()
        except StepFailed as failure:
            if undo is not None and not failure.epoch_ended:
                # It may be an earlier step's, that came too late for its own future: then this one worked everywhere.
                failed = failure.failed_ranks if failure.step == future.step else ()
                worked = [each for each in range(self.config.world_size) if each not in failed]
                if not self._group.undo(future.step, self._call_request(undo, args, kwargs, ranks=worked)):
                    failures.add(failure, f"{undo} was not called: the group was restarted since, and set up afresh")
            raise
        return answers if rank is None else answers[rank]

    def abort(self, target: StepFuture | int | str) -> bool:
        """Abort a step, or a request that the workers hold.

        Args:
            target: a step's future or its id: the future fails with `StepAborted`. The step itself runs on, in
                lockstep, unless the worker asks `RankInfo.is_aborted`. Or a request's id, a string: `Worker.abort` is
                called with it on every rank, between the same two steps.

        Returns:
            For a step, False where it is not under way any more; for a request, True.
        """
        if isinstance(target, str):
            self._group.run(self._call_request("abort", (target,), {}))
            return True
        return self._group.abort_step(target.step if isinstance(target, StepFuture) else target)

    def health(self) -> GroupHealth:
        """Tell how every rank is doing, without asking them: the answer is there at once, whatever they do.

        Returns:
            The group's state, and each rank's phase, its age, and when it was last heard.
        """
        return self._group.health()

    @property
    def state(self) -> GroupState:
        """Where the group is in its life."""
        return self._group.state

    @property
    def is_driver(self) -> bool:
        """Whether steps are taken here; not so in a rank of torchrun's that has served the group."""
        return not isinstance(self._group, FollowedGroup)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the ranks, in order."""
        return self._group.worker_pids

    def shutdown(self) -> None:
        """End the group: STOP, then SIGTERM, then SIGKILL, each with its limit. Safe to call again, from any thread.

        Steps under way are finished first, within `stop_timeout_s`.

        Raises:
            WorkerLost: a rank died meanwhile.
            StepFailed: a worker's teardown raised.
        """
        self._group.stop()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except StepcastError as failure:
            if error is None:
                raise
            _log.error("while the executor was shut down after another error: %s", failure)

    def _step_request(self, payload: Any, *, gather: bool, timeout_s: float | None) -> Request:
        frames = codec.encode(payload)
        limit, hard_limit = (None, self._step_limit) if timeout_s is None else _limits(timeout_s, self._step_limit)
        output_rank = self.config.output_rank
        return new_tuple(Request, (Kind.STEP, "step", frames, _size(frames), gather, output_rank, limit, hard_limit))

    def _call_request(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        frames = codec.encode([method, list(args), kwargs, None if ranks is None else list(ranks)], name=method)
        limit, hard_limit = (None, self._call_limit) if timeout_s is None else _limits(timeout_s, self._call_limit)
        name = f"call of {method}, step"
        return Request(Kind.CALL, name, frames, _size(frames), True, self.config.output_rank, limit, hard_limit)


def _size(frames: Sequence[bytes | memoryview]) -> int:
    return len(frames[0]) if len(frames) == 1 else sum(map(len, frames))


def _limits(timeout_s: float, setting: Limit) -> tuple[Limit, Limit]:
    """The embedder's own limit, and the group's, which always comes after it."""
    own = Limit(timeout_s, "timeout_s")
    if timeout_s < setting.seconds:
        return own, setting
    return own, Limit(timeout_s + setting.seconds, f"timeout_s + {setting.knob}")
