"""The faults of the soak: of processes, of steps, of frames, and of the driver itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from stepcast.bus.errors import StepFailed
from stepcast.bus.frames import Kind
from stepcast.runtime.step import StepFuture

from .frames import FrameFaults
from .group import FaultyGroup

#: How long what takes time lasts, in seconds: drawn between the two. The longer the more answers wait behind it.
_LASTS_S = (0.05, 0.8)
#: Longer than `backpressure_timeout_s` of the soak's settings: a submission behind a full queue is refused.
_QUEUE_FULL_S = 1.3
#: Past the window of `max_in_flight`.
_MORE_THAN_FIT = 10
_SHORT_LIMITS_S = (0.0001, 0.01)
_CALL_TIMEOUT_S = 30.0

#: Submits a step; as `Executor.submit`. None where it was refused, which is counted.
Submit = Callable[..., "StepFuture | None"]


class SoakFaults:
    """Injects faults into one group. What it begins, it ends: at once, or before the next fault.

    Args:
        group: the group.
        draw: the chance.
        submit: submits a step, which is then waited for and counted.
        frames: whether the messages can be disturbed.
    """

    def __init__(self, group: FaultyGroup, draw: random.Random, submit: Submit, *, frames: bool) -> None:
        self._group = group
        self._draw = draw
        self._submit = submit
        self._entry = 0
        self._faults: dict[str, Callable[[int], None]] = {
            "kill": group.kill,
            "kill-all": self._kill_all,
            "stop-and-resume": self._stop_and_resume,
            **{name: self._in_step(name) for name in _IN_STEP},
            "slow-callback": self._slow_callback,
            "abort": self._abort,
            "short-limit": self._short_limit,
            "full-queue": self._full_queue,
            "call-with-undo": self._call_with_undo,
        }
        if frames:
            self._faults |= {name: self._on_frames(disturb) for name, disturb in _NEXT_MESSAGE.items()}
            self._faults |= {name: self._on_link(disturb) for name, disturb in _LINK.items()}

    @property
    def names(self) -> list[str]:
        """The faults that there are."""
        return sorted(self._faults)

    def inject(self, name: str, rank: int) -> None:
        """Inject a fault.

        Args:
            name: which one.
            rank: into which rank.

        Raises:
            StepcastError, ProcessLookupError: the group is down just now, or goes down for it.
        """
        self.heal()
        self._faults[name](rank)

    def heal(self) -> None:
        """Forget the faults that still wait for a message."""
        for rank in range(self._group.config.world_size):
            self._group.frames.heal(rank)

    # Faults of processes and of steps.

    def _kill_all(self, _rank: int) -> None:
        for rank in range(self._group.config.world_size):
            self._group.kill(rank)

    def _stop_and_resume(self, rank: int) -> None:
        self._group.stop(rank)
        self._last()
        self._group.resume(rank)

    def _in_step(self, fault: str) -> Callable[[int], None]:
        return lambda rank: self._group.in_next_step(rank, fault, self._draw.uniform(*_LASTS_S))

    # Faults of frames.

    def _on_frames(self, disturb: Callable[[FrameFaults, int], None]) -> Callable[[int], None]:
        return lambda rank: disturb(self._group.frames, rank)

    def _on_link(self, disturb: Callable[[FrameFaults, int], None]) -> Callable[[int], None]:
        def run(rank: int) -> None:
            disturb(self._group.frames, rank)
            self._submit()
            self._last()
            self._group.frames.heal(rank)

        return run

    # Faults of the driver's own.

    def _slow_callback(self, _rank: int) -> None:
        seconds = self._draw.uniform(*_LASTS_S)
        future = self._submit()
        if future is not None:
            future.add_done_callback(lambda _: time.sleep(seconds))

    def _abort(self, rank: int) -> None:
        self._group.in_next_step(rank, "sleep", self._draw.uniform(*_LASTS_S))
        futures = [self._submit() for _ in range(2)]
        for future in futures:
            if future is not None:
                self._group.executor.abort(future)

    def _short_limit(self, rank: int) -> None:
        self._group.in_next_step(rank, "sleep", self._draw.uniform(*_SHORT_LIMITS_S))
        self._submit(timeout_s=self._draw.uniform(*_SHORT_LIMITS_S))

    def _full_queue(self, rank: int) -> None:
        self._group.in_next_step(rank, "sleep", _QUEUE_FULL_S)
        for _ in range(_MORE_THAN_FIT):
            self._submit()

    def _call_with_undo(self, rank: int) -> None:
        """What one rank refuses is undone on the others."""
        self._entry += 1
        call = self._group.executor.call
        try:
            call("enter", self._entry, rank, undo="take_back", timeout_s=_CALL_TIMEOUT_S)
        except StepFailed as failure:
            if failure.epoch_ended:
                raise
        else:
            raise AssertionError(f"rank {rank} was told to refuse a call, and it was answered")
        ledgers = call("entries", timeout_s=_CALL_TIMEOUT_S)
        if any(ledgers):
            raise AssertionError(f"a call that failed was not undone: {ledgers!r}")

    def _last(self) -> None:
        time.sleep(self._draw.uniform(*_LASTS_S))


_IN_STEP = ("raise", "exit", "os_exit", "segfault", "sleep", "hold_gil", "answer")
_NEXT_MESSAGE: Mapping[str, Callable[[FrameFaults, int], None]] = {
    "drop": FrameFaults.drop,
    "duplicate": FrameFaults.duplicate,
    "corrupt": FrameFaults.corrupt,
    "delay": lambda frames, rank: frames.delay(rank, _LASTS_S[1]),
    "reorder": FrameFaults.reorder,
    "drop-answer": lambda frames, rank: frames.drop(rank, Kind.RESULT),
}
_LINK: Mapping[str, Callable[[FrameFaults, int], None]] = {
    "blackhole": FrameFaults.blackhole,
    "cut": FrameFaults.cut,
    "stall": FrameFaults.stall,
}
