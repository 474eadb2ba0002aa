"""A worker's own log: lines of JSON on stderr that the driver can tell from everything else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from stepcast.bus.liveness import Phase
from stepcast.workers.board import Board
from stepcast.workers.log import configure_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def records(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Read what was written as RFC 7464 wants it: a record separator, JSON, a line feed."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.split("\n")
    assert lines.pop() == ""
    assert all(line.startswith("\x1e") and line.count("\x1e") == 1 for line in lines)
    return [json.loads(line[1:]) for line in lines]


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_each_record_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank, epoch and the step that the loop is at; level, logger and text."""
    board = Board()
    configure_logging("INFO", rank=3, epoch=2, board=board)
    logger = logging.getLogger("mine")
    logger.info("before the first %s", "step")
    board.moment = (Phase.STEP, 0, 8, 7)
    logger.warning("two\nlines, and a \x1e")
    first, second = records(capsys)
    assert first == {
        "event": "before the first step",
        "level": "info",
        "logger": "mine",
        "rank": 3,
        "epoch": 2,
        "step": 0,
    }
    assert (second["event"], second["level"], second["step"]) == ("two\nlines, and a \x1e", "warning", 7)


def test_an_exception_is_part_of_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    """On the same line, as text."""
    configure_logging("INFO", rank=0, epoch=1, board=Board())
    logging.getLogger("mine").error("it failed", exc_info=raised(LookupError("no \udcff weights")))
    (record,) = records(capsys)
    assert (record["event"], record["level"]) == ("it failed", "error")
    assert record["exception"].startswith("Traceback (most recent call last):")
    assert "LookupError: no " in record["exception"]


def test_what_is_added_to_a_record_travels_if_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no JSON is told as text; nobody can lie about the rank."""
    configure_logging("INFO", rank=4, epoch=1, board=Board())
    logging.getLogger("mine").info("with more", extra={"tokens": [1, 2], "thing": object(), "rank": 99})
    (record,) = records(capsys)
    assert (record["tokens"], record["rank"]) == ([1, 2], 4)
    assert "object object" in record["thing"]


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """And no other handler is left."""
    logging.getLogger().addHandler(logging.NullHandler())
    configure_logging("WARNING", rank=0, epoch=1, board=Board())
    logging.getLogger("mine").info("hidden")
    logging.getLogger("mine").warning("shown")
    assert [record["event"] for record in records(capsys)] == ["shown"]
    assert len(logging.getLogger().handlers) == 1
