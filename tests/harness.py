"""What tests share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent

_POLL_INTERVAL_S = 0.01

Truthy = TypeVar("Truthy")


def wait_until(
    predicate: Callable[[], Truthy], timeout_s: float = 10.0, message: str | Callable[[], str] = "the condition to hold"
) -> Truthy:
    """Wait for a condition, and no longer than it takes.

    Args:
        predicate: the condition.
        timeout_s: the limit.
        message: what is waited for, or a function that tells what is the case instead.

    Returns:
        The predicate's value, which is true.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            told = message if isinstance(message, str) else message()
            raise AssertionError(f"waited {timeout_s:g} s for {told}")
        time.sleep(_POLL_INTERVAL_S)
    return value


_BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy_process(processor: int) -> Iterator[None]:
    """A process that takes all that it gets of one processor."""
    with subprocess.Popen([sys.executable, "-c", _BUSY, str(processor)], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            yield
        finally:
            busy.kill()


def process_has_ended(pid: int) -> bool:
    """Tell whether a process has ended; one that waits to be reaped by its parent has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
