"""Processes of ranks that somebody else has started."""

from __future__ import annotations

import contextlib
import select
import signal
from collections.abc import Callable

from stepcast.bus.frames import Kind
from stepcast.workers.death_watch import DriverWatch, exit_code_of
from stepcast.workers.responder import DUMP_SIGNAL

from .process import EXIT_CODE_UNKNOWN, WorkerProcess


class AttachedProcess(WorkerProcess):
    """A process of this host that another one has started: torchrun's agent, or Ray.

    Who has started it reads its output and reaps it, and decides what becomes of it once the rank has left its loop in
    good order: for the group it has ended then.

    Args:
        rank: the rank.
        identity: its id and start time.
    """

    def __init__(self, rank: int, identity: tuple[int, int]) -> None:
        self._watch = DriverWatch(*identity)
        self._code: int | None = None
        super().__init__(rank, identity[0], self._watch.fd, ())

    def exit_code(self) -> int | None:
        if self._code is None and self._watch.is_dead():
            code = exit_code_of(self.pid, self._watch.fd)
            self._code = EXIT_CODE_UNKNOWN if code is None else code
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.exit_code() is not None:
            return
        if self._watch.fd is None:
            super().send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch.fd, number)

    def said_bye(self) -> None:
        self._code = 0

    def wait(self) -> None:
        if self._watch.fd is not None:
            select.select([self._watch.fd], [], [])

    def close(self) -> None:
        self._watch.close()
        self.sentinel = None


class RemoteProcess(WorkerProcess):
    """A process of another host.

    Its kernel tells this one nothing: that it has ended is known when the rank says BYE. Signals become messages on the
    bus; after SIGKILL nothing more can be done from here, and it counts as ended: it ends by the message, or because it
    hears nothing of the driver any more.

    Args:
        rank: the rank.
        pid: its id there.
        host: its host, for people.
    """

    is_local = False

    def __init__(self, rank: int, pid: int, host: str) -> None:
        super().__init__(rank, pid, None, ())
        self.host = host
        self.publish: Callable[[Kind], object] = lambda _: None
        self._code: int | None = None

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"pid {self.pid} on {self.host}"

    def exit_code(self) -> int | None:
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self._code is not None:
            return
        if number == DUMP_SIGNAL:
            self.publish(Kind.DUMP)
        elif number == signal.SIGKILL:
            self.publish(Kind.STOP_NOW)
            self._code = EXIT_CODE_UNKNOWN

    def said_bye(self) -> None:
        self._code = 0

    def wait(self) -> None:
        """Nothing can be waited for."""

    def close(self) -> None:
        """Nothing is open."""
