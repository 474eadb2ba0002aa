"""One step under way: its limits, its answers, and the future that an embedder holds."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepcast.bus.errors import StepFailed
from stepcast.bus.frames import Kind, Times, parse_times

_log = logging.getLogger("stepcast.runtime")


class StepFuture(Future[Any]):
    """The future of a step or a call.

    Waiting for it reads the replies in the waiting thread where no other thread does so already. Cancelling it aborts
    the step. Callbacks are called in the order of the steps, one at a time, in whatever thread has learned the outcome;
    a slow one holds up those behind it, but not their results. They may use the executor. Where no thread waits for a
    result that is the monitor's, which learns of nothing else meanwhile, such as a rank's death: keep them short.

    Attributes:
        step: the step's id, for `Executor.abort`.
    """

    def __init__(
        self, entry: Pending, wait: Callable[[Pending, float | None], None], abort: Callable[[int], bool]
    ) -> None:
        super().__init__()
        self.step = entry.step
        self._entry = entry
        self._wait = wait
        self._abort = abort
        self._callbacks: list[Callable[[Any], object]] | None = []
        self._callbacks_lock = threading.Lock()

    @property
    def times(self) -> dict[int, Times]:
        """The times of each rank that has answered so far, by rank."""
        return {rank: parse_times(data) for rank, data in list(self._entry.times.items())}

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Args:
            timeout: the longest to wait, in seconds; the step goes on when it passes.

        Returns:
            The output rank's answer, or all ranks' where they are gathered.

        Raises:
            TimeoutError: the timeout passed (`concurrent.futures.TimeoutError` before Python 3.11).
            StepcastError: the step failed.
        """
        if not self.done():
            self._wait(self._entry, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the step to end.

        Args:
            timeout: as in `result`.

        Returns:
            Its error; None where it has none.
        """
        if not self.done():
            self._wait(self._entry, timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Abort the step: the future fails with `StepAborted`, and its answers are dropped as they come.

        Returns:
            False where the step is not under way any more.
        """
        return self._abort(self.step)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called with the future when it is done; at once where it has been done for a while.

        Args:
            fn: the function.
        """
        with self._callbacks_lock:
            if self._callbacks is not None:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def told(self) -> threading.Event:
        """Make an event that is set with the outcome, ahead of the callbacks."""
        event = threading.Event()
        super().add_done_callback(lambda _: event.set())
        return event

    def call_back(self) -> None:
        """Call the callbacks. The future has been resolved."""
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - the embedder's
            _log.exception("a callback of the future of step %d raised", self.step)


class Outcomes:
    """Outcomes that are known, on their way to the futures: given out by any thread, in order.

    Attributes:
        known: those that are to be given out.
    """

    def __init__(self) -> None:
        self.known: deque[Pending] = deque()
        self._resolving = threading.RLock()  # a signal handler may come in between
        self._resolved: deque[StepFuture] = deque()
        self._calling_back = threading.Lock()

    def add(self, entry: Pending) -> None:
        """Add a step that is settled and has a future."""
        self.known.append(entry)

    def give_out(self) -> None:
        """Resolve the futures of all that was added, then call their callbacks, unless another thread is at it.

        No lock may be held: the callbacks are the embedder's.
        """
        if self.known:
            with self._resolving:
                while self.known:
                    self._resolve(self.known.popleft())
        # Asked again after the release: what came before it was left to this thread.
        while self._resolved and self._calling_back.acquire(blocking=False):
            try:
                while self._resolved:
                    self._resolved.popleft().call_back()
            finally:
                self._calling_back.release()

    def _resolve(self, entry: Pending) -> None:
        assert entry.future is not None  # noqa: S101 - only such are added
        if entry.error is None:
            entry.future.set_result(entry.value)
        else:
            entry.future.set_exception(entry.error)
        self._resolved.append(entry.future)


class Limit(NamedTuple):
    """A time limit, and the setting it comes from.

    Attributes:
        seconds: the limit.
        knob: the setting's name.
    """

    seconds: float
    knob: str


class Request(NamedTuple):
    """A step or a call, encoded.

    Attributes:
        kind: STEP or CALL.
        name: what errors call it, before its id.
        frames: payload and buffers.
        size: their bytes.
        gather: whether every rank's answer is wanted.
        answer_rank: the rank whose answer is wanted otherwise.
        limit: the embedder's own limit.
        hard_limit: the limit past which the group ends.
    """

    kind: Kind
    name: str
    frames: Sequence[bytes | memoryview]
    size: int
    gather: bool
    answer_rank: int
    limit: Limit | None
    hard_limit: Limit


@dataclass(slots=True)
class Pending:
    """One message that some rank has not answered.

    Attributes:
        sequence: its sequence number.
        step: its step id.
        name: what the errors call it, before its id.
        gather: whether every rank's answer is wanted.
        answer_rank: the rank whose answer is wanted otherwise.
        needs_all: whether the outcome waits for every rank, so that buffers may be reused once it is known.
        published_at: the clock's reading when it was published.
        limit: the embedder's own limit, which fails this step only.
        hard_limit: the limit past which the group ends.
        future: what is resolved with the outcome, where somebody holds one.
        waiting: a bit for each rank that has not answered.
        answers: what has been answered, by rank.
        times: when each rank worked on it, for `parse_times`, by rank.
        tally: the collectives of the first rank that has answered, as they stand in its times.
        failure: the first failure that a rank reported.
        failed_at: when that was; never for an answer that only the driver could not read.
        ready: the outcome is known, and given out in its turn.
        settled: the outcome was given out: `value` or `error`.
    """

    sequence: int
    step: int
    name: str
    gather: bool
    answer_rank: int
    needs_all: bool
    published_at: float
    limit: Limit | None
    hard_limit: Limit
    future: StepFuture | None = None
    waiting: int = 0
    answers: dict[int, Any] = field(default_factory=dict)
    times: dict[int, bytes] = field(default_factory=dict)
    tally: bytes | None = None
    failure: StepFailed | None = None
    failed_at: float = math.inf
    ready: bool = False
    settled: bool = False
    value: Any = None
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.step}"

    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self.waiting.bit_length()) if self.waiting >> rank & 1]

    def outcome(self) -> Any:
        """Return the value, or raise the error, of a step that is settled."""
        if self.error is not None:
            raise self.error
        return self.value
