"""`AsyncExecutor`: the same for an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from stepcast.bus.errors import Closed, StepcastError

from .config import ExecutorConfig
from .executor import Executor
from .health import GroupHealth
from .launch.agent import is_follower
from .state import GroupState
from .step import StepFuture


class AsyncExecutor:
    """`Executor` with ``await``. The event loop is never blocked; a cancelled step is aborted.

    Use it as an asynchronous context manager, which starts the group, or await `start` and `shutdown`. It belongs to
    the event loop in which it was started.

    Args:
        config: the settings.
        on_failure: as `Executor`'s: called in a thread of its own.
    """

    def __init__(self, config: ExecutorConfig, *, on_failure: Callable[[StepcastError], None] | None = None) -> None:
        self.config = config
        self._on_failure = on_failure
        self._executor: Executor | None = None
        self._starting = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._waiting = 0

    async def start(self) -> None:
        """Start the group, and return when every rank is ready. Raises as `Executor` does."""
        async with self._starting:
            if self._executor is not None:
                return
            if is_follower(self.config):
                # Until the group has ended this is all that this process does. The rank lives in this thread, as
                # signals are handled here.
                self._executor = Executor(self.config, on_failure=self._on_failure)
                return
            starting = asyncio.ensure_future(asyncio.to_thread(Executor, self.config, on_failure=self._on_failure))
            try:
                self._executor = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # The thread goes on; the group that it starts must not be left behind.
                starting.add_done_callback(_shut_down_late)
                raise

    async def step(self, payload: Any, *, gather: bool = False, timeout_s: float | None = None) -> Any:
        """As `Executor.step`. Cancelling it aborts the step."""
        return await asyncio.wrap_future(await self.submit(payload, gather=gather, timeout_s=timeout_s))

    async def submit(self, payload: Any, *, gather: bool = False, timeout_s: float | None = None) -> StepFuture:
        """As `Executor.submit`; waits for room without blocking the loop.

        Returns:
            The step's future; await it by `asyncio.wrap_future`.
        """
        executor = self._started()
        future = None
        if not self._waiting:
            future = executor.try_submit(payload, gather=gather, timeout_s=timeout_s)
        if future is not None:
            return future
        self._waiting += 1
        try:
            async with self._submitting:  # one waits in a thread, the others behind it: the order holds
                waiting = asyncio.ensure_future(
                    asyncio.to_thread(executor.submit, payload, gather=gather, timeout_s=timeout_s)
                )
                try:
                    return await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    waiting.add_done_callback(_abort_late)
                    raise
        finally:
            self._waiting -= 1

    async def call(
        self,
        method: str,
        *args: Any,
        rank: int | None = None,
        timeout_s: float | None = None,
        undo: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Executor.call`."""
        executor = self._started()
        return await asyncio.to_thread(
            executor.call, method, *args, rank=rank, timeout_s=timeout_s, undo=undo, **kwargs
        )

    async def abort(self, target: StepFuture | int | str) -> bool:
        """As `Executor.abort`."""
        return await asyncio.to_thread(self._started().abort, target)

    def health(self) -> GroupHealth:
        """As `Executor.health`; never waits."""
        return self._started().health()

    @property
    def state(self) -> GroupState:
        """Where the group is in its life."""
        return GroupState.NEW if self._executor is None else self._executor.state

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the ranks, in order."""
        return self._started().worker_pids

    async def shutdown(self) -> None:
        """As `Executor.shutdown`."""
        if self._executor is not None:
            await asyncio.shield(asyncio.to_thread(self._executor.shutdown))

    async def __aenter__(self) -> AsyncExecutor:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            await asyncio.shield(asyncio.to_thread(self._executor.__exit__, kind, error, trace))

    def _started(self) -> Executor:
        if self._executor is None:
            raise Closed("the executor was not started: await start(), or use it in an 'async with' block")
        return self._executor


def _abort_late(waiting: asyncio.Future[StepFuture]) -> None:
    """The coroutine that wanted the step is gone: nobody owns it."""
    if not waiting.cancelled() and waiting.exception() is None:
        waiting.result().cancel()


def _shut_down_late(starting: asyncio.Future[Executor]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().shutdown)
