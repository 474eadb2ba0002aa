"""Who reads the replies.

A thread that waits for an answer reads the replies itself, blocked in ZeroMQ: each hop to another thread costs more
than the rest of the step. While nobody waits, the monitor reads them. A second thread that waits lets the first one
read for it, and reads itself once that one has what it waited for: the monitor may be in a callback of the embedder's.

The reply socket belongs to whoever holds `_reading`. It is *armed* when all that had come was read and the monitor
watches its descriptor. A waiting thread disarms it, and leaves it so where nobody else waits for an outcome: a loop of
steps pays for that once, not at each step. What comes meanwhile (a slow rank's answer) lies until the next step, or the
monitor's next look, at most `MONITOR_LOOK_S` later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from typing import Protocol

from stepcast.bus.replies import Reply, ReplyReader

#: How long a reply may lie unread while nobody waits for it.
MONITOR_LOOK_S = 0.5


class Goal(Protocol):
    """What a thread waits for."""

    @property
    def settled(self) -> bool:
        """Whether it has come."""


class Reading(Protocol):
    """What is done with the replies."""

    @property
    def outcomes(self) -> Sized:
        """The outcomes that are to be given out."""

    @property
    def under_way(self) -> Sized:
        """The messages that wait for answers."""

    def answers_wanted(self) -> int:
        """How many answers are of use only together: what waits for them needs all."""

    def take(self, replies: Sequence[Reply]) -> None:
        """Take replies, or none where a limit may have passed."""

    def next_deadline(self) -> float | None:
        """The clock's reading at which `take` must be called though nothing comes."""

    def has_waiting(self) -> bool:
        """Whether an outcome is wanted that is not known yet."""

    def give_out(self) -> None:
        """Give out the outcomes that are known. Their callbacks are the embedder's, and may wait for a step."""

    def clock(self) -> float:
        """A monotonic clock, in seconds."""


class Pump:
    """Lets one thread at a time read the replies.

    Args:
        replies: the reply socket.
        reading: what is done with the replies.
        watch: has the monitor watch the socket's descriptor, or not.
        wake_monitor: makes the monitor look at everything once.
    """

    def __init__(
        self,
        replies: ReplyReader,
        reading: Reading,
        *,
        watch: Callable[[bool], None],
        wake_monitor: Callable[[], None],
    ) -> None:
        self._replies = replies
        self._handler = reading
        self._watch = watch
        self._wake_monitor = wake_monitor
        self._reading = threading.Lock()
        #: Threads that wait while another one reads: set for the one whose turn it is.
        self._turns: deque[threading.Event] = deque()
        self._armed = False
        self._closed = False

    def read_until(self, goal: Goal, deadline: float | None) -> bool:
        """Read in this thread until something is settled.

        Args:
            goal: what is waited for.
            deadline: the clock's reading at which to give up.

        Returns:
            False where another thread reads: see `read_in_turn`.
        """
        while self._reading.acquire(blocking=False):
            try:
                over = self._read(goal, deadline)
            except BaseException:
                self._wake_monitor()  # it gives out what is known
                raise
            finally:
                self._leave()
            self._handler.give_out()
            if over or goal.settled:
                return True
        return False

    def read_in_turn(self, goal: Goal, deadline: float | None, turn: threading.Event) -> None:
        """Wait until something is settled while another thread reads, and read from when it ceases to.

        Args:
            goal: what is waited for.
            deadline: the clock's reading at which to give up.
            turn: set by whoever settles the goal.
        """
        while not (self.read_until(goal, deadline) or goal.settled):
            left_s = None if deadline is None else deadline - self._handler.clock()
            if left_s is not None and left_s <= 0:
                return
            turn.clear()
            self._turns.append(turn)
            try:
                # Looked at after it stands in line: who leaves looks at the line after that.
                if self._reading.locked() and not goal.settled:
                    turn.wait(left_s)
            except BaseException:
                self._give_turn()  # it may have been this one's
                raise
            finally:
                with suppress(ValueError):
                    self._turns.remove(turn)

    def look(self) -> None:
        """Read all that has come, without waiting, and arm the socket; unless a waiting thread reads. The monitor's."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._drain_and_arm()
        finally:
            self._reading.release()
            self._give_turn()
        self._handler.give_out()

    def attend(self) -> None:
        """See to it that somebody reads: called where an outcome is wanted that this thread does not wait for."""
        if not (self._armed or self._reading.locked()):
            self._wake_monitor()

    def wake(self) -> None:
        """Have the thread that reads ask again whether it is done."""
        if self._reading.locked():
            self._replies.wake()

    def close(self, timeout_s: float) -> None:
        """Let no thread read any more. All outcomes have been given out.

        Args:
            timeout_s: the longest to wait for a thread that reads: it may be in a callback of the embedder's.
        """
        self._closed = True
        self._replies.wake()
        self._reading.acquire(timeout=timeout_s)

    def _read(self, goal: Goal, deadline: float | None) -> bool:
        """Read until it is settled, or given up, or until there is an outcome to give out. Returns False for that."""
        if self._armed:
            self._watch(False)
            self._armed = False
        handler = self._handler
        receive, take, outcomes = self._replies.receive, handler.take, handler.outcomes
        wait_s = self._wait_s(deadline)
        while not (goal.settled or self._closed):
            if outcomes:
                return False
            replies = receive(wait_s, handler.answers_wanted(), handler.under_way)
            take(replies)
            if not replies or deadline is not None:
                # Else it still holds well enough: limits only come nearer by a failure, which wakes the monitor.
                if deadline is not None and handler.clock() >= deadline:
                    break
                wait_s = self._wait_s(deadline)
        return True

    def _wait_s(self, deadline: float | None) -> float:
        now = self._handler.clock()
        wait_until = self._handler.next_deadline()
        if deadline is not None:
            wait_until = deadline if wait_until is None else min(wait_until, deadline)
        return MONITOR_LOOK_S if wait_until is None else min(max(0.0, wait_until - now), MONITOR_LOOK_S)

    def _leave(self) -> None:
        try:
            if self._handler.has_waiting():
                self._drain_and_arm()
        finally:
            self._reading.release()
            if self._turns:
                self._give_turn()
        # Asked again: who has published since then saw this thread still reading, and left it to it.
        if not self._armed and self._handler.has_waiting():
            self._wake_monitor()

    def _give_turn(self) -> None:
        with suppress(IndexError):
            self._turns.popleft().set()

    def _drain_and_arm(self) -> None:
        while not self._closed and (reply := self._replies.read()) is not None:
            self._handler.take((reply,))
        if not (self._armed or self._closed):
            self._armed = True
            self._watch(True)
