"""Heartbeat arithmetic: pure, on a monotonic clock that the caller reads.

Phases are told by the workers; this module only keeps when what was heard.
"""

from __future__ import annotations

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

    Args:
        interval_s: seconds of silence after which one is due.
        now: the monotonic clock's reading.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self._last = now

    def published(self, now: float) -> None:
        """Note that something was published, so that the ranks need no heartbeat for an interval."""
        self._last = now

    def remaining_s(self, now: float) -> float:
        """Seconds until a heartbeat is due; zero or less when it is."""
        return self._last + self.interval_s - now


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
