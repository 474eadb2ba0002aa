"""The "uni" backend: one rank, in a thread of this process. The same loop, the same table, no sockets."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from stepcast.bus import codec
from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import Closed, StepcastError, StepTimeout
from stepcast.bus.frames import DRIVER_RANK, NO_TIMES, Flag, Header, Kind, pack_times
from stepcast.bus.liveness import Phase
from stepcast.bus.subscriber import Message
from stepcast.bus.verdicts import Verdict, Work, judge
from stepcast.workers.base import RankInfo, Worker
from stepcast.workers.board import Board
from stepcast.workers.boot import bind_device
from stepcast.workers.loading import load_worker_class
from stepcast.workers.loop import WorkerLoop, describe_error

from . import failures, platforms
from .config import ExecutorConfig
from .health import GroupHealth, RankHealth
from .interrupts import HeldInterrupts
from .news import FailureNews
from .pending import PendingTable
from .state import GroupState, can_change
from .step import Pending, Request, StepFuture
from .vitals import describe, work_on

#: Python refuses to wait for longer than some centuries, which a step's own limit may be.
_LONGEST_WAIT_S = 3600.0

_log = logging.getLogger("stepcast.runtime")


class UniGroup:
    """A group of one rank in this process.

    A thread can't be killed: a step past its limit fails its future and ends the group, and its thread goes on until
    the step returns.

    Args:
        config: the settings.
        clock: a monotonic clock, in seconds.

    Attributes:
        on_failure: called with the error that has ended the group.
    """

    epoch = 1

    def __init__(self, config: ExecutorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._kind = platforms.resolve(config.device, 1)
        self.clock = clock
        self._pid = os.getpid()
        self.state = GroupState.NEW
        self.failure: StepcastError | None = None
        self._news = FailureNews()
        self.on_failure = self._news.callbacks
        self._changed = threading.Condition()
        self._pending = PendingTable(1, config.failure_grace_s)
        self._board = Board()
        self._stream: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sequence = 0
        self._in_flight: dict[int, int] = {}
        self._thread = threading.Thread(target=self._live, name="stepcast-uni", daemon=True)
        self._timer = threading.Thread(target=self._watch_limits, name="stepcast-uni-limits", daemon=True)
        self._interrupts = HeldInterrupts()  # until `start` sees to the directory's removal
        try:
            self._directory = RunDirectory(config.run_dir)
        except BaseException:
            self._interrupts.release()
            raise

    # What the executor uses; as in `Group` and `Monitor`.

    def start(self) -> None:
        """Set the worker up in its thread, and wait until it is ready."""
        with self._changed:
            self._change(GroupState.STARTING)
            limit_s = self.config.startup_timeout_s
            try:
                self._thread.start()
                self._interrupts.release()
                ready = self._changed.wait_for(lambda: self.state is not GroupState.STARTING, limit_s)
            except BaseException:  # Ctrl-C
                self._fail(Closed("the start was interrupted"))
                self._directory.remove()
                self._interrupts.release()
                raise
            if not ready:
                self._directory.remove()
                self._fail(failures.start_timed_out(limit_s, {0: str(self._board.status.phase)}, {}))
        if self.failure is not None:
            self._thread.join(self.config.kill_timeout_s if ready else 0)  # it removes the directory
            raise self.failure
        self._timer.start()
        atexit.register(self._stop_quietly)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """This process's id."""
        return (os.getpid(),)

    def run(self, request: Request) -> Any:
        """As `Group.run`."""
        return self.submit(request).result()

    def undo(self, step: int, request: Request) -> bool:  # noqa: ARG002 - there is one life
        """As `RankGroup.undo`."""
        self.run(request)
        return True

    def submit(self, request: Request) -> StepFuture:
        """As `Group.submit`."""
        failures.check_process(self._pid)
        with self._changed:
            future = self._try_submit(request)
            if future is not None:
                return future
            limit_s = self.config.backpressure_timeout_s
            self._changed.wait_for(lambda: not self.state.accepts_steps or self._has_room(request.size), limit_s)
            future = self._try_submit(request)
            if future is None:
                raise failures.back_pressure([0], len(self._in_flight), sum(self._in_flight.values()), self.config)
            return future

    def try_submit(self, request: Request) -> StepFuture | None:
        """As `Group.try_submit`."""
        failures.check_process(self._pid)
        with self._changed:
            return self._try_submit(request)

    def abort_step(self, step: int) -> bool:
        """As `Group.abort_step`."""
        failures.check_process(self._pid)
        with self._changed:
            aborted = self._pending.abort(step)
            if aborted:
                self._board.aborted.add(step)
                self._changed.notify_all()
        self._pending.give_out()
        return aborted

    def health(self) -> GroupHealth:
        """As `Group.health`."""
        failures.check_process(self._pid)
        with self._changed:
            status = self._board.status
            age_s = (time.monotonic_ns() - status.since_ns) / 1e9
            work = self._work(age_s)
            if isinstance(self.failure, StepTimeout) and status.phase is not Phase.GONE:
                verdict = Verdict.STUCK
            else:
                interval_s = self.config.heartbeat_interval_s
                verdict = judge(status.phase, work, silent=False, activity=None, interval_s=interval_s)
            return GroupHealth(
                state=self.state.value,
                ok=self.state.accepts_steps and verdict.is_healthy,
                failure=None if self.failure is None else str(self.failure),
                epoch=self.epoch,
                published=self._sequence,
                in_flight=len(self._in_flight),
                in_flight_bytes=sum(self._in_flight.values()),
                straggler=None,
                dropped={"late": self._pending.late},
                ranks=(
                    RankHealth(
                        rank=0,
                        pid=os.getpid(),
                        verdict=str(verdict),
                        detail=describe(verdict, status.phase, work, age_s),
                        phase=str(status.phase),
                        phase_age_s=age_s,
                        step=status.step,
                        last_heard_s=0.0,
                        queue_depth=len(self._in_flight),
                    ),
                ),
            )

    def _work(self, phase_age_s: float) -> Work | None:
        now = self.clock()
        entry = next(iter(self._pending.under_way.values()), None)
        return None if entry is None else work_on(entry, 0, now, now - phase_age_s)

    def request_stop(self) -> None:
        """Ask for the end of the group, and return at once."""
        # A finalizer may run in any thread, one that holds the lock included.
        threading.Thread(target=self._stop_quietly, name="stepcast-uni-stop", daemon=True).start()

    def stop(self, *, kill: bool = False) -> None:
        """Let the worker finish and tear down, within `stop_timeout_s`.

        Args:
            kill: do not wait.

        Raises:
            StepFailed: the worker's teardown raised.
        """
        atexit.unregister(self._stop_quietly)
        if os.getpid() != self._pid:  # a fork of the embedder: the thread is its parent's
            return
        failed_before = self.failure is not None
        with self._changed:
            if self.state.accepts_steps:
                self._change(GroupState.STOPPING)
                self._end_loop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(0 if kill else self.config.stop_timeout_s)
            if self._thread.is_alive():
                _log.error("the worker's thread is still in %s; it ends with this process", self._board.status.phase)
                self._directory.remove()  # which may be before it could
        with self._changed:
            self._pending.fail_all(Closed("the executor was shut down before the step was answered"))
            if can_change(self.state, GroupState.STOPPED):
                self._change(GroupState.STOPPED)
        self._pending.give_out()
        if self._timer.ident is not None and self._timer is not threading.current_thread():
            self._timer.join(self.config.kill_timeout_s)
        self._news.wait(self.config.kill_timeout_s)
        if self.failure is not None and not failed_before:
            raise self.failure

    def _stop_quietly(self) -> None:
        try:
            self.stop()
        except StepcastError as failure:
            _log.error("while the executor was shut down at its end: %s", failure)

    # The worker's thread.

    def next(self) -> Message:
        """The loop's step stream."""
        return self._stream.get()

    def send(
        self,
        kind: int,
        sequence: int = 0,
        step: int = 0,  # noqa: ARG002
        frames: Sequence[bytes | memoryview] = (),
        flags: int = 0,  # noqa: ARG002
        times: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        """The loop's answers."""
        with self._changed:
            self._in_flight.pop(sequence, None)
            if kind == Kind.FAILURE:
                self._pending.failed(0, sequence, codec.decode(frames), self.clock())
                self._pending.to_resume.clear()  # there are no peers, and it does not wait
            else:
                self._pending.result(0, sequence, _copied(frames), pack_times(times or NO_TIMES))
            if self.state.accepts_steps:
                wanted = GroupState.DEGRADED if self._pending.degraded else GroupState.READY
                if self.state is not wanted:
                    self._change(wanted)
            # Given out by whoever waits, or by the timer's thread: a callback in this one could not wait for a step.
            self._changed.notify_all()

    def _live(self) -> None:
        try:
            worker = self._set_up()
            limit = self.config.max_message_bytes
            loop = WorkerLoop(worker, self, self, self._board, rank=0, output_rank=0, max_answer_bytes=limit)
            with self._changed:
                if self.state is GroupState.STARTING:
                    self._board.enter(Phase.IDLE)
                    self._change(GroupState.READY)
            loop.run()
            self._board.enter(Phase.STOPPING)
            worker.teardown()
        except BaseException as error:  # noqa: BLE001 - a thread that ends unseen would hide it
            self._worker_raised(error)
        finally:
            self._directory.remove()
            self._board.enter(Phase.GONE)

    def _set_up(self) -> Worker:
        config = self.config
        self._board.enter(Phase.IMPORTING)
        chosen = config.worker
        rank = RankInfo(
            rank=0,
            local_rank=0,
            local_world_size=1,
            world_size=1,
            epoch=self.epoch,
            output_rank=0,
            device=self._kind.device(0),
            device_class=self._kind.device_class,
            rendezvous=f"file://{self._directory.path}/rendezvous",
            collective_timeout_s=config.collective_timeout_s,
            options=config.worker_options,
            is_aborted=self._board.is_aborted,
        )
        bind_device(rank)
        worker = (load_worker_class(chosen) if isinstance(chosen, str) else chosen)()
        self._board.enter(Phase.LOADING)
        worker.setup(rank)
        return worker

    def _worker_raised(self, error: BaseException) -> None:
        phase = str(self._board.status.phase)
        description = describe_error(error)
        with self._changed:
            failure: StepcastError
            if self.state is GroupState.STARTING:
                failure = failures.start_raised(0, phase, description, "")
            else:
                failure = failures.rank_broken(0, description)
            failure.__cause__ = error
            self._fail(failure)
        self._pending.give_out()

    # Both.

    def _try_submit(self, request: Request) -> StepFuture | None:
        if request.limit is not None and not request.limit.seconds > 0:
            raise failures.expired(request.name, request.limit)
        if not self.state.accepts_steps:
            raise failures.closed(self.state, self.failure)
        if request.size > (limit_bytes := min(self.config.max_message_bytes, self.config.max_in_flight_bytes)):
            raise failures.too_large(request.size, limit_bytes)
        if not self._has_room(request.size):
            return None
        if self._pending.carried is not None:
            raise self._pending.take_carried_failure()
        kind, name, frames, size, gather, answer_rank, limit, hard_limit = request
        step = sequence = self._sequence + 1
        entry = Pending(sequence, step, name, gather, answer_rank, True, self.clock(), limit, hard_limit)
        entry.future = StepFuture(entry, self._wait, self.abort_step)
        self._pending.add(entry)
        self._put(kind, step, frames, size)
        self._changed.notify_all()
        return entry.future

    def _put(self, kind: Kind, step: int, frames: Sequence[bytes | memoryview], size: int) -> None:
        self._sequence += 1
        self._in_flight[self._sequence] = size
        self._stream.put(Message(Header(kind, Flag.GATHER, self._sequence, step, DRIVER_RANK), _copied(frames)))

    def _end_loop(self) -> None:
        self._stream.put(Message(Header(Kind.STOP, Flag.NONE, self._sequence + 1, 0, DRIVER_RANK), []))

    def _has_room(self, size: int) -> bool:
        config = self.config
        used = sum(self._in_flight.values())
        return len(self._in_flight) < config.max_in_flight and used + size <= config.max_in_flight_bytes

    def _wait(self, entry: Pending, timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: entry.settled, timeout_s)
        self._pending.give_out()

    def _watch_limits(self) -> None:
        """A thread: judges what is late."""
        while True:
            with self._changed:
                if self.state in (GroupState.FAILED, GroupState.STOPPED):
                    return
                now = self.clock()
                error = self._pending.expire(now, {0: str(self._board.status.phase)})
                if error is not None:
                    self._fail(error)
                deadline = self._pending.next_deadline()
                if self._pending.outcomes:
                    self._changed.notify_all()
                else:
                    wait_s = _LONGEST_WAIT_S if deadline is None else min(deadline - now, _LONGEST_WAIT_S)
                    self._changed.wait(max(0.0, wait_s))
            self._pending.give_out()

    def _change(self, state: GroupState) -> None:
        assert can_change(self.state, state), (self.state, state)  # noqa: S101 - a bug here, never an input
        self.state = state
        self._changed.notify_all()

    def _fail(self, error: StepcastError) -> None:
        if self.state in (GroupState.FAILED, GroupState.STOPPED):
            return
        self.failure = error
        failures.ends_group(error, restarted=False)
        self._change(GroupState.FAILED)
        self._pending.fail_all(error)
        self._end_loop()  # the worker may come back to it
        self._news.tell(error)


def _copied(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Copy the buffers, as a socket does: neither side sees what the other writes to its arrays later."""
    return [*frames[:1], *map(bytes, frames[1:])]
