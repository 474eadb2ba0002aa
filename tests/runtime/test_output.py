"""The workers' output on its way into the embedder's log."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from stepcast.runtime.launch.process import WorkerProcess
from stepcast.runtime.output import OutputRelay
from tests.harness import wait_until

LIMIT_S = 10.0
LINE_BYTES = 16384


class Rank:
    """The write ends of a worker's stdout and stderr."""

    def __init__(self, relay: OutputRelay, rank: int) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (write for _, write in pipes)
        outputs = (os.fdopen(pipes[0][0], "rb", 0), os.fdopen(pipes[1][0], "rb", 0))
        relay.add(WorkerProcess(rank, 0, None, outputs))

    def out(self, data: bytes) -> None:
        self._write(self.stdout, data)

    def err(self, data: bytes) -> None:
        self._write(self.stderr, data)

    def end(self) -> None:
        for descriptor in (self.stdout, self.stderr):
            with suppress(OSError):
                os.close(descriptor)

    @staticmethod
    def _write(descriptor: int, data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]


class Log(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in self.records]


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logger = logging.getLogger("stepcast.worker")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def relay() -> Iterator[OutputRelay]:
    made = OutputRelay()
    made.start()
    yield made
    if made.is_alive():
        made.stop(LIMIT_S)


@pytest.fixture
def new_rank(relay: OutputRelay) -> Iterator[Callable[[int], Rank]]:
    ranks: list[Rank] = []

    def make(rank: int) -> Rank:
        ranks.append(Rank(relay, rank))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.end()


def record(**fields: Any) -> bytes:
    return b"\x1e" + json.dumps(fields).encode() + b"\n"


