"""The loop of a rank: what it takes from the stream, and what it answers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from stepcast import RankInfo, Worker
from stepcast.bus import codec
from stepcast.bus.errors import ProtocolError
from stepcast.bus.frames import DRIVER_RANK, Flag, Header, Kind
from stepcast.bus.liveness import Phase
from stepcast.bus.subscriber import Gap, Message
from stepcast.workers.board import Board
from stepcast.workers.loop import MAX_FAILURE_BYTES, WorkerLoop, describe_error
from tests.harness import wait_until

LIMIT_BYTES = 10_000
LIMIT_S = 10.0
PLACE = {
    "local_rank": 0,
    "local_world_size": 1,
    "world_size": 1,
    "epoch": 1,
    "output_rank": 0,
    "device": "cpu",
    "rendezvous": "",
}


class Answer(NamedTuple):
    """What the loop has sent."""

    kind: int
    sequence: int
    step: int
    frames: Sequence[bytes | memoryview]
    times: tuple[int, int, int, int, int, int] | None

    @property
    def value(self) -> Any:
        return codec.decode(self.frames)


class Stream:
    """A step source and a reply sink; the stream ends with STOP."""

    def __init__(self, *items: Message | Gap | Callable[[], Any] | None) -> None:
        self.items = deque(items)
        self.answers: list[Answer] = []
        self.phases: list[Phase] = []
        self.board = Board()

    def next(self) -> Message | Gap | None:
        if not self.items:
            return message(Kind.STOP, 10_000)
        item = self.items.popleft()
        return item() if callable(item) else item

    def send(
        self,
        kind: int,
        sequence: int = 0,
        step: int = 0,
        frames: Sequence[bytes | memoryview] = (),
        flags: int = 0,
        times: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        self.phases.append(self.board.status.phase)
        self.answers.append(Answer(kind, sequence, step, frames, times))

    def run(self, worker: Worker, *, rank: int = 0, output_rank: int = 0, **settings: Any) -> list[Answer]:
        places: dict[str, Any] = {"rank": rank, "output_rank": output_rank, "max_answer_bytes": LIMIT_BYTES}
        WorkerLoop(worker, self, self, self.board, **places, **settings).run()
        return self.answers


def message(kind: int, sequence: int, value: Any = None, flags: int = 0) -> Message:
    frames = codec.encode(value) if kind in (Kind.STEP, Kind.CALL) else [b""]
    step = sequence if kind in (Kind.STEP, Kind.CALL) else 0
    return Message(Header(kind, flags, sequence, step, DRIVER_RANK), frames)


def call(sequence: int, method: str, *args: Any, ranks: list[int] | None = None, **kwargs: Any) -> Message:
    return message(Kind.CALL, sequence, [method, list(args), kwargs, ranks], Flag.GATHER)


class Subject(Worker):
    """Echoes, and does what its methods say."""

    attribute = 7

    def __init__(self, board: Board | None = None) -> None:
        self.board = board
        self.seen: list[Any] = []

    def execute(self, step: Any) -> Any:
        if self.board:
            self.seen.append(self.board.status[:1] + self.board.status[2:])
        if isinstance(step, dict) and "raise" in step:
            raise KeyError(step["raise"])
        return step

    def method(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append([args, kwargs])
        return [list(args), kwargs]

    def unsendable(self) -> Any:
        return {"a": [1, {2, 3}]}

    def large(self, size: int) -> Any:
        return bytes(size)

    def _private(self) -> str:
        return "secret"

    @property
    def looked_at(self) -> int:
        self.seen.append("looked at")
        return 1


def test_a_step_is_executed_and_answered() -> None:
    """The answer carries the step's place in the stream, and its times."""
    answers = Stream(message(Kind.STEP, 2, {"x": [1]}), message(Kind.STEP, 3, "y")).run(Subject())
    assert [(each.kind, each.sequence, each.step, each.value) for each in answers] == [
        (Kind.RESULT, 2, 2, {"x": [1]}),
        (Kind.RESULT, 3, 3, "y"),
    ]
    assert answers[0].times
    received_ns, compute_ns, _, *tally = answers[0].times
    assert received_ns > 0
    assert compute_ns > 0
    assert tally == [0, 0, 0]


