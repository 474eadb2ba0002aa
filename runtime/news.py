"""Tells the embedder that a group has failed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from stepcast.bus.errors import StepcastError

_log = logging.getLogger("stepcast.runtime")


class FailureNews:
    """Calls the embedder's `on_failure` callbacks, failure by failure, in a thread of their own.

    They may take as long as they like, run a step, or shut the executor down: nothing of the group waits for them. The
    thread is started by a failure, and ends when all have been told.

    Attributes:
        callbacks: the embedder's; what they raise is logged.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callable[[StepcastError], None]] = []
        self._lock = threading.Lock()
        self._untold: deque[StepcastError] = deque()
        self._thread: threading.Thread | None = None

    def tell(self, failure: StepcastError) -> None:
        """Tell of a failure, after those before it. Returns at once.

        Args:
            failure: the error that has ended a group.
        """
        if not self.callbacks:
            return
        with self._lock:
            self._untold.append(failure)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._tell_all, name="stepcast-on-failure", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is on its way out: late is better than never
            self._tell_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until all have been told; not in a callback.

        Args:
            timeout_s: the longest to wait: a callback may take for ever.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.ident is not None:
            thread.join(timeout_s)

    def _tell_all(self) -> None:
        while True:
            with self._lock:
                if not self._untold:
                    self._thread = None
                    return
                failure = self._untold.popleft()
            for callback in tuple(self.callbacks):
                try:
                    callback(failure)
                except Exception:  # noqa: BLE001 - the embedder's
                    _log.exception("an on_failure callback raised")
