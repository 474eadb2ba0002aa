"""What the loop thread is doing, for the responder thread to tell."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from stepcast.bus.liveness import Phase

#: How many of the last collectives are told: ranks are seldom further apart.
_TRAIL = 8
#: The tally before the first collective of a message: the time waited, the count, the fingerprint.
NO_COLLECTIVES = (0, 0, 0)


class Status(NamedTuple):
    """One moment of the loop thread.

    Attributes:
        phase: what it does.
        since_ns: CLOCK_MONOTONIC when that began.
        sequence: the last message it took from the step stream.
        step: that message's step id.
    """

    phase: Phase
    since_ns: int
    sequence: int
    step: int


class Board:
    """Written by the loop thread alone, read by the responder: each update replaces one tuple, so no lock is needed.

    Attributes:
        aborted: ids of steps that the embedder has aborted, added by the responder.
        tally: nanoseconds waited in collectives for this message, how many were entered, and their fingerprint.
        trail: the last collectives: the message's sequence number, count, fingerprint, description.
    """

    def __init__(self) -> None:
        #: phase, since_ns, sequence, step, as in `Status`: plain, since the loop replaces it twice in each step.
        self.moment = (Phase.STARTING, time.monotonic_ns(), 0, 0)
        self.aborted: set[int] = set()
        self._resumed = 0
        self._resume = threading.Condition()
        self.tally = NO_COLLECTIVES
        self.trail: deque[tuple[int, int, int, str]] = deque(maxlen=_TRAIL)

    @property
    def status(self) -> Status:
        """The current moment."""
        return Status(*self.moment)

    def enter(self, phase: Phase) -> None:
        """Enter a phase, on the same message as before."""
        _, _, sequence, step = self.moment
        self.moment = (phase, time.monotonic_ns(), sequence, step)

    def collectives(self, sequence: int) -> list[tuple[int, int, str]]:
        """The last collectives entered for a message: count, fingerprint and description, the newest first.

        Args:
            sequence: the message's sequence number.
        """
        try:
            trail = list(self.trail)
        except RuntimeError:  # the loop thread has just added one: the next heartbeat will ask again
            return []
        return [entry[1:] for entry in reversed(trail) if entry[0] == sequence]

    def resume(self, step: int) -> None:
        """Note that every rank has answered a step that failed. The responder's.

        Args:
            step: its id.
        """
        with self._resume:
            self._resumed = max(self._resumed, step)
            self._resume.notify_all()

    def wait_for_resume(self, step: int, timeout_s: float) -> bool:
        """Wait until every rank has answered a step that failed here.

        Args:
            step: its id.
            timeout_s: the longest to wait, in seconds.

        Returns:
            False where the time passed.
        """
        with self._resume:
            return self._resume.wait_for(lambda: self._resumed >= step, timeout_s)

    def is_aborted(self, step: int) -> bool:
        """Tell whether the embedder has aborted a step."""
        return step in self.aborted

    def forget_aborts(self, step: int) -> None:
        """Forget the aborts of steps that this rank is done with.

        Args:
            step: the id of the step just answered.
        """
        for aborted in tuple(self.aborted):
            if aborted <= step:
                self.aborted.discard(aborted)