def test_the_tally_of_a_steps_collectives_goes_with_its_answer_alone() -> None:
    stream = Stream(message(Kind.STEP, 2, "enter"), message(Kind.STEP, 3, "do not"))

    class Enters(Subject):
        def execute(self, step: Any) -> Any:
            if step == "enter":
                stream.board.tally = (5, 2, 77)

    assert [each.times[3:] for each in stream.run(Enters()) if each.times] == [(5, 2, 77), (0, 0, 0)]


def test_keepalive_does_what_the_rank_was_given_and_is_answered() -> None:
    stream, done = Stream(message(Kind.KEEPALIVE, 2)), []
    stream.run(Subject(), keepalive=lambda: done.append(stream.board.status.sequence))
    assert done == [2]
    assert [(each.kind, each.sequence) for each in stream.answers] == [(Kind.RESULT, 2)]


def test_only_the_output_rank_sends_its_result_unless_all_are_wanted() -> None:
    """Every rank answers every message; most answers are empty."""
    steps = [message(Kind.STEP, 1, "a"), message(Kind.STEP, 2, "b", Flag.GATHER)]
    other = Stream(*steps).run(Subject(), rank=1)
    assert [(each.kind, bool(each.frames)) for each in other] == [(Kind.RESULT, False), (Kind.RESULT, True)]
    output = Stream(*steps).run(Subject(), rank=1, output_rank=1)
    assert [each.value for each in output] == ["a", "b"]


def test_begin_and_keepalive_are_answered_and_stop_is_not() -> None:
    """What is sequenced is acknowledged, so that the window moves on; STOP ends the loop."""
    answers = Stream(message(Kind.BEGIN, 1), message(Kind.KEEPALIVE, 2)).run(Subject())
    assert [(each.kind, each.sequence, each.step) for each in answers] == [(Kind.RESULT, 1, 0), (Kind.RESULT, 2, 0)]


def test_nothing_that_came_is_no_message() -> None:
    """What the subscriber has dropped is passed over."""
    assert len(Stream(None, message(Kind.STEP, 1, 1), None).run(Subject())) == 1


def test_the_board_tells_phase_and_place() -> None:
    """While the worker works it is in that step; before the answer leaves, it is idle."""
    stream = Stream(message(Kind.BEGIN, 1), message(Kind.STEP, 2, 1), call(3, "method"))
    worker = Subject(stream.board)
    stream.run(worker)
    assert worker.seen[0] == (Phase.STEP, 2, 2)
    assert set(stream.phases) == {Phase.IDLE}
    assert stream.board.status[2:] == (3, 3)


def test_a_gap_is_asked_for_once() -> None:
    """Until it is closed; a later one is asked for again."""
    stream = Stream(Gap(2, 4), Gap(2, 5), Gap(2, 6), message(Kind.STEP, 2, "a"), Gap(3, 9), Gap(3, 10))
    answers = stream.run(Subject())
    assert [(each.kind, each.sequence) for each in answers] == [(Kind.GAP, 2), (Kind.RESULT, 2), (Kind.GAP, 3)]


def test_a_call_runs_a_public_method() -> None:
    """With its arguments; and on the ranks that are named, where some are."""
    calls = [call(1, "method", 1, "two", three=3), call(2, "method", ranks=[0, 2]), call(3, "method", ranks=[1])]
    worker = Subject()
    answers = Stream(*calls).run(worker, rank=1)
    assert [each.value for each in answers] == [[[1, "two"], {"three": 3}], None, [[], {}]]
    assert len(worker.seen) == 2


@pytest.mark.parametrize("name", ["nothing", "attribute", "looked_at", "_private", "__init__", "__class__"])
def test_what_is_no_public_method_is_not_called(name: str) -> None:
    """Whatever the driver says; the loop goes on."""
    failure, result = Stream(call(1, name), message(Kind.STEP, 2, "on")).run(Subject())
    assert (failure.kind, failure.sequence) == (Kind.FAILURE, 1)
    exception_type, text, _ = failure.value
    assert (exception_type, text) == ("AttributeError", f"Subject has no public method {name!r} to call")
    assert result.value == "on"


