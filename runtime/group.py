"""One group of worker processes, and the way of a step through it.

One lock guards the sockets and the tables. It is never held while a thread waits, nor while a future is resolved, whose
callbacks are the embedder's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for_futures
from typing import Any

from stepcast.bus.errors import ProtocolError, StepcastError
from stepcast.bus.frames import Flag, Kind
from stepcast.bus.liveness import HeartbeatTimer
from stepcast.bus.replies import Reply
from stepcast.bus.verdicts import Verdict

from . import failures
from .config import ExecutorConfig
from .health import GroupHealth
from .inbox import Inbox
from .launch.process import WorkerProcess
from .pending import PendingTable
from .pump import Pump
from .sockets import DriverSockets
from .state import GroupState, Life, can_change
from .step import Pending, Request, StepFuture
from .vitals import Vitals

_GATHER = int(Flag.GATHER)

_log = logging.getLogger("stepcast.runtime")


class Group:
    """The driver's end of one group: its sockets and tables. A `Monitor` starts, watches and ends its processes.

    Args:
        config: the settings.
        sockets: the driver's ends of the bus, which it closes.
        life: run id, epoch and first step.
        watch: has the monitor watch the reply socket's descriptor, or not.
        wake_monitor: makes the monitor look at everything once.
        clock: a monotonic clock, in seconds.

    Attributes:
        lock: guards everything here.
        state: where the group is in its life.
        failure: the error that ended it.
        processes: the ranks' processes, once started.
        last_step: the id of the last step that was published.
        will_restart: asked once, with the error that ends the group and the lock held: whether another takes its place.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        sockets: DriverSockets,
        life: Life,
        *,
        watch: Callable[[bool], None],
        wake_monitor: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.epoch = life.epoch
        self.lock = threading.Lock()
        self.state = GroupState.NEW
        self.failure: StepcastError | None = None
        self.will_restart: Callable[[StepcastError], bool] = lambda _: False
        self.processes: list[WorkerProcess] = []
        self._wake_monitor = wake_monitor
        self.last_step = life.first_step - 1
        #: Threads that wait for room while another one reads.
        self._want_room: set[threading.Event] = set()
        self._takes_steps = False
        self._max_bytes = min(config.max_message_bytes, config.max_in_flight_bytes)
        self._closed = False
        self.sockets = sockets
        self.publisher, self.replies = sockets.publisher, sockets.replies
        now = clock()
        self.heartbeat = HeartbeatTimer(config.heartbeat_interval_s, now)
        self.pending = PendingTable(config.world_size, config.failure_grace_s)
        self.inbox = Inbox(self.publisher, self.pending, config.world_size, now)
        self.vitals = Vitals(config, self.inbox, self.publisher, self.pending)
        # What the pump asks for most, without a call in between.
        self.next_deadline = self.pending.next_deadline
        self.outcomes = self.pending.outcomes
        self.under_way = self.pending.under_way
        self.has_waiting = self.pending.has_waiting
        self.answers_wanted = self.pending.answers_wanted
        self.give_out = self.pending.give_out
        self.pump = Pump(self.replies, self, watch=watch, wake_monitor=wake_monitor)

    # The way of a step.

    def run(self, request: Request) -> Any:
        """Publish a request and wait for its outcome, all in this thread unless another one reads the replies.

        Args:
            request: the request.

        Returns:
            The answer.

        Raises:
            StepcastError: as `submit`, and whatever the step's outcome is.
        """
        entry = self._submit(request, with_future=False)
        self.wait(entry, None)
        return entry.outcome()

    def submit(self, request: Request) -> StepFuture:
        """Publish a request, waiting for room in the windows where there is none.

        Args:
            request: the request.

        Returns:
            Its future.

        Raises:
            Backpressure: there was no room for `backpressure_timeout_s`.
            Closed: the group takes no steps.
            ProtocolError: the request is larger than any that can be sent.
            StepFailed: an earlier step failed on another rank after its own outcome had been given out.
            StepTimeout: the request's limit has passed already.
        """
        entry = self._submit(request, with_future=True)
        assert entry.future is not None  # noqa: S101 - it was asked for
        return entry.future

    def try_submit(self, request: Request) -> StepFuture | None:
        """Publish a request if there is room for it in the windows.

        Args:
            request: the request.

        Returns:
            Its future; None where there is no room.

        Raises:
            StepcastError: as `submit`.
        """
        entry = self._try_submit(request, with_future=True)
        return None if entry is None else entry.future

    def wait(self, entry: Pending, timeout_s: float | None) -> None:
        """Wait for a step's outcome, reading the replies in this thread unless another one does.

        Args:
            entry: the step.
            timeout_s: the longest to wait; None for the limits of the step itself.
        """
        deadline = None if timeout_s is None else self.clock() + timeout_s
        has_read = self.pump.read_until(entry, deadline)
        if entry.settled and entry.future is None:
            return
        with self.lock:
            if entry.settled and entry.future is None:
                return
            # Another thread reads, or gives the outcome out just now.
            future = entry.future = entry.future or StepFuture(entry, self.wait, self.abort_step)
        if not has_read:
            self.pump.read_in_turn(entry, deadline, future.told())
        if not future.done():
            wait_for_futures((future,), None if deadline is None else max(0.0, deadline - self.clock()))

    def abort_step(self, step: int) -> bool:
        """Resolve a step's future with `StepAborted`, and tell the ranks.

        Args:
            step: the step's id.

        Returns:
            False where the step is not under way any more.
        """
        with self.lock:
            aborted = self.pending.abort(step)
            if aborted and not self._closed:
                self.control(Kind.ABORT, step)
        self.give_out()
        self.pump.wake()
        return aborted

    def health(self) -> GroupHealth:
        """Tell how every rank is doing, without asking them and without waiting."""
        straggler = self.pending.straggler()
        with self.lock:
            ranks = self.vitals.ranks(self.clock())
            gate = self.sockets.gate
            refused = {} if gate is None else gate.refused
            dropped = {**self.replies.dropped, **refused, "late": self.pending.late, "malformed": self.inbox.malformed}
            return GroupHealth(
                state=self.state.value,
                ok=self.state.accepts_steps and all(Verdict(rank.verdict).is_healthy for rank in ranks),
                failure=None if self.failure is None else str(self.failure),
                epoch=self.epoch,
                published=self.publisher.sequence,
                in_flight=self.publisher.in_flight,
                in_flight_bytes=self.publisher.in_flight_bytes,
                straggler=straggler,
                dropped=dropped,
                ranks=ranks,
            )

    # What the pump uses, in the thread that reads.

    def take(self, replies: Sequence[Reply]) -> None:
        """Take replies, or none where a limit may have passed."""
        rare = False
        with self.lock:
            now = self.clock()
            for reply in replies:
                rare |= self.inbox.take(reply, now)
            if self.pending.degraded != (self.state is GroupState.DEGRADED) and self.state.accepts_steps:
                self.change(GroupState.DEGRADED if self.pending.degraded else GroupState.READY)
            if now >= self.pending.earliest:
                self.expire(now)
            while self.pending.to_resume:
                self.control(Kind.RESUME, self.pending.to_resume.pop())
            if self._want_room:
                self._tell_of_room()
        if rare:
            self._wake_monitor()

    # What the monitor uses. It holds the lock in all of these.

    def change(self, state: GroupState) -> None:
        """Change the group's state as a unit."""
        assert can_change(self.state, state), (self.state, state)  # noqa: S101 - a bug here, never an input
        _log.debug("group %s -> %s", self.state.value, state.value)
        self.state = state
        self._takes_steps = state.accepts_steps
        self._tell_of_room()

    def fail(self, error: StepcastError) -> None:
        """End the group: every future gets the error, and the monitor ends the processes."""
        if self.state in (GroupState.FAILED, GroupState.STOPPED):
            return
        self.failure = error
        failures.ends_group(error, restarted=self.will_restart(error))
        self.change(GroupState.FAILED)
        self.pending.fail_all(error)
        self.pump.wake()
        self._wake_monitor()

    def publish_to_all(self, kind: Kind, frames: Sequence[bytes | memoryview] = ()) -> bool:
        """Publish BEGIN or STOP, which need no room in the windows.

        Returns:
            False where a pipe was full.
        """
        size = sum(map(len, frames))
        if self.publisher.publish(kind, 0, frames, size) is None:
            self.publisher.lose_for_full_pipes()
            if self.publisher.publish(kind, 0, frames, size) is None:
                return False
        self.heartbeat.published(self.clock())
        return True

    def control(self, kind: Kind, step: int = 0) -> bool:
        """Publish a control message; a rank that has not read for long, so that its pipe is full, holds up no other.

        Returns:
            False where a pipe was full all the same.
        """
        if self.publisher.control(kind, step):
            return True
        self.publisher.lose_for_full_pipes()
        return self.publisher.control(kind, step)

    def expire(self, now: float) -> None:
        """Judge what is late, where something may be."""
        deadline = self.pending.next_deadline()
        if deadline is None or now < deadline:
            return
        error = self.pending.expire(now, self.inbox.phases(), self.vitals.report(now))
        if error is not None:
            self.fail(error)
        self.pump.wake()

    def close(self) -> None:
        """Close the sockets. Called without the lock, when every process has ended and every outcome is given out."""
        self.pump.close(self.config.kill_timeout_s)
        with self.lock:
            self._closed = True
            self.sockets.close()

    def _submit(self, request: Request, *, with_future: bool) -> Pending:
        entry = self._try_submit(request, with_future=with_future)
        if entry is not None:
            return entry
        deadline = self.clock() + self.config.backpressure_timeout_s
        while True:
            self._wait_for_room(request, deadline)
            entry = self._try_submit(request, with_future=with_future)
            if entry is not None:
                return entry
            if self.clock() >= deadline:
                with self.lock:
                    bus = self.publisher
                    raise failures.back_pressure(bus.slow_ranks(), bus.in_flight, bus.in_flight_bytes, self.config)

    def _try_submit(self, request: Request, *, with_future: bool) -> Pending | None:
        if request.limit is not None and not request.limit.seconds > 0:
            raise failures.expired(request.name, request.limit)
        with self.lock:
            if not self._takes_steps:
                raise failures.closed(self.state, self.failure)
            if request.size > self._max_bytes:
                raise failures.too_large(request.size, self._max_bytes)
            if not self.publisher.has_credit(request.size):
                return None
            if self.pending.carried is not None:
                raise self.pending.take_carried_failure()
            entry = self._publish(request, with_future=with_future)
        if with_future:
            self.pump.attend()
        return entry

    def _publish(self, request: Request, *, with_future: bool) -> Pending | None:
        kind, name, frames, size, gather, answer_rank, limit, hard_limit = request
        now = self.clock()
        step = self.last_step + 1
        flags = _GATHER if gather else 0
        try:
            sequence = self.publisher.publish(kind, step, frames, size, flags)
            if sequence is None:  # though the windows have room
                self.publisher.lose_for_full_pipes()
                sequence = self.publisher.publish(kind, step, frames, size, flags)
        except BaseException as interruption:
            # A KeyboardInterrupt between the parts of a message leaves the socket in the middle of it.
            self.fail(ProtocolError(f"the publication of step {step} was interrupted: {interruption!r}"))
            raise
        if sequence is None:
            return None
        self.last_step = step
        self.heartbeat.published(now)
        needs_all = gather or len(frames) > 1
        entry = Pending(sequence, step, name, gather, answer_rank, needs_all, now, limit, hard_limit)
        if with_future:
            entry.future = StepFuture(entry, self.wait, self.abort_step)
        self.pending.add(entry)
        if limit is not None:
            self._wake_monitor()  # it may sleep past this limit
        return entry

    def _wait_for_room(self, request: Request, deadline: float) -> None:
        """Wait until there may be room, the group takes no steps any more, or the deadline."""
        room, told = _Room(self, request.size), threading.Event()
        with self.lock:
            self._want_room.add(told)
        try:
            self.pump.read_in_turn(room, deadline, told)
        finally:
            with self.lock:
                self._want_room.discard(told)

    def _tell_of_room(self) -> None:
        for told in self._want_room:
            told.set()


class _Room:
    """What a thread waits for that can't publish: room for its message, or the group's end."""

    def __init__(self, group: Group, size: int) -> None:
        self._group = group
        self._size = size

    @property
    def settled(self) -> bool:
        group = self._group
        return not group.state.accepts_steps or group.publisher.has_credit(self._size)
