"""What the kernel says of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from stepcast.bus.verdicts import Activity
from stepcast.runtime.procfs import Sample, activity, cores, describe, read
from tests.harness import wait_until


def samples(states: str, cpu_s: float = 0.0, queued_s: float = 0.0) -> list[Sample]:
    """A second between the first and the last, in which the processor times were used and waited for."""
    last = max(1, len(states) - 1)
    return [
        Sample(i / last, state, cpu_s * i / last, queued_s * i / last, state == "R") for i, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([], None),
        (samples("S"), None),
        (samples("T"), Activity.STOPPED),
        (samples("RRt", 0.5), Activity.STOPPED),
        (samples("RRR", 0.98), Activity.RUNS),
        (samples("SSS", 1.7), Activity.RUNS),  # its other threads
        (samples("RRR", 0.02), Activity.STARVED),
        (samples("SRS", 0.02, 0.9), Activity.STARVED),
        (samples("SSS", 0.02, 0.01), Activity.WAITS),
        (samples("DDD"), Activity.WAITS),
        (samples("TSS"), Activity.WAITS),
    ],
)
def test_activity(taken: list[Sample], expected: Activity | None) -> None:
    """The state first, then the progress, then the wait for a processor."""
    assert activity(taken) is expected


def test_a_process_is_starved_where_any_of_its_threads_is() -> None:
    """The one that should answer is not the main thread."""
    starved = [Sample(at, "S", 0.0, 0.0, True) for at in (0.0, 1.0)]
    assert activity(starved) is Activity.STARVED
    assert activity([starved[0], Sample(1.0, "S", 0.0, 0.0, False)]) is Activity.WAITS


def test_descriptions_say_what_to_do() -> None:
    """For people."""
    assert describe(samples("T"), 7) == "stopped by a signal (SIGSTOP; state T): kill -CONT 7 lets it go on"
    assert describe(samples("tt"), 7) == "held by a debugger (state t): detach it"
    assert describe(samples("RR", 0.98), 7) == "runs native code that holds the GIL (state R, 0.98 of a core)"
    assert describe(samples("RR", 0.05), 7).startswith("descheduled: it wants to run and gets 0.05 of a core (state R)")
    assert describe(samples("DD"), 7).startswith("waits in the kernel (state D, 0.00 of a core)")
    assert describe([], 7) == "the kernel does not tell what it does"


def test_a_process_that_is_not_there_gives_no_sample() -> None:
    """No error: it may just have ended."""
    assert read(2**22 + 1, 0.0) is None


def test_this_process_has_used_what_it_has_used() -> None:
    """To the tick."""
    sample = read(os.getpid(), 5.0)
    assert sample is not None
    assert (sample.at, sample.queued_s >= 0, sample.runnable) == (5.0, True, True)
    assert abs(sample.cpu_s - time.process_time()) < 1.0
    assert cores([sample]) == 0.0


def test_a_stopped_process_is_seen_so_whatever_its_name() -> None:
    """The command's name may hold brackets and spaces."""
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') T 1 (x', 0, 0, 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def state() -> str:
            sample = read(process.pid, 0.0)
            assert sample is not None
            return sample.state

        wait_until(lambda: state() == "S")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state() == "T")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: state() == "S")
        process.kill()