def test_an_exception_is_described_and_the_loop_goes_on() -> None:
    """Type, text and traceback, from every rank, whether its answer was wanted or not."""
    failure, result = Stream(message(Kind.STEP, 1, {"raise": "k"}), message(Kind.STEP, 2, 2)).run(Subject(), rank=1)
    assert (failure.kind, failure.sequence, failure.step) == (Kind.FAILURE, 1, 1)
    exception_type, text, trace = failure.value
    assert (exception_type, text) == ("KeyError", "'k'")
    assert trace.startswith("Traceback (most recent call last):")
    assert 'raise KeyError(step["raise"])' in trace
    assert failure.times
    assert result.kind == Kind.RESULT


def test_a_worker_without_execute_says_so() -> None:
    """The base class names what must be overridden."""
    (failure,) = Stream(message(Kind.STEP, 1, 1)).run(Worker())
    assert failure.value[:2] == ["NotImplementedError", "Worker has no execute(): override it to compute a step"]


def test_what_ends_the_process_ends_the_loop() -> None:
    """`SystemExit` is not an answer."""

    class Quits(Worker):
        def execute(self, step: Any) -> Any:
            raise SystemExit(3)

    stream = Stream(message(Kind.STEP, 1, 1))
    with pytest.raises(SystemExit):
        stream.run(Quits())
    assert stream.answers == []


def test_an_answer_that_can_not_be_encoded_is_a_failure() -> None:
    """The place in the answer is named; the loop goes on."""
    failure, result = Stream(call(1, "unsendable"), message(Kind.STEP, 2, "on")).run(Subject())
    assert failure.kind == Kind.FAILURE
    exception_type, text, _ = failure.value
    assert exception_type == "stepcast.bus.errors.ProtocolError"
    assert text.startswith("the answer['a'][1]: an object of type set can't be sent")
    assert result.value == "on"


def test_an_answer_that_is_too_large_is_a_failure() -> None:
    """The driver would never see it: it would cut the connection."""
    too_large, fits = Stream(call(1, "large", LIMIT_BYTES), call(2, "large", LIMIT_BYTES - 10)).run(Subject())
    assert too_large.kind == Kind.FAILURE
    assert "bytes, over max_message_bytes=10000: answer less, or raise the limit" in too_large.value[1]
    assert len(fits.value) == LIMIT_BYTES - 10


def test_an_answer_that_is_not_wanted_may_be_anything() -> None:
    """It is not encoded."""
    unwanted = message(Kind.STEP, 1, {"value": 1})

    class Odd(Worker):
        def execute(self, step: Any) -> Any:
            return object()

    (answer,) = Stream(unwanted).run(Odd(), rank=1)
    assert (answer.kind, list(answer.frames)) == (Kind.RESULT, [])


def test_a_message_that_can_not_be_decoded_is_a_failure() -> None:
    """It is told as what it is, not as an answer that can't be sent."""
    broken = Message(Header(Kind.STEP, 0, 1, 1, DRIVER_RANK), [b"\xc1"])
    failure, _ = Stream(broken, message(Kind.STEP, 2, 1)).run(Subject())
    exception_type, text, _ = failure.value
    assert exception_type == "stepcast.bus.errors.ProtocolError"
    assert text.startswith("a message holds what can't be decoded")


def test_aborts_are_forgotten_with_their_steps() -> None:
    """A rank asks about its own step; what is behind it need not be kept, what is ahead must be."""
    stream = Stream()
    stream.board.aborted |= {1, 2, 3, 7}
    seen: list[bool] = []

    class Asks(Worker):
        def execute(self, step: Any) -> Any:
            seen.append(stream.board.is_aborted(step))

    stream.items += [message(Kind.STEP, 2, 2), message(Kind.STEP, 3, 3), message(Kind.STEP, 4, 4)]
    stream.run(Asks())
    assert seen == [True, True, False]
    assert stream.board.aborted == {7}


