"""How a worker learns that its driver has died."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepcast.workers.death_watch import DriverWatch, process_start_time
from tests.harness import process_has_ended, wait_until

LIMIT_MS = 10_000


@contextmanager
def process(*code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "\n".join(code) or "input()"], stdin=subprocess.PIPE) as started:
        try:
            yield started
        finally:
            started.kill()


def start_time_of(pid: int) -> int:
    start_time = process_start_time(pid)
    assert start_time is not None
    return start_time


def test_a_start_time_is_told_in_ticks_since_boot() -> None:
    """Of this process, a plausible one; it does not change."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    started_s = start_time_of(os.getpid()) / os.sysconf("SC_CLK_TCK")
    assert 0 < started_s <= uptime_s
    assert process_start_time(os.getpid()) == start_time_of(os.getpid())


def test_there_is_none_of_a_process_that_does_not_exist() -> None:
    """Once it has been reaped."""
    with process() as started:
        assert process_start_time(started.pid) is not None
    assert process_start_time(started.pid) is None


def test_a_name_with_brackets_and_spaces_is_no_hindrance() -> None:
    """It stands in the middle of what is read."""
    name = "a) R 1 (b"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        before = start_time_of(started.pid)
        assert started.stdout
        started.stdout.readline()
        assert name in Path(f"/proc/{started.pid}/stat").read_text(encoding="ascii")
        assert process_start_time(started.pid) == before
        started.kill()


def test_a_driver_that_lives_is_not_dead() -> None:
    """Its descriptor is silent."""
    with process() as driver:
        watch = DriverWatch(driver.pid, start_time_of(driver.pid))
        assert not watch.is_dead()
        assert watch.fd is not None
        assert not select.select([watch.fd], [], [], 0)[0]
        watch.close()
        watch.close()


def test_the_descriptor_tells_of_the_death() -> None:
    """At once, whether anybody has reaped the driver or not."""
    with process() as driver:
        watch = DriverWatch(driver.pid, start_time_of(driver.pid))
        assert watch.fd is not None
        poll = select.poll()
        poll.register(watch.fd, select.POLLIN)
        driver.kill()
        assert poll.poll(LIMIT_MS)
        assert process_start_time(driver.pid) is not None, "it was reaped already: this shows nothing"
        assert watch.is_dead()
        driver.wait()
        assert watch.is_dead()
        watch.close()


def test_a_process_with_the_same_id_is_not_the_driver() -> None:
    """Its start time tells: the driver is dead."""
    with process() as other:
        watch = DriverWatch(other.pid, start_time_of(other.pid) - 1)
        assert watch.is_dead()
        watch.close()


def test_a_driver_that_died_before_the_watch_is_dead() -> None:
    """There is nothing to open, and nothing to close."""
    with process() as driver:
        start_time = start_time_of(driver.pid)
    watch = DriverWatch(driver.pid, start_time)
    assert watch.fd is None
    assert watch.is_dead()
    watch.close()


def test_the_start_time_is_enough_where_the_kernel_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is looked up by its id."""

    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with process() as driver:
        watch = DriverWatch(driver.pid, start_time_of(driver.pid))
        assert watch.fd is None
        assert not watch.is_dead()
        driver.kill()
        driver.wait()
        assert watch.is_dead()


def test_the_kernel_ends_a_process_with_the_thread_that_started_it() -> None:
    """Though its code never lets go of the GIL."""
    child = "from stepcast.workers.death_watch import *; die_with_parent_thread(); print(flush=True)\nwhile True: pass"
    code = (
        "import subprocess, sys, threading, time",
        f"started = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)",
        "started.stdout.readline()",
        "print(started.pid, flush=True)",
        "input()",
    )
    command = [sys.executable, "-c", "\n".join(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert not process_has_ended(pid)
        began = time.monotonic()
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: process_has_ended(pid))
        assert time.monotonic() - began < LIMIT_MS / 1000
