"""How long a thread was kept from a processor, by the kernel's own count (proc_pid_schedstat)."""

from __future__ import annotations

import os

_READ_BYTES = 128


class RunQueue:
    """The run queue as this thread sees it. A context manager, for the one thread that enters it."""

    def __enter__(self) -> RunQueue:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel does not count it
            self._fd = -1
        self._before_ns = self._read_ns()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def waited_ns(self) -> int:
        """Tell how long this thread has waited for a processor since this was asked last.

        Returns:
            Nanoseconds; 0 where the kernel does not tell.
        """
        before_ns, self._before_ns = self._before_ns, self._read_ns()
        return self._before_ns - before_ns

    def _read_ns(self) -> int:
        # "used waited slices", the first two in nanoseconds.
        return int(os.pread(self._fd, _READ_BYTES, 0).split()[1]) if self._fd >= 0 else 0
