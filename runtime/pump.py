"""Who reads the replies.

A thread that waits for an answer reads them itself, since each hop to another thread costs more than the rest of the
step. While it does, the monitor leaves the reply socket's descriptor alone; while nobody waits, the monitor reads. A
second thread that waits lets the first one read for it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Pump:
    """Lets one thread at a time read the replies.

    Args:
        fd: the reply socket's descriptor.
        read: takes all replies that have come, and gives out the outcomes.
        next_deadline: the clock's reading at which `read` must be called though nothing comes, or None.
        monitor_reads: tells the monitor to read the replies, or to leave them.
        wake_monitor: makes the monitor look at everything once.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        fd: int,
        *,
        read: Callable[[], None],
        next_deadline: Callable[[], float | None],
        monitor_reads: Callable[[bool], None],
        wake_monitor: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._read = read
        self._next_deadline = next_deadline
        self._monitor_reads = monitor_reads
        self._wake_monitor = wake_monitor
        self._clock = clock
        self._reading = threading.Lock()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def read_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Read in this thread until something is done.

        Args:
            done: tells whether it is.
            deadline: the clock's reading at which to give up.

        Returns:
            False at once where another thread reads already: what the caller waits for happens without it.
        """
        if not self._reading.acquire(blocking=False):
            return False
        try:
            self._monitor_reads(False)
            self._turn_until(done, deadline)
        except BaseException:
            # An interrupted read may have left replies that the descriptor does not show any more.
            self._wake_monitor()
            raise
        finally:
            self._reading.release()
            self._monitor_reads(True)
        return True

    def wake(self) -> None:
        """Have the thread that reads ask again whether it is done."""
        if self._reading.locked() and not self._closed:
            os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float) -> None:
        """Let no thread read any more. All futures have been resolved.

        Args:
            timeout_s: the longest to wait for a thread that reads: it may be in a callback of the embedder's.
        """
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._reading.acquire(timeout=timeout_s)
        os.close(self._wake)

    def _turn_until(self, done: Callable[[], bool], deadline: float | None) -> None:
        # Whoever reads takes all there is, so the descriptor shows whatever has come since.
        while not (done() or self._closed):
            wait_until = self._next_deadline()
            if deadline is not None:
                wait_until = deadline if wait_until is None else min(wait_until, deadline)
            timeout_ms = None
            if wait_until is not None:
                # Rounded up: a poll that returns a moment too early would spin.
                timeout_ms = max(0, int((wait_until - self._clock()) * 1000) + 1)
            for fd, _ in self._poll.poll(timeout_ms):
                if fd == self._wake and not self._closed:
                    os.eventfd_read(fd)
            self._read()
            if deadline is not None and self._clock() >= deadline:
                return
