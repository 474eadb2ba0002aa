"""How long a thread was kept from a processor."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepcast.workers import run_queue
from stepcast.workers.run_queue import RunQueue
from tests.harness import busy_process

SPIN_S = 0.3


def spin(*, processor: int) -> tuple[int, int]:
    """Use that one processor for a while; returns what the thread has waited for it, and the time that has passed."""
    os.sched_setaffinity(0, {processor})  # of this thread alone
    with RunQueue() as queue:
        began = time.monotonic_ns()
        while time.monotonic_ns() < began + SPIN_S * 1e9:
            pass
        elapsed_ns = time.monotonic_ns() - began
        return queue.waited_ns(), elapsed_ns


def test_a_thread_that_shares_its_processor_has_waited_for_it() -> None:
    processor = min(os.sched_getaffinity(0))
    with busy_process(processor), ThreadPoolExecutor(1) as thread:
        waited_ns, elapsed_ns = thread.submit(spin, processor=processor).result()
    assert elapsed_ns // 10 < waited_ns <= elapsed_ns


def test_what_was_told_is_not_told_again() -> None:
    with RunQueue() as queue:
        queue._before_ns -= 10**12
        assert queue.waited_ns() >= 10**12
        assert queue.waited_ns() < 10**12


def test_a_kernel_that_does_not_count_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(run_queue.os, "open", absent)
    with RunQueue() as queue:
        assert queue.waited_ns() == 0