def test_a_failed_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """In the worker's own log: step, type and text."""
    caplog.set_level(logging.WARNING, "stepcast.worker")
    Stream(message(Kind.STEP, 5, {"raise": "k"}), Gap(6, 8)).run(Subject())
    assert "step 5 failed: KeyError: 'k'" in caplog.text
    assert "messages 6 to 7 are missing; asking for them again" in caplog.text


# How an exception is described.


class OddError(Exception):
    """Its text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_a_type_is_named_with_its_module() -> None:
    """Built-in ones without."""
    assert describe_error(raised(ValueError("x")))[:2] == ["ValueError", "x"]
    assert describe_error(raised(OddError()))[0].endswith("test_loop.OddError")

    class Local(Exception):
        pass

    assert describe_error(Local())[0].endswith("<locals>.Local")


def test_causes_stand_in_the_traceback() -> None:
    """And an exception that was never raised has a description too."""
    error = RuntimeError("outer")
    error.__cause__ = raised(KeyError("inner"))
    trace = describe_error(error)[2]
    assert "KeyError: 'inner'" in trace
    assert "The above exception was the direct cause" in trace
    assert describe_error(ValueError("fresh"))[2] == "ValueError: fresh\n"


def test_a_description_is_cut() -> None:
    """A text is cut at its end, a traceback in its middle; both fit in a message."""
    exception_type, text, trace = describe_error(raised(ValueError("\N{SNOWMAN}" * 200_000)))
    assert (exception_type, text) == ("ValueError", "\N{SNOWMAN}" * 32_000)
    assert trace.startswith("Traceback")
    assert "\n[... cut ...]\n" in trace
    assert trace.endswith("\N{SNOWMAN}\n")
    assert len(trace) < 33_000
    assert sum(map(len, codec.encode([exception_type, text, trace]))) < MAX_FAILURE_BYTES


def test_a_text_that_fails_is_told_as_such() -> None:
    """The step fails with its own exception, not with the one of its text."""
    (failure,) = Stream(message(Kind.STEP, 1, None)).run(RaisesOdd())
    exception_type, text, trace = failure.value
    assert exception_type.endswith("OddError")
    assert text == "<its __str__ failed>"
    assert "raise OddError" in trace


class RaisesOdd(Worker):
    """Raises an exception without a text."""

    def execute(self, step: Any) -> Any:
        raise OddError


def test_what_can_not_be_sent_in_a_text_is_replaced() -> None:
    """Undecodable bytes of a file's name, for one."""

    class Raises(Worker):
        def execute(self, step: Any) -> Any:
            raise ValueError("name \udcff")

    failure, result = Stream(message(Kind.STEP, 1, 1), call(2, "execute")).run(Raises())
    assert failure.value[:2] == ["ValueError", "name ?"]
    assert result.kind == Kind.FAILURE


def test_rank_info_knows_nothing_of_aborts_by_itself() -> None:
    """A worker that is tried out without a loop may ask all the same."""
    info = RankInfo(rank=0, collective_timeout_s=1.0, **PLACE)
    assert not info.is_aborted(1)
    assert info.options == {}


def test_a_rank_that_raised_takes_no_step_before_its_peers_have_answered_the_same() -> None:
    """They may sit in a collective of that step: the next step's would answer it."""
    stream = Stream(message(Kind.STEP, 1, {"raise": "no"}), message(Kind.STEP, 2, "next"))
    thread = threading.Thread(target=stream.run, args=(Subject(),), kwargs={"resume_timeout_s": LIMIT_S})
    thread.start()
    wait_until(lambda: stream.answers)
    stream.board.resume(0)  # an earlier one
    assert [answer.kind for answer in stream.answers] == [Kind.FAILURE]
    stream.board.resume(1)
    thread.join(LIMIT_S)
    assert [answer.kind for answer in stream.answers] == [Kind.FAILURE, Kind.RESULT]


def test_a_rank_that_raised_and_hears_nothing_ends() -> None:
    """The error tells what it has waited for."""
    stream = Stream(message(Kind.STEP, 1, {"raise": "no"}), message(Kind.STEP, 2, "next"))
    with pytest.raises(ProtocolError, match="step 1 failed on this rank"):
        stream.run(Subject(), resume_timeout_s=0.01)
    assert [answer.kind for answer in stream.answers] == [Kind.FAILURE]
