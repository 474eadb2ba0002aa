"""How processes are ended: SIGTERM, then SIGKILL, each with its limit. Pure: sends nothing, and reads no clock."""

from __future__ import annotations

import signal

from .config import ExecutorConfig


class Escalation:
    """What is to be sent to the processes that are left, and when.

    Args:
        config: the settings.

    Attributes:
        patience_ended: nothing more is sent, and nobody is waited for any longer.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._due: list[tuple[float, signal.Signals | None]] = []  # None is the end of patience
        self.patience_ended = False

    @property
    def next_at(self) -> float | None:
        """When something is due next; None where nothing is."""
        return self._due[0][0] if self._due else None

    def stop(self, now: float) -> None:
        """The ranks have been told to stop.

        Args:
            now: the clock's reading.
        """
        terminate_at = now + self._config.stop_timeout_s
        self.kill(terminate_at + self._config.terminate_timeout_s)
        self._due.insert(0, (terminate_at, signal.SIGTERM))

    def kill(self, at: float) -> None:
        """The ranks are to be killed; whatever was to be sent before is not.

        Args:
            at: the clock's reading when they are.
        """
        self._due = [(at, signal.SIGKILL), (at + self._config.kill_timeout_s, None)]

    def take(self, now: float) -> list[signal.Signals]:
        """Take out what is to be sent.

        Args:
            now: the clock's reading.

        Returns:
            The signals, in order.
        """
        signals = []
        while self._due and self._due[0][0] <= now:
            _, number = self._due.pop(0)
            if number is None:
                self.patience_ended = True
            else:
                signals.append(number)
        return signals
