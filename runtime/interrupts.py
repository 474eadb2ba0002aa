"""Ctrl-C: held back for a moment, and not missed by a thread that waits."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

#: A signal that comes just before its thread blocks does not wake it: Python looks for one this often.
_LOOK_S = 0.1


def wait(event: threading.Event, timeout_s: float) -> bool:
    """Wait for an event; a Ctrl-C that comes meanwhile is handled within a tenth of a second.

    Args:
        event: the event.
        timeout_s: the longest to wait.

    Returns:
        Whether it has come.
    """
    deadline = time.monotonic() + timeout_s
    while not event.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True


class HeldInterrupts:
    """Holds a Ctrl-C back from now until `release`, which hands it to the embedder's own handler.

    For the moments in which processes are started and nobody has them in hand yet. In what Python runs after a fork, on
    either side of it, a KeyboardInterrupt would even be reported and forgotten.

    Does nothing in a thread that gets no signals, or where the handler is not one of Python's.
    """

    def __init__(self) -> None:
        self._came: list[FrameType | None] = []
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)

    def release(self) -> None:
        """Let interrupts through again, first of all one that has come meanwhile. Safe to call again."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        if self._came:
            handler(signal.SIGINT, self._came[0])

    def _hold(self, _number: int, frame: FrameType | None) -> None:
        self._came.append(frame)
