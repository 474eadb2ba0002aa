"""The errors that end a group, or keep a step out of it, put into words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence

from stepcast.bus.errors import (
    Backpressure,
    Closed,
    ProtocolError,
    StartupError,
    StepcastError,
    StepFailed,
    StepTimeout,
    WorkerLost,
)
from stepcast.workers.responder import EXIT_LINK_LOST

from .config import ExecutorConfig
from .launch.process import EXIT_CODE_UNKNOWN, WorkerProcess
from .state import GroupState
from .step import Limit


def add(error: StepcastError, words: str) -> None:
    """Add to an error's text what its author could not know.

    Args:
        error: the error.
        words: what follows its text; where that has several lines, such as a traceback, on a line of its own.
    """
    text = str(error)
    error.args = (f"{text}\n\n{words[0].upper()}{words[1:]}" if "\n" in text else f"{text}: {words}",)


def ends_group(error: StepcastError, *, restarted: bool) -> None:
    """Have the error that ends a group tell what becomes of it, and whether its steps are worth another try.

    Args:
        error: the error.
        restarted: whether another epoch takes the group's place.
    """
    error.retryable = restarted
    if not isinstance(error, Closed):  # which is no failure of the group's, and says itself why it ends
        add(error, "the group is being restarted" if restarted else "the group has ended; start a new executor")


def describe_exit(exit_code: int | None) -> str:
    """Put an exit code into words.

    Args:
        exit_code: the code, negative for a signal.
    """
    if exit_code is None:
        return "has ended"
    if exit_code >= 0:
        why = " (its connection to the driver has ended, and did not come back)" if exit_code == EXIT_LINK_LOST else ""
        return f"exited with code {exit_code}{why}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"was killed by {name}"


def worker_lost(process: WorkerProcess, phase: str, silent_for_s: float, stderr: str) -> WorkerLost:
    """A worker's process has ended.

    Args:
        process: the process.
        phase: what it was doing.
        silent_for_s: seconds since its last message.
        stderr: its last lines on stderr.
    """
    exit_code = _known_exit_code(process)
    return _lost(
        process,
        f"{describe_exit(exit_code)} while in phase {phase}, "
        f"{silent_for_s:.2f} s after its last message{process.circumstances()}"
        f"{_last_lines(process.rank, stderr)}",
        phase,
        silent_for_s,
        exit_code,
    )


def unresponsive(process: WorkerProcess, phase: str, silent_for_s: float, limit_s: float, reason: str) -> WorkerLost:
    """A worker's process lives, and has been stopped or unresponsive for too long.

    Args:
        process: the process.
        phase: what it was doing.
        silent_for_s: seconds for which it has answered no heartbeat.
        limit_s: the limit.
        reason: how it is doing, in words.
    """
    return _lost(
        process,
        f"has answered no heartbeat for {silent_for_s:.2f} s, over "
        f"unresponsive_timeout_s={limit_s:g} s, in phase {phase}: {reason}; the stacks of all ranks are in the "
        "log",
        phase,
        silent_for_s,
    )


def absent(process: WorkerProcess, phase: str, silent_for_s: float, absent_s: float) -> WorkerLost:
    """The connection of a rank on another host has ended, and has not come back.

    Args:
        process: the process.
        phase: what it was doing.
        silent_for_s: seconds since its last message.
        absent_s: seconds since the connection ended.
    """
    return _lost(
        process,
        f"has gone while in phase {phase}: its connection ended {absent_s:.2f} s "
        "ago, as its process or its host does, and did not come back; look there why",
        phase,
        silent_for_s,
    )


def silent(process: WorkerProcess, phase: str, silent_for_s: float, limit_s: float) -> WorkerLost:
    """A rank on another host has not been heard for too long.

    Args:
        process: the process.
        phase: what it was doing, as far as is known.
        silent_for_s: seconds for which it has answered no heartbeat.
        limit_s: the limit.
    """
    return _lost(
        process,
        f"is lost: it has answered no heartbeat for {silent_for_s:.2f} s, over "
        f"lost_timeout_s={limit_s:g} s, in phase {phase}: the link or the host is down, or native code there holds the "
        "interpreter's lock; look at both",
        phase,
        silent_for_s,
    )


def _lost(
    process: WorkerProcess, what: str, phase: str, silent_for_s: float, exit_code: int | None = None
) -> WorkerLost:
    return WorkerLost(
        f"rank {process.rank} ({process.place}) {what}",
        rank=process.rank,
        pid=process.pid,
        exit_code=exit_code,
        phase=phase,
        silent_for_s=silent_for_s,
    )


def rank_broken(rank: int, description: Sequence[str]) -> StepFailed:
    """A rank raised outside a step, so that it has left its loop.

    Args:
        rank: the rank.
        description: the exception's type, text and traceback.
    """
    exception_type, text, trace = description
    return StepFailed(
        f"rank {rank} failed outside a step: {exception_type}: {text}\n\nrank {rank}: {trace}",
        step=0,
        rank=rank,
        exception_type=exception_type,
        traceback=trace,
        epoch_ended=True,
    )


def start_raised(rank: int, phase: str, description: Sequence[str], stderr: str) -> StartupError:
    """A rank raised while it was starting.

    Args:
        rank: the rank.
        phase: where it was.
        description: the exception's type, text and traceback.
        stderr: its last lines on stderr.
    """
    exception_type, text, trace = description
    doing = {"importing": "importing the worker's class", "loading": "the worker's setup()"}.get(phase, phase)
    return StartupError(
        f"rank {rank} failed in {doing}: {exception_type}: {text}: correct it\n\n"
        f"rank {rank}: {trace}{_last_lines(rank, stderr)}",
        ranks=[rank],
        phases={rank: phase},
        stderr={rank: stderr},
    )


def not_started(rank: int, problem: Exception, remedy: str) -> StartupError:
    """A rank's process can't be started.

    Args:
        rank: the rank.
        problem: why.
        remedy: what to do.
    """
    return StartupError(
        f"the workers' processes can't be started: rank {rank}: {problem}: {remedy}",
        ranks=[rank],
        phases={rank: "spawning"},
    )


def start_lost(process: WorkerProcess, phase: str, stderr: str) -> StartupError:
    """A rank's process ended while it was starting.

    Args:
        process: the process.
        phase: the last phase it told.
        stderr: its last lines on stderr.
    """
    rank, exit_code = process.rank, _known_exit_code(process)
    return StartupError(
        f"rank {rank} ({process.place}) {describe_exit(exit_code)} while {phase}, before it was ready"
        f"{process.circumstances()}: look at its last lines{_last_lines(rank, stderr)}",
        ranks=[rank],
        phases={rank: phase},
        exit_codes={} if exit_code is None else {rank: exit_code},
        stderr={rank: stderr},
    )


def start_timed_out(limit_s: float, phases: Mapping[int, str], stderr: Mapping[int, str]) -> StartupError:
    """Some ranks were not ready within the start-up limit.

    Args:
        limit_s: the limit.
        phases: the phase that each missing rank has reached.
        stderr: their last lines on stderr.
    """
    missing = ", ".join(f"rank {rank} ({phase})" for rank, phase in phases.items())
    lines = "".join(_last_lines(rank, text) for rank, text in stderr.items())
    return StartupError(
        f"not ready within startup_timeout_s={limit_s:g} s: {missing}: raise the limit where they are only slow; their "
        f"stacks are in the log{lines}",
        ranks=list(phases),
        phases=phases,
        stderr=stderr,
    )


def back_pressure(slow: Sequence[int], queued: int, queued_bytes: int, config: ExecutorConfig) -> Backpressure:
    """There was no room in the windows.

    Args:
        slow: the ranks that hold them up.
        queued: messages under way.
        queued_bytes: their bytes.
        config: the settings.
    """
    return Backpressure(
        f"no room for another step within backpressure_timeout_s={config.backpressure_timeout_s:g} s: {queued} of "
        f"max_in_flight={config.max_in_flight} messages and {queued_bytes} of "
        f"max_in_flight_bytes={config.max_in_flight_bytes} bytes wait for rank {_join(slow)}; nothing was published: "
        "submit less, or raise the window",
        slow_ranks=slow,
        queued=queued,
        queued_bytes=queued_bytes,
        limit=config.max_in_flight,
        limit_bytes=config.max_in_flight_bytes,
    )


def check_process(pid: int) -> None:
    """Refuse to use an executor in a fork of the process that has started it: the sockets are its parent's.

    Args:
        pid: the process that has started it.

    Raises:
        Closed: this is another one.
    """
    if os.getpid() != pid:
        raise Closed(
            f"the executor belongs to process {pid}, of which this one ({os.getpid()}) is a fork: use it there, or "
            "start another one here"
        )


def closed(state: GroupState, failure: StepcastError | None) -> Closed:
    """The group takes no steps.

    Args:
        state: the group's state.
        failure: the error that has ended it; the cause of this one.
    """
    if failure is None:
        return Closed(f"the executor takes no steps: it is {state.value}")
    error = Closed(f"the group has failed. The failure: {failure}")
    error.__cause__ = failure
    return error


def restarting(limit_s: float, failure: StepcastError | None) -> Closed:
    """The group is being restarted, and a submission has waited long enough.

    Args:
        limit_s: how long it has waited.
        failure: the error that has ended the epoch before; the cause of this one.
    """
    error = Closed(f"the group is being restarted, and was not ready within restart_wait_s={limit_s:g} s: try again")
    error.retryable = True
    error.__cause__ = failure
    return error


def restart_outlasts(name: str, limit: Limit, failure: StepcastError | None) -> StepTimeout:
    """The group is being restarted, and a submission's own limit has passed.

    Args:
        name: what the step is called.
        limit: the limit.
        failure: the error that has ended the epoch before; the cause of this one.
    """
    error = StepTimeout(
        f"{name}: the group is being restarted, and was not ready within {limit.knob}={limit.seconds:g} s; nothing was "
        "published: try again",
        step=0,
        elapsed_s=limit.seconds,
        limit_s=limit.seconds,
        knob=limit.knob,
        phases={},
    )
    error.retryable = True
    error.__cause__ = failure
    return error


def not_restarted(restarts: int, max_restarts: int, failure: StepcastError) -> StepcastError:
    """A group has failed, and is not restarted again.

    Args:
        restarts: how often it was restarted.
        max_restarts: how often it may be, within the window.
        failure: the last failure; the cause of this one.
    """
    error = StepcastError(
        f"the group has failed for good, after {restarts} restarts (max_restarts={max_restarts}). The last failure: "
        f"{failure}"
    )
    error.__cause__ = failure
    return error


def too_large(size: int, limit: int) -> ProtocolError:
    """A message can never be sent.

    Args:
        size: bytes of payload and buffers.
        limit: the largest that can be.
    """
    return ProtocolError(
        f"a message of {size} bytes is over the limit of {limit}: send less, or raise max_message_bytes and "
        "max_in_flight_bytes; nothing was published",
        expected=f"at most {limit} bytes",
        got=f"{size} bytes",
    )


def expired(name: str, limit: Limit) -> StepTimeout:
    """A limit had passed before the step was published.

    Args:
        name: what the step is called.
        limit: the limit.
    """
    return StepTimeout(
        f"{name}: the limit {limit.knob}={limit.seconds:g} had passed before it was published; it was not",
        step=0,
        elapsed_s=0.0,
        limit_s=limit.seconds,
        knob=limit.knob,
        phases={},
    )


def _known_exit_code(process: WorkerProcess) -> int | None:
    exit_code = process.exit_code()
    return None if exit_code == EXIT_CODE_UNKNOWN else exit_code


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks)) or "(none: a pipe is full)"


def _last_lines(rank: int, stderr: str) -> str:
    return f"\n\nrank {rank}, last lines on stderr:\n{stderr}" if stderr else ""