def test_lines_have_a_level_and_a_rank(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """Those of stdout are INFO, those of stderr WARNING; the rank stands in front, and is an attribute."""
    first, second = new_rank(0), new_rank(3)
    first.out(b"hello\nworld\n")
    wait_until(lambda: len(log.records) == 2)
    second.err(b"oh no\r\n")
    wait_until(lambda: len(log.records) == 3)
    assert log.lines == [("INFO", "[rank 0] hello"), ("INFO", "[rank 0] world"), ("WARNING", "[rank 3] oh no")]
    assert [record.__dict__["rank"] for record in log.records] == [0, 0, 3]
    assert {record.name for record in log.records} == {"stepcast.worker"}


def test_a_line_may_come_in_pieces(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """Also one that is cut inside a character; and one that is never ended is told at the end."""
    rank = new_rank(0)
    text = "begins § ends".encode()
    rank.out(text[:8])
    rank.out(text[8:] + b"\nunfinished")
    wait_until(lambda: len(log.records) == 1)
    rank.end()
    wait_until(lambda: len(log.records) == 2)
    assert log.lines == [("INFO", "[rank 0] begins § ends"), ("INFO", "[rank 0] unfinished")]


def test_bytes_that_are_no_text_are_replaced(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """The rest of the line is told all the same; a percent sign is only that, and an empty line is a line."""
    rank = new_rank(0)
    rank.out(b"a\xff\xfeb 100%s\n\n")
    rank.end()
    wait_until(lambda: len(log.records) == 2)
    assert log.lines == [
        ("INFO", "[rank 0] a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b 100%s"),
        ("INFO", "[rank 0] "),
    ]


def test_a_line_without_an_end_takes_no_memory(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """It is told in parts, each of which is cut; the next line is whole again."""
    rank = new_rank(0)
    rank.out(b"x" * 1_000_000 + b"\nshort\n")
    wait_until(lambda: log.lines and log.lines[-1] == ("INFO", "[rank 0] short"))
    assert len(log.records) > 1
    assert all(len(message) <= 65536 + LINE_BYTES + 20 for _, message in log.lines)
    assert all(set(message.removeprefix("[rank 0] ")) <= {"x"} for _, message in log.lines[:-1])


def test_a_log_record_keeps_its_level_and_place(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """A worker's own records are told from what else it writes to stderr."""
    rank = new_rank(1)
    rank.err(
        record(level="error", logger="mine", event="it\nfailed", rank=1, epoch=2, step=3, exception="Traceback: x")
        + record(level="debug", event="d", rank=1, epoch=2, step=3)
        + record(level="odd", event=7)
    )
    wait_until(lambda: len(log.records) == 3)
    assert log.lines == [
        ("ERROR", "[rank 1 epoch 2 step 3] mine: it\nfailed\nTraceback: x"),
        ("DEBUG", "[rank 1 epoch 2 step 3] : d"),
        ("INFO", "[rank ? epoch ? step ?] : 7"),
    ]
    assert [log.records[0].__dict__[name] for name in ("rank", "epoch", "step")] == [1, 2, 3]


def test_a_record_behind_an_unfinished_line_is_told(
    relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log
) -> None:
    """A progress bar, say, that does not end its line."""
    rank = new_rank(0)
    rank.err(b"\r 10%|#    |" + record(level="info", logger="mine", event="loaded", rank=0, epoch=1, step=0))
    wait_until(lambda: len(log.records) == 2)
    assert log.lines == [("WARNING", "[rank 0] \r 10%|#    |"), ("INFO", "[rank 0 epoch 1 step 0] mine: loaded")]
    assert relay.stderr_tail(0, 0) == "\r 10%|#    |"


def test_what_only_looks_like_a_record_is_a_line(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """A broken one is told as it came."""
    rank = new_rank(0)
    rank.err(b'\x1e{"event": \n\x1e[1, 2]\n\x1e\n')
    wait_until(lambda: len(log.records) == 3)
    assert [level for level, _ in log.lines] == ["WARNING"] * 3
    assert log.lines[0][1] == '[rank 0] \x1e{"event": '


def test_the_tail_is_what_stderr_ended_with(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """The last sixty lines, log records and stdout apart; there when the process has ended."""
    rank = new_rank(2)
    rank.err(b"".join(b"line %d\n" % number for number in range(80)))
    rank.err(record(level="info", event="a record") + b"the end")
    rank.out(b"something else\n")
    rank.end()
    assert relay.stderr_tail(2, LIMIT_S).splitlines() == [*(f"line {number}" for number in range(21, 80)), "the end"]


def test_the_tail_waits_no_longer_than_it_may(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """Of a rank that goes on writing it is what there is; of one that is not known, nothing."""
    rank = new_rank(0)
    rank.err(b"so far\n")
    wait_until(lambda: log.records)
    assert relay.stderr_tail(0, 0.01) == "so far"
    assert relay.stderr_tail(9, 0) == ""


def test_what_is_in_the_pipes_is_read_at_the_end(relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log) -> None:
    """`stop` returns when it is told; also of a rank that was added just before."""
    first = new_rank(0)
    first.out(b"".join(b"%d\n" % number for number in range(5000)))
    second = new_rank(1)
    second.err(b"from the second\n")
    relay.stop(LIMIT_S)
    assert not relay.is_alive()
    assert [message for _, message in log.lines if "rank 0" in message] == [
        f"[rank 0] {number}" for number in range(5000)
    ]
    assert ("WARNING", "[rank 1] from the second") in log.lines


def test_a_handler_that_raises_does_not_end_the_reading(
    relay: OutputRelay, new_rank: Callable[[int], Rank], log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that is not read any more would hold the worker; the error is shown as logging shows its own."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise LookupError("the embedder's handler")

    handler = Raising()
    logging.getLogger("stepcast.worker").addHandler(handler)
    try:
        rank = new_rank(0)
        for number in range(3):
            rank.out(b"%d" % number * 40_000 + b"\n")
        wait_until(lambda: len(log.records) >= 3)
    finally:
        logging.getLogger("stepcast.worker").removeHandler(handler)
    relay.stop(LIMIT_S)
    assert "LookupError: the embedder's handler" in capsys.readouterr().err
