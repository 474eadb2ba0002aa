"""The executor's group in a process that torchrun has started as another rank than the driver's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from stepcast.bus.errors import Closed, StepcastError
from stepcast.workers.boot import exit_at_once

from .config import ExecutorConfig
from .health import GroupHealth
from .launch import checked
from .launch.agent import Place
from .state import GroupState
from .step import Request


class FollowedGroup:
    """A group that this process serves as one of its ranks. The same methods as `RankGroup`, which take no steps.

    Args:
        config: the settings.

    Attributes:
        on_failure: never called: what happens to the group is the driver's to tell.
    """

    state = GroupState.STOPPED
    worker_pids: tuple[int, ...] = ()

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._rank = Place.of_this_process().rank
        self.on_failure: list[Callable[[StepcastError], None]] = []

    def start(self) -> None:
        """Serve the group, from its start to its end.

        Raises:
            StartupError: there is no driver.
            SystemExit: the group has ended; not where `followers_return` is set and it has ended in good order.
        """
        from .launch.torchrun import follow  # noqa: PLC0415 - it needs torch

        code = follow(checked(self._config))
        if code or not self._config.followers_return:
            if threading.current_thread() is not threading.main_thread():
                exit_at_once(code)  # SystemExit would end this thread, and the program would go on
            raise SystemExit(code)

    def run(self, request: Request) -> NoReturn:  # noqa: ARG002 - the same methods
        """Refuse a step."""
        raise self._closed()

    def undo(self, step: int, request: Request) -> NoReturn:  # noqa: ARG002
        """Refuse a step."""
        raise self._closed()

    def submit(self, request: Request) -> NoReturn:  # noqa: ARG002
        """Refuse a step."""
        raise self._closed()

    def try_submit(self, request: Request) -> NoReturn:  # noqa: ARG002
        """Refuse a step."""
        raise self._closed()

    def abort_step(self, step: int) -> bool:  # noqa: ARG002
        """Tell that there is no such step."""
        return False

    def health(self) -> GroupHealth:
        """Refuse: only the driver knows."""
        raise self._closed()

    def request_stop(self) -> None:
        """Nothing is left to stop."""

    def stop(self, *, kill: bool = False) -> None:
        """Nothing is left to stop."""

    def _closed(self) -> Closed:
        return Closed(
            f"this process was rank {self._rank} of the group, which has ended: only rank 0's executor takes steps "
            "(Executor.is_driver)"
        )
