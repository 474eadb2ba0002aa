"""What keeps a run bounded and its processes accounted for: limits, CPU clocks, handles."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from types import FrameType

START_LIMIT_S = 60.0
"""For the workers of one peer to come up."""

STOP_LIMIT_S = 20.0
"""For the workers of one peer to end; past it they are killed."""

IDLE_LIMIT_S = 5.0
"""For reading the clocks of idle workers."""

_SLOWEST_STEP_S = 0.1
_KILL_LIMIT_S = 5.0
_libc = ctypes.CDLL(None)


class LimitPassed(Exception):
    """A wait took longer than its limit."""


def turn_limit_s(steps: int) -> float:
    """The limit of one turn of `steps` steps."""
    return 30.0 + _SLOWEST_STEP_S * steps


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise `LimitPassed` in the main thread if the body takes longer.

    A signal, since it interrupts whatever the peer is blocked in and costs its hot path nothing. A timer that was armed
    before (pytest's, for one) goes on afterwards with what is left of it.

    Args:
        seconds: the limit.
        what: the body's name for the error.

    Raises:
        LimitPassed: the limit has passed.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise LimitPassed(f"{what} took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    # Again each second: a peer's own handlers may swallow the first.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            left = remaining - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), interval)


class ProcessHandle:
    """A peer's process: its CPU clock, and its end if the peer leaves it behind.

    Held by a descriptor of the process itself, so that a pid used again is never taken for it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = os.pidfd_open(pid)

    def cpu_ns(self) -> int:
        """CPU time so far, in nanoseconds, all its threads included.

        From the kernel's CPU clock of that process: /proc/PID/stat counts in ticks of 10 ms, too coarse for one turn.

        Raises:
            ProcessLookupError: the process is gone.
        """
        clock = ctypes.c_int()
        code = _libc.clock_getcpuclockid(ctypes.c_int(self._pid), ctypes.byref(clock))
        if code:
            raise ProcessLookupError(code, f"process {self._pid}: {os.strerror(code)}")
        return time.clock_gettime_ns(clock.value)

    def end(self) -> None:
        """Kill the process if it still runs, wait for it within a limit, and close the handle."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        select.select([self._descriptor], [], [], _KILL_LIMIT_S)
        os.close(self._descriptor)
