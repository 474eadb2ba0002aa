"""Every error that stepcast raises.

    StepcastError
    |- ConfigError      a setting is wrong
    |- StartupError     the group did not come up
    |- StepFailed       a worker raised in a step or a call
    |- StepTimeout      an answer did not come within its limit
    |- StepAborted      the embedder aborted the step
    |- WorkerLost       a worker's process ended
    |- Backpressure     the ranks did not keep up with what was submitted
    |- ProtocolError    a message broke the protocol
    |- Diverged         ranks disagree on a step's collectives
    `- Closed           the executor was shut down, or its group has failed

Each message says what happened, on which rank, and what to do; the same facts are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class StepcastError(Exception):
    """Base of all errors raised by stepcast.

    Attributes:
        retryable: True where the same request may succeed when this executor is given it again.
    """

    retryable: bool = False


class ConfigError(StepcastError):
    """A setting or an input is wrong; the message says which one and what is allowed."""


class StartupError(StepcastError):
    """The group did not come up.

    Attributes:
        ranks: the ranks that failed or are missing.
        phases: the last phase that each of them reached.
        exit_codes: exit code by rank, negative for a signal, of those that ended.
        stderr: the last lines that each of them wrote to stderr.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        phases: Mapping[int, str] | None = None,
        exit_codes: Mapping[int, int] | None = None,
        stderr: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.phases = dict(phases or {})
        self.exit_codes = dict(exit_codes or {})
        self.stderr = dict(stderr or {})


class StepFailed(StepcastError):
    """A worker raised in a step or a call.

    Attributes:
        step: the id of the step that failed.
        rank: the rank that raised.
        exception_type: the qualified name of the exception's class on that rank.
        traceback: the rank's traceback as text.
        failed_ranks: every rank that raised.
        epoch_ended: True where a rank did not answer the step, so that the group had to end.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        rank: int,
        exception_type: str,
        traceback: str,
        failed_ranks: Sequence[int] = (),
        epoch_ended: bool = False,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.exception_type = exception_type
        self.traceback = traceback
        self.failed_ranks = tuple(failed_ranks) or (rank,)
        self.epoch_ended = epoch_ended


class StepTimeout(StepcastError):
    """An answer did not come within its limit.

    Attributes:
        step: the id of the step.
        elapsed_s: seconds since the step was published.
        limit_s: the limit that was passed.
        knob: the name of the setting that holds the limit.
        phases: each rank's last known phase.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        elapsed_s: float,
        limit_s: float,
        knob: str,
        phases: Mapping[int, str],
    ) -> None:
        super().__init__(message)
        self.step = step
        self.elapsed_s = elapsed_s
        self.limit_s = limit_s
        self.knob = knob
        self.phases = dict(phases)


class StepAborted(StepcastError):
    """The embedder aborted the step; its answers are dropped as they come.

    Attributes:
        step: the id of the step.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class WorkerLost(StepcastError):
    """A worker's process ended, or a remote one fell silent past its limit.

    Attributes:
        rank: the rank that was lost.
        pid: its process id.
        exit_code: its exit code, negative for a signal; None where it is not known.
        phase: the last phase it told.
        silent_for_s: seconds since its last message.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        pid: int,
        exit_code: int | None,
        phase: str,
        silent_for_s: float,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exit_code = exit_code
        self.phase = phase
        self.silent_for_s = silent_for_s


class Backpressure(StepcastError):
    """The ranks did not keep up: the window stayed full past the limit. Nothing was published.

    Attributes:
        slow_ranks: the ranks that hold the window up.
        queued: messages that the slowest of them has not answered.
        queued_bytes: the bytes of those messages.
        limit: the window in messages.
        limit_bytes: the window in bytes.
    """

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        slow_ranks: Sequence[int],
        queued: int,
        queued_bytes: int,
        limit: int,
        limit_bytes: int,
    ) -> None:
        super().__init__(message)
        self.slow_ranks = tuple(slow_ranks)
        self.queued = queued
        self.queued_bytes = queued_bytes
        self.limit = limit
        self.limit_bytes = limit_bytes


class ProtocolError(StepcastError):
    """A message broke the protocol, or can't be sent over it.

    Attributes:
        expected: what was allowed.
        got: what came.
        rank: whose message it was; None where that is not known.
    """

    def __init__(self, message: str, *, expected: str = "", got: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got
        self.rank = rank


class Diverged(StepcastError):
    """Ranks disagree on the collectives of a step.

    Attributes:
        step: the id of the step.
        counts: collectives entered, by rank, of the ranks that have told.
        last: the last collective of each of them; "none" where there was none.
    """

    def __init__(self, message: str, *, step: int, counts: Mapping[int, int], last: Mapping[int, str]) -> None:
        super().__init__(message)
        self.step = step
        self.counts = dict(counts)
        self.last = dict(last)


class Closed(StepcastError):
    """The executor was shut down, or its group has failed; `__cause__` holds the first failure."""
