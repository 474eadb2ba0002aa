"""Restarts a group in place: `ExecutorConfig(restart="on_failure")`.

Each life of the group, an epoch, is an `RankGroup` of its own: processes, sockets, run directory and rendezvous are all
new, and nothing of the epoch before can reach it. The supervisor's thread waits for a failure, sees the old epoch to
its end, waits for as long as the policy says, and puts a new one in its place.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from stepcast.bus.errors import Closed, StepcastError

from . import failures
from .config import ExecutorConfig
from .health import GroupHealth
from .monitor import Monitor
from .news import FailureNews
from .processes import RankGroup
from .state import GroupState
from .step import Request, StepFuture

_Result = TypeVar("_Result")

_log = logging.getLogger("stepcast.runtime")


class RestartPolicy:
    """How often, and how soon, a group is restarted. Pure: there is no clock in it.

    One rule: a group that has lived well for as long as the window is as good as new, and all failures before are
    forgotten; else each one counts, a start that failed as well as a life that was short.

    Args:
        max_restarts: how many restarts there may be in a row, without a good life in between.
        window_s: how long a good life is, in seconds; no restart waits for longer either.
        backoff_s: seconds before the first restart in a row; twice as long before each further one.
    """

    def __init__(self, max_restarts: int, window_s: float, backoff_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._in_a_row = 0
        self._next_delay_s = backoff_s

    def failed(self, lived_s: float) -> float | None:
        """Note a failure.

        Args:
            lived_s: seconds since the group was ready; 0 where it did not come up.

        Returns:
            Seconds until the group is to be restarted; None where it is not.
        """
        if lived_s >= self._window_s:
            self._in_a_row, self._next_delay_s = 0, self._backoff_s
        if self._in_a_row >= self._max_restarts:
            return None
        delay_s = min(self._next_delay_s, self._window_s)
        self._in_a_row += 1
        self._next_delay_s = 2 * delay_s
        return delay_s


class RestartingGroup:
    """A group that is restarted when it fails. The same methods as `RankGroup`.

    Args:
        config: the settings.
        clock: a monotonic clock, in seconds.

    Attributes:
        on_failure: called with each error that has ended an epoch.
    """

    def __init__(self, config: ExecutorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._pid = os.getpid()
        self._policy = RestartPolicy(config.max_restarts, config.restart_window_s, config.restart_backoff_s)
        self._news = FailureNews()
        self.on_failure = self._news.callbacks
        self._changed = threading.Condition()
        self._restarts = 0
        self._failure: StepcastError | None = None
        self._delay_s: float | None = None
        self._ready_at: float | None = None
        self._given_up: StepcastError | None = None
        self._stopping = threading.Event()
        self._failed = threading.Event()
        self._starting: RankGroup | None = None
        self._group = self._new_group(config, epoch=1, first_step=1)
        self._thread = threading.Thread(target=self._supervise, name="stepcast-supervisor", daemon=True)

    def start(self) -> None:
        """As `RankGroup.start`."""
        self._group.start()
        self._ready_at = self._clock()
        self._thread.start()
        atexit.register(self._stop_quietly)

    @property
    def state(self) -> GroupState:
        """Where the group is in its life; "starting" while it is restarted."""
        return GroupState.STARTING if self._is_restarting else self._group.state

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the ranks of the current epoch, in order."""
        return self._group.worker_pids

    def run(self, request: Request) -> Any:
        """As `RankGroup.run`; waits while the group is restarted."""
        return self._on_a_living_group(RankGroup.run, request)

    def undo(self, step: int, request: Request) -> bool:
        """As `RankGroup.undo`."""
        group = self._group
        if step < group.first_step:
            return False
        try:
            return group.undo(step, request)
        except Closed:  # the group has failed before that was published
            if not self._is_restarting:
                raise
            return False

    def submit(self, request: Request) -> StepFuture:
        """As `RankGroup.submit`; waits while the group is restarted."""
        return self._on_a_living_group(RankGroup.submit, request)

    def try_submit(self, request: Request) -> StepFuture | None:
        """As `RankGroup.try_submit`.

        Returns:
            The step's future; None where there is no room, or the group is being restarted.
        """
        try:
            return None if self._is_restarting else self._group.try_submit(request)
        except Closed:
            if self._is_restarting:
                return None
            self._check_goes_on()
            raise

    def abort_step(self, step: int) -> bool:
        """As `RankGroup.abort_step`."""
        return self._group.abort_step(step)

    def health(self) -> GroupHealth:
        """As `RankGroup.health`: of the current epoch, or of the one that has failed while there is no other."""
        health = replace(self._group.health(), restarts=self._restarts)
        if health.failure is not None:  # the newest, which may be that of a start of the next epoch
            health = replace(health, failure=str(self._given_up or self._failure or health.failure))
        return replace(health, state=GroupState.STARTING.value, ok=False) if self._is_restarting else health

    def request_stop(self) -> None:
        """Ask for the end of the group, and return at once."""
        if os.getpid() == self._pid:
            # A finalizer may run in any thread, one that holds a lock of this object included.
            threading.Thread(target=self._stop_quietly, name="stepcast-stop", daemon=True).start()

    def stop(self, *, kill: bool = False) -> None:
        """As `RankGroup.stop`."""
        if os.getpid() != self._pid:  # a fork of the embedder: the group is its parent's
            return
        atexit.unregister(self._stop_quietly)
        with self._changed:
            self._stopping.set()
            self._failed.set()
            starting = self._starting
            self._changed.notify_all()
        if starting is not None:
            starting.stop(kill=True)
        # In a callback of a monitor's the supervisor waits for that very callback to return.
        if self._thread.ident is not None and not isinstance(threading.current_thread(), Monitor):
            self._thread.join(self._config.startup_timeout_s)
        self._group.stop(kill=kill)
        self._news.wait(self._config.kill_timeout_s)

    @property
    def _is_restarting(self) -> bool:
        ended = self._group.state is GroupState.FAILED
        return ended and self._given_up is None and not self._stopping.is_set()

    def _on_a_living_group(self, method: Callable[[RankGroup, Request], _Result], request: Request) -> _Result:
        try:
            group = self._group
            return method(group if group.state.accepts_steps else self._wait_for_group(request), request)
        except Closed:  # the group has failed before the step was published
            if not self._is_restarting:
                raise
            return method(self._wait_for_group(request), request)

    def _wait_for_group(self, request: Request) -> RankGroup:
        failures.check_process(self._pid)
        limit, limit_s = request.limit, self._config.restart_wait_s
        if limit is not None:
            limit_s = min(limit_s, limit.seconds)
        with self._changed:
            if self._changed.wait_for(lambda: not self._is_restarting, limit_s):
                self._check_goes_on()
                return self._group
        if limit is not None and limit.seconds <= limit_s:
            raise failures.restart_outlasts(request.name, limit, self._failure)
        raise failures.restarting(limit_s, self._failure)

    def _check_goes_on(self) -> None:
        if self._given_up is not None:
            raise failures.closed(GroupState.FAILED, self._given_up)
        if self._stopping.is_set() and self._group.state is GroupState.FAILED:  # while it was to be restarted
            raise failures.closed(GroupState.STOPPED, None) from self._failure

    # In whatever thread an epoch fails in; the epoch's lock is held.

    def _will_restart(self, error: StepcastError) -> bool:
        """Decide, once for each failure, whether the group is restarted after it, and have the supervisor do it."""
        if error is not self._failure:
            lived_s = 0.0 if self._ready_at is None else self._clock() - self._ready_at
            # A parent that has died ends the group for good. So does a first start that fails: most likely by a mistake
            # that will not go away.
            for_good = isinstance(error, Closed) or self._stopping.is_set()
            for_good |= self._group.state is GroupState.STARTING
            self._delay_s = None if for_good else self._policy.failed(lived_s)
            self._failure, self._ready_at = error, None
            self._failed.set()
        return self._delay_s is not None

    # The supervisor's thread.

    def _supervise(self) -> None:
        try:
            while self._outlives_failure():
                pass
        except BaseException as error:  # noqa: BLE001 - a thread that ended unseen would let all wait
            _log.exception("the supervisor failed")
            self._give_up(StepcastError(f"the supervisor failed: {error!r}"))

    def _outlives_failure(self) -> bool:
        """Wait for the next failure, and restart the group. Returns False where it is over."""
        self._failed.wait()
        self._failed.clear()  # before the question: a stop that comes behind it sets it again
        if self._stopping.is_set():
            return False
        error = self._group.failure
        if error is None:
            return True
        self._group.stop(kill=True)
        return self._restart(error)

    def _restart(self, error: StepcastError) -> bool:
        """Put a new epoch in the place of one that has failed. Returns False where there is none."""
        epoch, first_step = self._group.epoch, self._group.last_step + 1
        while True:
            delay_s = self._delay_s if self._will_restart(error) else None
            if delay_s is None:
                if not self._stopping.is_set():
                    self._give_up(error)
                return False
            epoch += 1
            _log.warning("the group has failed; epoch %d starts in %.3g s. The failure: %s", epoch, delay_s, error)
            if self._stopping.wait(delay_s):
                return False
            try:
                self._start_epoch(epoch, first_step)
            except StepcastError as failure:
                if self._stopping.is_set():
                    return False
                error = failure
            except Exception as failure:  # noqa: BLE001 - such as no descriptors left: it may be better next time
                error = StepcastError(f"epoch {epoch} could not be started: {failure!r}")
            else:
                return True

    def _start_epoch(self, epoch: int, first_step: int) -> None:
        config = self._config
        if config.start_method == "fork":
            _log.warning("epoch %d is spawned: a process with threads and sockets can't be forked safely", epoch)
            config = config.replace(start_method="spawn")
        group = self._new_group(config, epoch=epoch, first_step=first_step)
        self._ready_at = None
        with self._changed:
            self._starting = group
        try:
            if self._stopping.is_set():
                group.request_stop()
            group.start()
        finally:
            with self._changed:
                self._starting = None
        self._ready_at = self._clock()
        with self._changed:
            self._restarts += 1
            self._group = group
            self._changed.notify_all()
        _log.warning("epoch %d is ready, after %d restarts in all", epoch, self._restarts)

    def _new_group(self, config: ExecutorConfig, *, epoch: int, first_step: int) -> RankGroup:
        return RankGroup(config, epoch=epoch, first_step=first_step, news=self._news, will_restart=self._will_restart)

    def _give_up(self, error: StepcastError) -> None:
        with self._changed:
            self._given_up = failures.not_restarted(self._restarts, self._config.max_restarts, error)
            self._changed.notify_all()
        _log.error("%s", self._given_up)

    def _stop_quietly(self) -> None:
        try:
            self.stop()
        except StepcastError as failure:
            _log.error("while the executor was shut down at its end: %s", failure)
