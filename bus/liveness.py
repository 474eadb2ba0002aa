"""Heartbeat arithmetic: pure, on a monotonic clock that the caller reads.

Phases are told by the workers; this module only keeps when what was heard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What a rank is doing. The value travels in READY and ALIVE."""

    SPAWNING = 0  # the process was asked for; nothing has come from it
    STARTING = 1  # the boot module runs; no user code yet
    IMPORTING = 2  # the worker's module is being imported
    LOADING = 3  # Worker.setup runs
    IDLE = 4  # parked in the bus, waiting for a message
    STEP = 5  # Worker.execute runs
    CALL = 6  # another method runs
    COLLECTIVE = 7  # inside a collective
    PARKED = 8  # parked inside a broadcast, by choice
    STOPPING = 9  # Worker.teardown runs
    GONE = 10  # the process has ended

    def __str__(self) -> str:
        return self.name.lower()


class HeartbeatTimer:
    """When the next HEARTBEAT is due.

    A step is a question too, and its answer a sign of life: where steps go out and every rank answers, no heartbeat is
    needed. One is due where nothing was published for an interval, and where a rank was not heard for one though steps
    are published all the time.

    Args:
        interval_s: seconds of silence after which one is due.
        now: the monotonic clock's reading.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self._published = now
        self._sent = now

    def published(self, now: float) -> None:
        """Note that a step-class message was published."""
        self._published = now

    def sent(self, now: float) -> None:
        """Note that a heartbeat was published."""
        self._sent = now

    def remaining_s(self, now: float, oldest_heard: float = math.inf) -> float:
        """Seconds until a heartbeat is due; zero or less when it is.

        Args:
            now: the clock's reading.
            oldest_heard: its reading when the rank was heard that has been silent for longest.
        """
        return max(self._sent, min(self._published, oldest_heard)) + self.interval_s - now


@dataclass(slots=True)
class RankLiveness:
    """What the driver last heard of one rank.

    Attributes:
        last_heard: the clock's reading at its last message of any kind.
        phase: the phase it told last.
        phase_since: the clock's reading when it entered the phase, as far as is known.
        sequence: the highest sequence number that it has received.
        step: the id of the step it works on, or worked on last.
    """

    last_heard: float
    phase: Phase = Phase.SPAWNING
    phase_since: float = 0.0
    sequence: int = 0
    step: int = 0

    def heard(self, now: float) -> None:
        """Note that a message of any kind came."""
        self.last_heard = now

    def told(self, now: float, phase: Phase, age_s: float = 0.0) -> None:
        """Note the phase that a message told.

        Args:
            now: the clock's reading.
            phase: the phase.
            age_s: how long the rank had been in it when it sent the message.
        """
        self.last_heard = now
        self.phase = phase
        self.phase_since = now - age_s


class Silence:
    """Whether a rank leaves heartbeats unanswered, counted while the driver was there to hear.

    A rank is silent when two heartbeats, or more, were really sent to it since it was last heard, and it has had one
    and a half intervals for the first of them: it is found within two and a half intervals of its last sign of life.
    The time between two looks counts for half an interval at most: a driver that was stopped itself, or starved,
    condemns nobody when it wakes.

    Args:
        interval_s: the heartbeat interval.
    """

    _ENOUGH_HEARTBEATS = 2
    _ENOUGH_INTERVALS = 1.5
    _LONGEST_LOOK_INTERVALS = 0.5

    def __init__(self, interval_s: float) -> None:
        self._enough_s = self._ENOUGH_INTERVALS * interval_s
        self._asked_at: float | None = None
        #: The clock's reading at the last look.
        self.looked_at = 0.0
        #: The longest that the driver may leave between two looks and miss nothing, in seconds.
        self.look_s = self._LONGEST_LOOK_INTERVALS * interval_s
        #: Heartbeats sent since the rank was last heard.
        self.unanswered = 0
        #: Seconds since the first of them, as far as they count.
        self.silent_s = 0.0

    def asked(self, now: float, last_heard: float) -> None:
        """Note that a heartbeat was sent.

        Args:
            now: the clock's reading.
            last_heard: its reading when the rank was last heard.
        """
        self.look(now, last_heard)
        if self._asked_at is None:
            self._asked_at = self.looked_at = now
        self.unanswered += 1

    def look(self, now: float, last_heard: float) -> None:
        """Count the time since the last look, once everything that has come was read.

        Args:
            now: the clock's reading.
            last_heard: its reading when the rank was last heard.
        """
        if self._asked_at is None:
            return
        if last_heard >= self._asked_at:
            self._asked_at = None
            self.unanswered = 0
            self.silent_s = 0.0
            return
        self.silent_s += min(now - self.looked_at, self.look_s)
        self.looked_at = now

    @property
    def is_silent(self) -> bool:
        """Whether the rank was silent at the last look."""
        return self.unanswered >= self._ENOUGH_HEARTBEATS and self.silent_s >= self._enough_s


class TailGap:
    """Finds out that the last published message never arrived.

    Steps and heartbeats come over different sockets, so one heartbeat that is ahead of the steps proves nothing. Two in
    a row, between which an idle loop has received nothing, do, if time has passed between them: a process that was
    stopped finds several in its queue at once, and the step in another one.

    Args:
        grace_s: how long a message may be on its way after the first heartbeat that is ahead of it, in seconds. Zero
            where a false alarm does no harm.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._suspect: int | None = None
        self._since = 0.0

    def heartbeat(self, highest: int, received: int, *, idle: bool, now: float = 0.0) -> bool:
        """Judge one heartbeat.

        Args:
            highest: the highest sequence number published, as the heartbeat says.
            received: the highest that this rank's loop has received.
            idle: whether the loop is parked on its step socket.
            now: the clock's reading; not needed without a grace.

        Returns:
            True where the messages from `received` + 1 on must be asked for again.
        """
        if not idle or received >= highest:
            self._suspect = None
            return False
        if self._suspect != received:
            self._suspect = received
            self._since = now
            return False
        return now - self._since >= self._grace_s
