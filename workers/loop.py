"""The loop of a rank: receive, handle, reply."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, Protocol

from stepcast.bus import codec
from stepcast.bus.errors import ProtocolError
from stepcast.bus.frames import Flag, Kind
from stepcast.bus.liveness import Phase
from stepcast.bus.subscriber import Gap, Message

from .base import Worker
from .board import NO_COLLECTIVES, Board
from .run_queue import RunQueue

#: A traceback longer than this is cut in the middle: it has to fit in any message limit.
_MAX_TRACEBACK_CHARS = 32_000
#: No FAILURE is larger than this: type, text and traceback, at four bytes for a character.
MAX_FAILURE_BYTES = 4 * 4 * _MAX_TRACEBACK_CHARS

#: A shorter step is not asked how long it was kept from the processor: the question takes some microseconds.
_LONG_NS = 1_000_000

_GATHER = int(Flag.GATHER)
_IDLE = Phase.IDLE
_STOP, _RESULT, _FAILURE = int(Kind.STOP), int(Kind.RESULT), int(Kind.FAILURE)

_log = logging.getLogger("stepcast.worker")


class StepSource(Protocol):
    """Where the step stream comes from: a `StepSubscriber`, or a queue in the same process."""

    def next(self) -> Message | Gap | None:
        """Block until something comes."""
        ...


class ReplySink(Protocol):
    """Where the answers go: a `ReplySender`, or a table in the same process."""

    def send(
        self,
        kind: int,
        sequence: int = 0,
        step: int = 0,
        frames: Sequence[bytes | memoryview] = (),
        flags: int = 0,
        times: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        """Send a message to the driver."""
        ...


class WorkerLoop:
    """Runs one rank's worker on the step stream.

    Args:
        worker: the worker, set up.
        steps: the step stream.
        replies: where the answers go.
        board: where the loop tells what it is doing.
        rank: this rank.
        output_rank: the rank whose result is always sent.
        max_answer_bytes: the largest answer, in bytes of payload and buffers.
        keepalive: what KEEPALIVE does; None for nothing.
        resume_timeout_s: after this rank raised, how long it waits until every rank has answered the same step, in
            seconds; None for not at all, where it has no peers.
    """

    def __init__(
        self,
        worker: Worker,
        steps: StepSource,
        replies: ReplySink,
        board: Board,
        *,
        rank: int,
        output_rank: int,
        max_answer_bytes: int,
        keepalive: Callable[[], None] | None = None,
        resume_timeout_s: float | None = None,
    ) -> None:
        self._worker = worker
        self._steps = steps
        self._replies = replies
        self._board = board
        self._rank = rank
        self._always_answers = rank == output_rank
        self._max_answer_bytes = max_answer_bytes
        self._keep_alive = keepalive
        self._resume_timeout_s = resume_timeout_s
        self._asked_for = 0
        self._compute: dict[int, tuple[Phase, Callable[[Message], Any]]] = {
            Kind.BEGIN: (Phase.IDLE, self._begin),
            Kind.STEP: (Phase.STEP, self._step),
            Kind.CALL: (Phase.CALL, self._call),
            Kind.KEEPALIVE: (Phase.IDLE, self._keepalive),
        }

    def run(self) -> None:
        """Take the stream's messages, one after another, until STOP. Parks in the bus while there is none."""
        receive = self._steps.next
        with RunQueue() as self._run_queue:
            while True:
                item = receive()
                if isinstance(item, Message):
                    if item.header.kind == _STOP:
                        return
                    self._handle(item)
                elif item is not None:
                    self._ask_for(item)

    def _ask_for(self, gap: Gap) -> None:
        if gap.expected != self._asked_for:  # once: the heartbeat asks again where the replay is lost too
            self._asked_for = gap.expected
            _log.warning("messages %d to %d are missing; asking for them again", gap.expected, gap.got - 1)
            self._replies.send(Kind.GAP, gap.expected)

    def _handle(self, message: Message) -> None:
        kind, flags, sequence, step, _ = message.header
        phase, compute = self._compute[kind]
        received_ns = monotonic_ns()
        self._board.moment = (phase, received_ns, sequence, step)
        frames: Sequence[bytes | memoryview] = ()
        try:
            answer = compute(message)
            if self._always_answers or flags & _GATHER:
                frames = self._encode(answer)
            kind = _RESULT
        except Exception as error:  # noqa: BLE001 - whatever the worker's author raises belongs to the driver
            description = describe_error(error)
            frames = codec.encode(description)
            kind = _FAILURE
            _log.warning("step %d failed: %s: %s", step, *description[:2])
        done_ns = monotonic_ns()
        # Idle before the reply: who has the reply may ask at once what the rank is doing.
        self._board.moment = (_IDLE, done_ns, sequence, step)
        tally, compute_ns = self._board.tally, done_ns - received_ns
        queued_ns = self._run_queue.waited_ns() if compute_ns >= _LONG_NS else 0
        self._replies.send(kind, sequence, step, frames, 0, (received_ns, compute_ns, queued_ns, *tally))
        if tally is not NO_COLLECTIVES:
            self._board.tally = NO_COLLECTIVES
        if self._board.aborted:
            self._board.forget_aborts(step)
        if kind == _FAILURE and self._resume_timeout_s is not None:
            self._wait_for_peers(step, self._resume_timeout_s)

    def _wait_for_peers(self, step: int, timeout_s: float) -> None:
        # They may sit in a collective of the step that was left here. To go on with the next one would be to answer
        # that collective with another step's.
        if not self._board.wait_for_resume(step, timeout_s):
            raise ProtocolError(
                f"step {step} failed on this rank, and in {timeout_s:g} s the driver has neither said that every rank "
                "has answered it nor ended the group"
            )

    def _encode(self, answer: Any) -> Sequence[bytes | memoryview]:
        frames = codec.encode(answer, name="the answer")
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        if size > self._max_answer_bytes:  # the driver would cut the connection, and never see it
            limit = f"max_message_bytes={self._max_answer_bytes}"
            raise ProtocolError(f"the answer has {size} bytes, over {limit}: answer less, or raise the limit")
        return frames

    def _begin(self, message: Message) -> None:
        _log.debug("the epoch begins at message %d", message.header.sequence)

    def _step(self, message: Message) -> Any:
        return self._worker.execute(codec.decode(message.frames))

    def _call(self, message: Message) -> Any:
        method, args, kwargs, ranks = codec.decode(message.frames)
        if ranks is not None and self._rank not in ranks:
            return None
        function = getattr(self._worker, method, None)
        if method.startswith("_") or not callable(function):
            raise AttributeError(f"{type(self._worker).__name__} has no public method {method!r} to call")
        return function(*args, **kwargs)

    def _keepalive(self, message: Message) -> None:
        # In this thread: from another one, its collective would stand at a different place among the model's own.
        _log.debug("keepalive at message %d", message.header.sequence)
        if self._keep_alive is not None:
            self._keep_alive()


def describe_error(error: BaseException) -> list[str]:
    """Turn an exception into what FAILURE carries.

    Args:
        error: what was raised.

    Returns:
        Its qualified type, its text and its traceback, all as plain text: no exception is ever pickled.
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = "".join(traceback.format_exception(error))
    if len(trace) > _MAX_TRACEBACK_CHARS:
        half = _MAX_TRACEBACK_CHARS // 2
        trace = f"{trace[:half]}\n[... cut ...]\n{trace[-half:]}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the author's __str__ may fail as well
        text = "<its __str__ failed>"
    # Undecodable bytes of a file's name, as surrogates, can't be sent.
    return [part.encode("utf-8", "replace").decode() for part in (name, text[:_MAX_TRACEBACK_CHARS], trace)]
