"""How a worker learns that its driver has died."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
# proc(5), /proc/[pid]/stat, counted from 1
_START_TIME_FIELD = 22
_EXIT_CODE_FIELD = 52
# linux/pidfd.h: what the kernel tells of a pidfd's process, as mask, twelve fields, and the exit status
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11  # _IOWR


def stat_fields(process: Path) -> list[str]:
    """Read what the kernel tells of a process or a thread.

    Args:
        process: its directory under /proc.

    Returns:
        The fields of proc(5), /proc/[pid]/stat, from the third on: the first is the state.

    Raises:
        OSError: there is no such process any more.
    """
    stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
    # The command's name is in brackets, and may hold spaces and brackets itself.
    return stat.rpartition(")")[2].split()


def process_start_time(pid: int) -> int | None:
    """Read when a process started.

    Args:
        pid: its process id.

    Returns:
        Clock ticks after boot; None where there is no such process.
    """
    try:
        return int(stat_fields(Path(f"/proc/{pid}"))[_START_TIME_FIELD - 3])
    except OSError:
        return None


def exit_code_of(pid: int, pidfd: int | None) -> int | None:
    """Read the exit code of another's child that has ended.

    Args:
        pid: its process id.
        pidfd: its pidfd, opened while it lived; None where there is none.

    Returns:
        Its exit code, negative for a signal; None where it runs, or belongs to another user, or has been reaped and the
        kernel (before 6.15) forgets it then.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = stat_fields(Path(f"/proc/{pid}"))
        if state == "Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD - 4]))
    if pidfd is not None:
        with contextlib.suppress(OSError):
            info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            mask, status = _PIDFD_INFO.unpack(info)
            return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None
    return None


def die_with_parent_thread(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when the thread that started it ends. Works while other code holds the GIL.

    Args:
        number: the signal with which it does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


class DriverWatch:
    """Watches the driver through a pidfd, which no other process can keep alive.

    Args:
        pid: the driver's process id.
        start_time: its start time, as `process_start_time` gives it.

    Attributes:
        fd: a descriptor that becomes readable when the driver has died; None where the kernel has no pidfd, or the
            driver is dead already: then `is_dead` must be asked.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self._pid = pid
        self._start_time = start_time
        self.fd: int | None = None
        with contextlib.suppress(OSError):
            self.fd = os.pidfd_open(pid)

    def is_dead(self) -> bool:
        """Tell whether the driver has died, by its pidfd, and by its id and start time."""
        if self.fd is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            if poll.poll(0):  # it may still have its entry in /proc: nobody has reaped it
                return True
        return process_start_time(self._pid) != self._start_time

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
