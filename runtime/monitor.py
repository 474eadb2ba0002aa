"""The monitor thread: starts a group's processes, watches them, and ends them.

It reads aloud: wait for something, read what has come, look at the processes, and take the next step of the group's
life. It is the one that spawns, so that the kernel ends the workers when it ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import Closed, StepcastError, StepTimeout
from stepcast.bus.frames import Kind
from stepcast.bus.liveness import Phase
from stepcast.workers.boot import EXIT_FAILED

from . import failures, stacks
from .config import ExecutorConfig
from .ending import Escalation
from .group import Group
from .inbox import Broken
from .keepalive import KeepalivePacer
from .launch.attached import RemoteProcess
from .launch.launcher import Launcher
from .launch.process import EXIT_CODE_UNKNOWN, WorkerProcess
from .news import FailureNews
from .output import OutputRelay
from .parent_watch import ParentWatch
from .pump import MONITOR_LOOK_S
from .sockets import DriverSockets
from .state import GroupState, Life
from .straggler import StragglerWatch

#: PROBE is published less and less often, down to once in this time.
_MAX_PROBE_INTERVAL_S = 1.0
_PROBE_BACKOFF = 1.5
#: How long the end of a dead rank's stderr, or its last message, may take to arrive.
_LAST_WORDS_S = 0.3
_LAST_WORDS_POLL_MS = 10
#: How often processes are looked at where the kernel has no pidfd.
_NO_PIDFD_POLL_S = 0.1

_log = logging.getLogger("stepcast.runtime")


class Monitor(threading.Thread):
    """Watches one group.

    Args:
        config: the settings.
        directory: the run's private directory; removed at the end.
        life: run id, epoch and first step.
        launcher: gets the processes.
        news: is told the error that has ended the group.
        clock: a monotonic clock, in seconds.

    Attributes:
        group: the group.
        started: set when the group is ready, or has failed.
        ended: set when nothing of the group is left.
        on_end: called when nothing of the group is left.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        directory: RunDirectory,
        life: Life,
        launcher: Launcher,
        news: FailureNews,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="stepcast-monitor", daemon=True)
        self._config = config
        self._directory = directory
        self._launcher = launcher
        self._clock = clock
        self.started = threading.Event()
        self.ended = threading.Event()
        self._news: FailureNews | None = news  # None when it has been told
        self.on_end: Callable[[], object] = lambda: None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.RLock()  # a finalizer may come in between
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        sockets = DriverSockets(config, directory, life)
        self.group = Group(config, sockets, life, watch=self._watch_replies, wake_monitor=self.wake, clock=clock)
        self._replies_fd = self.group.replies.fd
        self._epoll.register(self._replies_fd, 0)
        self._straggler = StragglerWatch(config.heartbeat_interval_s, self.group.pending.straggler)
        self._relay = OutputRelay()
        self._parent = ParentWatch(config.watch_parent)
        if self._parent.fd is not None:
            self._epoll.register(self._parent.fd, select.EPOLLIN | select.EPOLLONESHOT)
        self._keepalive = KeepalivePacer(config.keepalive_every if config.keepalive == "collective" else None)
        now = clock()
        self._start_deadline = now + config.startup_timeout_s
        self._probe_interval_s = config.probe_interval_s
        self._next_probe = now
        self._begun = False
        self._stuck = False  # the group ends for a rank that does not go on: its stacks are wanted
        self._stop_wanted = self._kill_wanted = self._killing = self._terminated = False
        self._escalation = Escalation(config)
        self._sentinels: dict[int, WorkerProcess] = {}
        self._unwatched = False  # the kernel has no pidfd
        self._buried: set[int] = set()

    # Called by other threads.

    def wake(self) -> None:
        """Make the monitor look at everything once."""
        with self._wake_lock:
            if self._wake_fd >= 0:  # else it has ended, and the number may be another file's by now
                os.eventfd_write(self._wake_fd, 1)

    def stop(self, *, kill: bool) -> None:
        """Ask for the end of the group; `ended` tells when it has come.

        Args:
            kill: without giving the workers time to finish.
        """
        self._stop_wanted = True
        self._kill_wanted |= kill
        self.wake()

    def _watch_replies(self, watch: bool) -> None:  # noqa: FBT001 - a switch, and nothing else
        try:
            self._epoll.modify(self._replies_fd, select.EPOLLIN if watch else 0)
        except (OSError, ValueError):  # it has ended
            return

    # The thread.

    def run(self) -> None:
        """Live as long as the group."""
        try:
            self._start_processes()
            while not self._is_over():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - a thread that ended unseen would leave the group alone
            _log.exception("the monitor failed; the group ends")
            self._fail(StepcastError(f"the monitor failed: {error!r}"))
        finally:
            self._clean_up()

    def _turn(self) -> None:
        ready = {fd for fd, _ in self._epoll.poll(self._sleep_s(self._clock()))}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self.group.pump.look()
        dead = self._newly_dead() if self._may_be_dead(ready) else []
        with self.group.lock:
            now = self._clock()
            self.group.publisher.drain_subscriptions()
            for process, stderr in dead:
                self._judge_exit(process, stderr, now)
            self._judge_reports(now)
            self.group.vitals.look(now)
            self._advance(now)
        self.group.give_out()
        self._announce()
        self._straggler.look(now)

    def _start_processes(self) -> None:
        with self.group.lock:
            self.group.change(GroupState.STARTING)
        self._relay.start()
        try:
            processes = self._launcher.launch(self.group.sockets, lambda: self._stop_wanted)
        except StepcastError as error:
            if not self._stop_wanted:  # else it tells only that nobody waits for the group any more
                self._fail(error)
            return
        for process in processes:
            self._relay.add(process)
            if isinstance(process, RemoteProcess):
                process.publish = self.group.control
            if process.sentinel is not None:
                self._epoll.register(process.sentinel, select.EPOLLIN)
                self._sentinels[process.sentinel] = process
            self._unwatched |= process.sentinel is None and process.is_local
        with self.group.lock:
            self.group.processes = processes
            self.group.vitals.watch(processes)

    def _is_over(self) -> bool:
        """Whether every process of a group that is to end has ended, or the last limit has passed."""
        if self.group.state not in (GroupState.FAILED, GroupState.STOPPING):
            return False
        # Not those that have ended, but those whose end was judged: it may be the news of another turn.
        left = [process for process in self.group.processes if process.rank not in self._buried]
        if left and self._escalation.patience_ended:
            _log.error("process %s outlives SIGKILL", ", ".join(str(process.pid) for process in left))
        return not left or self._escalation.patience_ended

    def _may_be_dead(self, ready: set[int]) -> bool:
        if self._unwatched or not ready.isdisjoint(self._sentinels):
            return True
        return not self.group.inbox.said_bye <= self._buried

    def _newly_dead(self) -> list[tuple[WorkerProcess, str]]:
        """Find the processes that have ended, and their last lines on stderr. Waits a little for their last words."""
        left = [process for process in self.group.processes if process.rank not in self._buried]
        for process in left:
            if process.rank in self.group.inbox.said_bye:
                process.said_bye()
        dead = [process for process in left if process.exit_code() is not None]
        # Where one rank's death makes others fail, the one that a signal has killed was first.
        dead.sort(key=lambda process: process.exit_code() or 0)
        for process in dead:
            self._buried.add(process.rank)
            if process.sentinel is not None:
                self._epoll.unregister(process.sentinel)
            if process.exit_code() in (0, EXIT_CODE_UNKNOWN, EXIT_FAILED):
                self._hear_last_words(process.rank)
        return [(process, self._relay.stderr_tail(process.rank, _LAST_WORDS_S)) for process in dead]

    def _hear_last_words(self, rank: int) -> None:
        """The rank has said BYE, or why it ends; its message may be on its way still."""
        inbox = self.group.inbox
        deadline = self._clock() + _LAST_WORDS_S
        poll = select.poll()
        poll.register(self._replies_fd, select.POLLIN)
        self.group.pump.look()
        while not (rank in inbox.broken or rank in inbox.said_bye) and self._clock() < deadline:
            poll.poll(_LAST_WORDS_POLL_MS)
            self.group.pump.look()

    # One turn's work; the group's lock is held.

    def _judge_exit(self, process: WorkerProcess, stderr: str, now: float) -> None:
        group = self.group
        rank, phase = process.rank, str(group.inbox.phase(process.rank))
        silent_for_s = now - group.inbox.liveness[rank].last_heard
        group.inbox.liveness[rank].told(now, Phase.GONE)
        in_good_order = self._terminated or (
            process.exit_code() in (0, EXIT_CODE_UNKNOWN) and rank in group.inbox.said_bye
        )
        if group.state is GroupState.FAILED or self._kill_wanted or in_good_order or rank in group.inbox.broken:
            return  # it was to end, or has said why it does
        if group.state is GroupState.STARTING:
            group.fail(failures.start_lost(process, phase, stderr))
        else:
            group.fail(failures.worker_lost(process, phase, silent_for_s, stderr))

    def _judge_reports(self, now: float) -> None:
        group = self.group
        for rank, broken in group.inbox.take_broken(now, at_once=len(self._buried) == len(group.processes)):
            self._judge_broken(rank, broken)
        if group.inbox.unrecoverable is not None:
            group.fail(group.inbox.unrecoverable)
        if self._parent.has_died():
            group.fail(self._parent.error())

    def _judge_broken(self, rank: int, broken: Broken) -> None:
        if self.group.state is GroupState.STARTING:
            stderr = self._relay.stderr_tail(rank, 0)
            self.group.fail(failures.start_raised(rank, broken.phase, broken.description, stderr))
        else:
            self.group.fail(failures.rank_broken(rank, broken.description))

    def _advance(self, now: float) -> None:
        state = self.group.state
        if self._stop_wanted and state not in (GroupState.STOPPING, GroupState.FAILED):
            self._begin_stopping(now)
        elif state is GroupState.STARTING:
            self._greet(now)
        elif state.accepts_steps:
            self.group.expire(now)
            self._judge_silence(now)
        if (state := self.group.state) in (GroupState.STOPPING, GroupState.FAILED):
            self._end_processes(now)
        is_due = self.group.heartbeat.remaining_s(now, self.group.vitals.oldest_heard) <= 0
        if is_due and state is not GroupState.FAILED:  # while it stops too: STOP may be lost to a rank
            bus = self.group.publisher
            if state.accepts_steps and self._keepalive.heartbeat(bus.sequence, bus.in_flight):
                self.group.publish_to_all(Kind.KEEPALIVE)
            if self.group.control(Kind.HEARTBEAT):
                self.group.vitals.asked(now)
            self.group.heartbeat.sent(now)

    def _judge_silence(self, now: float) -> None:
        lost, self._stuck = self.group.vitals.find_lost(now)
        if lost is not None:
            self.group.fail(lost)

    def _greet(self, now: float) -> None:
        group = self.group
        everyone = self._config.world_size
        if not group.inbox.all_greeted:
            if now >= self._next_probe:
                group.control(Kind.PROBE)
                self._next_probe = now + self._probe_interval_s
                self._probe_interval_s = min(self._probe_interval_s * _PROBE_BACKOFF, _MAX_PROBE_INTERVAL_S)
        elif len(group.inbox.loaded) == everyone and not self._begun:
            self._begun = group.publish_to_all(Kind.BEGIN)
        elif self._begun and group.publisher.in_flight == 0:
            group.change(GroupState.READY)
            return
        if now >= self._start_deadline:
            self._fail_late_start()

    def _fail_late_start(self) -> None:
        group = self.group
        missing = [rank for rank in range(self._config.world_size) if rank not in group.inbox.loaded]
        missing = missing or group.publisher.slow_ranks()
        phases = {rank: phase for rank, phase in group.inbox.phases().items() if rank in missing}
        stderr = {rank: self._relay.stderr_tail(rank, 0) for rank in missing}
        self._stuck = True
        group.fail(failures.start_timed_out(self._config.startup_timeout_s, phases, stderr))

    def _begin_stopping(self, now: float) -> None:
        """STOP, then SIGTERM, then SIGKILL, each with its limit."""
        group = self.group
        orderly = group.state.accepts_steps and not self._kill_wanted and group.publish_to_all(Kind.STOP)
        group.change(GroupState.STOPPING)
        if orderly:
            self._escalation.stop(now)
        else:
            self._kill_wanted = True

    def _end_processes(self, now: float) -> None:
        failed = self.group.state is GroupState.FAILED
        self._stuck |= isinstance(self.group.failure, StepTimeout)
        if (failed or self._kill_wanted) and not self._killing:
            self._killing = True
            dumping = failed and self._stuck and stacks.dump(self.group.processes, self.group.inbox.liveness, now)
            self._escalation.kill(now + (self._config.dump_timeout_s if dumping else 0.0))
        for number in self._escalation.take(now):
            self._terminated = True
            for process in self.group.processes:
                if number is signal.SIGTERM and process.exit_code() is None:
                    _log.warning("rank %d has not stopped in time; sending %s", process.rank, number.name)
                process.send_signal(number)

    # Between the turns.

    def _sleep_s(self, now: float) -> float:
        """Seconds until something is due though nothing comes."""
        with self.group.lock:
            state = self.group.state
            due = [] if (next_at := self._escalation.next_at) is None else [next_at]
            if state is not GroupState.FAILED:
                vitals = self.group.vitals
                due += [now + self.group.heartbeat.remaining_s(now, vitals.oldest_heard), now + MONITOR_LOOK_S]
                due += [] if vitals.look_s is None else [now + vitals.look_s]
                due += [] if (judge_at := self.group.inbox.judge_broken_at()) is None else [judge_at]
            if state is GroupState.STARTING:
                due.append(self._start_deadline)
                due += [] if self.group.inbox.all_greeted else [self._next_probe]
            if state.accepts_steps and (deadline := self.group.pending.next_deadline()) is not None:
                due.append(deadline)
            if self._unwatched:
                due.append(now + _NO_PIDFD_POLL_S)
        return max(0.0, min(due, default=now) - now)

    def _announce(self) -> None:
        if self.group.state.accepts_steps:
            self.started.set()
        elif self.group.failure is not None and self._news is not None:
            self._news.tell(self.group.failure)
            self._news = None

    def _fail(self, error: StepcastError) -> None:
        with self.group.lock:
            self.group.fail(error)
        self.group.give_out()

    def _clean_up(self) -> None:
        group = self.group
        for process in group.processes:
            process.send_signal(signal.SIGKILL)  # of a process that has ended: nothing
        self._announce()
        with group.lock:
            if group.state is not GroupState.FAILED:
                group.pending.fail_all(Closed("the executor was shut down before the step was answered"))
                group.change(GroupState.STOPPED)
        group.give_out()
        self._relay.stop(self._config.linger_s)
        for process in group.processes:
            if process.exit_code() is not None:
                process.close()
        group.close()
        self._launcher.close()
        self._directory.remove()
        self._epoll.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self.on_end()
        self.started.set()
        self.ended.set()
        self._parent.end_process()
        self._parent.close()
