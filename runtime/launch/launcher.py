"""`Launcher`: where the ranks' processes of one life of a group come from."""

from __future__ import annotations

from collections.abc import Callable

from stepcast.runtime.sockets import DriverSockets

from .process import WorkerProcess


class Launcher:
    """Starts the ranks' processes, or takes over those that somebody else has started.

    Its methods are called in this order, each once: `prepare`; then `launch`, unless something fails before; `close`.
    """

    def prepare(self) -> None:
        """Do what must be done before the group has a thread or a ZeroMQ context.

        Raises:
            StepcastError: it can't be done; nothing is left of it.
        """

    def launch(self, sockets: DriverSockets, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:
        """See to it that every rank has a process. Called in the monitor's thread; the driver's sockets are bound.

        Args:
            sockets: the driver's. For ranks of other hosts they must `listen`, and be told their keys.
            is_cancelled: asked now and then where this takes its time: whether the group is to end already.

        Returns:
            The processes, by rank.

        Raises:
            StartupError: a rank has none within `startup_timeout_s`; those that were started are no more.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything: of what was prepared where it was not launched, else of what the processes needed."""
