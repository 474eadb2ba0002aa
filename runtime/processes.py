"""A group of worker processes, from its start to its end, wherever they come from."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import Closed, StepcastError

from . import failures, interrupts
from .config import ExecutorConfig
from .health import GroupHealth
from .launch import checked, make_launcher
from .monitor import Monitor
from .news import FailureNews
from .state import GroupState, Life
from .step import Request, StepFuture

_log = logging.getLogger("stepcast.runtime")


class RankGroup:
    """A group of worker processes.

    Args:
        config: the settings.
        epoch: the number of this life of the group, from 1.
        first_step: the id of its first step.
        news: tells the embedder of a failure; None for its own.
        will_restart: as in `Group`; None where nothing takes the group's place.

    Attributes:
        on_failure: called with the error that has ended the group.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        epoch: int = 1,
        first_step: int = 1,
        news: FailureNews | None = None,
        will_restart: Callable[[StepcastError], bool] | None = None,
    ) -> None:
        self._config = config = checked(config)
        self._news = news or FailureNews()
        self._waits_for_news = news is None
        self.on_failure = self._news.callbacks
        if config.backend == "torchrun":
            # Its agent sends this process SIGTERM when a rank has ended, which may be before the program can tell why.
            self.on_failure.append(lambda error: _log.error("%s", error))
        self._life = Life(secrets.token_bytes(16), epoch, first_step)
        self._pid = os.getpid()
        self._interrupts = interrupts.HeldInterrupts()  # until the monitor has everything in hand
        try:
            self._directory = RunDirectory(config.run_dir)
            try:
                launcher = make_launcher(config, self._directory, self._life)
                try:
                    launcher.prepare()
                    self._monitor = Monitor(config, self._directory, self._life, launcher, self._news)
                except BaseException:
                    launcher.close()
                    raise
            except BaseException:
                self._directory.remove()
                raise
        except BaseException:
            self._interrupts.release()
            raise
        self._group = self._monitor.group
        if will_restart is not None:
            self._group.will_restart = will_restart

    @property
    def state(self) -> GroupState:
        """Where the group is in its life."""
        return self._group.state

    @property
    def epoch(self) -> int:
        """The number of this life of the group."""
        return self._life.epoch

    @property
    def failure(self) -> StepcastError | None:
        """The error that has ended the group."""
        return self._group.failure

    @property
    def first_step(self) -> int:
        """The id of the first step of this life."""
        return self._life.first_step

    @property
    def last_step(self) -> int:
        """The id of the last step that was published."""
        return self._group.last_step

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the ranks, in order."""
        return tuple(process.pid for process in self._group.processes)

    def start(self) -> None:
        """Start the processes, and wait until every rank is ready.

        Raises:
            StartupError: a rank was not; nothing is left of the group.
        """
        atexit.register(self._at_exit)
        self._monitor.on_end = lambda: atexit.unregister(self._at_exit)
        try:
            self._monitor.start()
            self._interrupts.release()
            # The monitor keeps the limits; this one only covers for a monitor that is held up.
            interrupts.wait(self._monitor.started, self._config.startup_timeout_s + self._ending_limit_s)
        except BaseException:
            self.stop(kill=True)
            raise
        if not self._group.state.accepts_steps:
            self._monitor.ended.wait(self._ending_limit_s)
            raise self._group.failure or Closed("the executor was shut down while it started")

    def run(self, request: Request) -> Any:
        """As `Group.run`."""
        failures.check_process(self._pid)
        return self._group.run(request)

    def undo(self, step: int, request: Request) -> bool:  # noqa: ARG002 - a group without restarts has one life
        """Run what undoes a step, on the same life of the group.

        Args:
            step: the step's id.
            request: what undoes it.

        Returns:
            Whether it was run: not where that life has ended and another takes its place, which has nothing to undo.
        """
        self.run(request)
        return True

    def submit(self, request: Request) -> StepFuture:
        """As `Group.submit`."""
        failures.check_process(self._pid)
        return self._group.submit(request)

    def try_submit(self, request: Request) -> StepFuture | None:
        """As `Group.try_submit`."""
        failures.check_process(self._pid)
        return self._group.try_submit(request)

    def abort_step(self, step: int) -> bool:
        """As `Group.abort_step`."""
        failures.check_process(self._pid)
        return self._group.abort_step(step)

    def health(self) -> GroupHealth:
        """As `Group.health`."""
        failures.check_process(self._pid)
        return self._group.health()

    def request_stop(self) -> None:
        """Ask for the end of the group, and return at once."""
        if os.getpid() == self._pid:
            self._monitor.stop(kill=False)

    def stop(self, *, kill: bool = False) -> None:
        """End the group, and wait until nothing of it is left.

        Args:
            kill: do not give the workers time to finish.

        Raises:
            WorkerLost, StepFailed: a rank died, or its teardown raised, while the group stopped.
        """
        if os.getpid() != self._pid:  # a fork of the embedder: the group is its parent's
            return
        if self._monitor is threading.current_thread():  # in a callback of its own
            self._monitor.stop(kill=kill)
            return
        failed_before = self._group.failure is not None
        try:
            self._monitor.stop(kill=kill)
            interrupts.wait(self._monitor.ended, self._ending_limit_s)
        except BaseException:  # a second Ctrl-C: no more patience
            self._monitor.stop(kill=True)
            self._monitor.ended.wait(self._ending_limit_s)
            raise
        self._monitor.join(self._config.kill_timeout_s)
        if self._waits_for_news:
            self._news.wait(self._config.kill_timeout_s)
        if self._group.failure is not None and not failed_before:
            raise self._group.failure

    def _at_exit(self) -> None:
        try:
            self.stop()
        except StepcastError as failure:
            _log.error("while the executor was shut down at exit: %s", failure)

    @property
    def _ending_limit_s(self) -> float:
        config = self._config
        limits = (config.stop_timeout_s, config.terminate_timeout_s, config.kill_timeout_s, config.dump_timeout_s)
        return sum(limits) + 2 * config.kill_timeout_s + config.linger_s
