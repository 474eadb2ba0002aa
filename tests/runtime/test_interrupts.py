"""A thread that waits does not miss a Ctrl-C."""

from __future__ import annotations

import threading

from stepcast.runtime import interrupts


class Watched(threading.Event):
    """Notes how long each wait may take; comes at the given one."""

    def __init__(self, comes_at: int | None = None) -> None:
        super().__init__()
        self.limits: list[float | None] = []
        self._comes_at = comes_at

    def wait(self, timeout: float | None = None) -> bool:
        self.limits.append(timeout)
        return super().wait(0.0) or len(self.limits) == self._comes_at


def test_no_single_wait_is_long() -> None:
    """A signal that comes just before a wait is handled after it."""
    event = Watched(comes_at=5)
    assert interrupts.wait(event, 600.0)
    assert len(event.limits) == 5
    assert all(limit is not None and limit <= 0.1 for limit in event.limits)


def test_the_whole_wait_has_its_limit() -> None:
    """An event that does not come is not waited for any longer."""
    assert not interrupts.wait(threading.Event(), 0.05)
    assert interrupts.wait(Watched(comes_at=1), 0.0)
