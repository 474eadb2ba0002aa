"""Watches the process that has started this one: `ExecutorConfig(watch_parent=True)`."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from stepcast.bus.errors import Closed


class ParentWatch:
    """Knows whether this process's parent has died.

    Args:
        watch: whether to watch it at all.

    Attributes:
        pid: the parent's process id.
        fd: a descriptor that becomes readable when it has died; None where nothing is watched, or the kernel has no
            pidfd.
    """

    def __init__(self, watch: bool) -> None:  # noqa: FBT001 - the setting, as it is
        self.pid = os.getppid()
        self.fd: int | None = None
        self._watch = watch
        if watch:
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(self.pid)

    def has_died(self) -> bool:
        """Tell whether the parent that this process had has died."""
        if not self._watch:
            return False
        if self.fd is not None and select.select([self.fd], [], [], 0)[0]:
            return True
        return os.getppid() != self.pid  # a dead parent's children are given another one

    def error(self) -> Closed:
        """The error with which the group ends."""
        return Closed(
            f"process {self.pid}, which has started this one, has died: the group ends, and this process gets SIGTERM "
            "(watch_parent=True)"
        )

    def end_process(self) -> None:
        """End this process in good order, if its parent has died."""
        if self.has_died():
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Close the descriptor."""
        self._watch = False
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
