"""What the kernel says of a process that does not answer, by /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepcast.bus.verdicts import Activity
from stepcast.workers.death_watch import stat_fields

#: Places in `stat_fields`.
_STATE, _UTIME, _STIME = 0, 11, 12
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Less of a processor than this is no progress: threads of ZeroMQ's, or a poll now and then, take some as well.
_PROGRESS_CORES = 0.1
#: Who waits for a processor for this share of the time is kept from it.
_STARVED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one moment.

    Attributes:
        at: the monotonic clock's reading, in seconds.
        state: its main thread's state, a letter of proc(5): R, S, D, T, t, Z.
        cpu_s: processor seconds that all of its threads have used.
        queued_s: seconds that its main thread has waited for a processor; 0 where the kernel does not count them.
        runnable: whether any of its threads runs, or waits for a processor: the one that should answer may be starved.
    """

    at: float
    state: str
    cpu_s: float
    queued_s: float
    runnable: bool


def read(pid: int, now: float) -> Sample | None:
    """Take a sample.

    Args:
        pid: the process's id.
        now: the monotonic clock's reading.

    Returns:
        The sample; None where there is no such process, or no /proc.
    """
    try:
        fields = stat_fields(Path(f"/proc/{pid}"))
    except OSError:
        return None
    cpu_s = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    return Sample(now, fields[_STATE], cpu_s, _queued_s(pid), _is_runnable(pid))


def activity(samples: Sequence[Sample]) -> Activity | None:
    """Tell what a process is doing.

    Args:
        samples: samples of it, the oldest first.

    Returns:
        What it does; None where they are too few to tell.
    """
    if not samples:
        return None
    if samples[-1].state in "Tt":
        return Activity.STOPPED
    first, last = samples[0], samples[-1]
    elapsed_s = last.at - first.at
    if elapsed_s <= 0:
        return None
    if cores(samples) >= _PROGRESS_CORES:
        return Activity.RUNS
    if (last.queued_s - first.queued_s) / elapsed_s >= _STARVED_SHARE or all(each.runnable for each in samples):
        return Activity.STARVED
    return Activity.WAITS


def cores(samples: Sequence[Sample]) -> float:
    """Tell how many processors a process has kept busy between the first sample and the last."""
    elapsed_s = samples[-1].at - samples[0].at
    return (samples[-1].cpu_s - samples[0].cpu_s) / elapsed_s if elapsed_s > 0 else 0.0


def describe(samples: Sequence[Sample], pid: int) -> str:
    """Put what a process is doing into words.

    Args:
        samples: samples of it, the oldest first.
        pid: its id.
    """
    doing = activity(samples)
    if doing is None:
        return "the kernel does not tell what it does"
    state, used = samples[-1].state, f"{cores(samples):.2f} of a core"
    if doing is Activity.STOPPED:
        if state == "t":
            return "held by a debugger (state t): detach it"
        return f"stopped by a signal (SIGSTOP; state T): kill -CONT {pid} lets it go on"
    if doing is Activity.RUNS:
        return f"runs native code that holds the GIL (state {state}, {used})"
    if doing is Activity.STARVED:
        return f"descheduled: it wants to run and gets {used} (state {state}): the host is short of processors"
    held = "its cgroup is frozen, or it holds the GIL"
    return f"waits in the kernel (state {state}, {used}): {held}; see /proc/{pid}/stack or its stacks (SIGUSR1)"


def _is_runnable(pid: int) -> bool:
    try:
        return any(stat_fields(thread)[_STATE] == "R" for thread in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it, or one of its threads, has just ended
        return False


def _queued_s(pid: int) -> float:
    try:
        _, queued_ns, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(queued_ns) / 1e9
