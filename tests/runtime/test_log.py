"""The command line's logging: lines for people, or JSON for programs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from stepcast.runtime.log import configure_logging

PLACE = {"rank": 2, "epoch": 1, "step": 7}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def log_as_a_worker() -> None:
    logging.getLogger("stepcast.worker").warning("[rank 2 epoch 1 step 7] mine: %s", "hé\nho", extra=PLACE)


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is logged, each line of stderr is an object with its time, level, logger and text."""
    configure_logging("json", "DEBUG")
    log_as_a_worker()
    logging.getLogger("other").info("two\nlines", extra={"thing": object()})
    logging.getLogger("other").error("it failed", exc_info=ValueError("bad"))
    lines = json_lines(capsys)
    assert [(line["level"], line["logger"]) for line in lines] == [
        ("warning", "stepcast.worker"),
        ("info", "other"),
        ("error", "other"),
    ]
    assert all("timestamp" in line for line in lines)
    assert lines[1]["event"] == "two\nlines"
    assert "ValueError: bad" in lines[2]["exception"]


def test_a_workers_line_carries_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank, epoch and step of a worker's line are fields in JSON."""
    configure_logging("json", "INFO")
    log_as_a_worker()
    (line,) = json_lines(capsys)
    assert PLACE.items() <= line.items()
    assert line["event"].endswith("mine: hé\nho")


def test_a_workers_line_tells_its_place_once_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    """For people the place stands in the text, and is not repeated behind it; other records keep what they bring."""
    configure_logging("console", "INFO")
    log_as_a_worker()
    logging.getLogger("other").info("hello", extra={"rank": 3})
    text = capsys.readouterr().err
    assert "[rank 2 epoch 1 step 7] mine: hé" in text
    assert "rank=2" not in text
    assert "rank=3" in text


@pytest.mark.parametrize("format", ["console", "json"])
def test_what_is_below_the_level_is_not_shown(capsys: pytest.CaptureFixture[str], format: str) -> None:
    """At WARNING an INFO record is not written."""
    configure_logging(format, "WARNING")
    logging.getLogger("stepcast.worker").info("quiet")
    log_as_a_worker()
    text = capsys.readouterr().err
    assert "quiet" not in text
    assert "mine" in text


def test_lines_go_to_what_stderr_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stderr that is replaced later, as rich does it, gets the lines from then on."""
    configure_logging("console", "INFO")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    log_as_a_worker()
    assert "mine" in replaced.getvalue()


def test_python_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning of Python's own becomes a record, so that it does not break a stream of JSON."""
    configure_logging("json", "INFO")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(True)  # catch_warnings has put back what was there before
        warnings.warn("beware", stacklevel=1)
    (line,) = json_lines(capsys)
    assert line["logger"] == "py.warnings"
    assert "beware" in line["event"]


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """The last configuration holds, and no line comes twice."""
    configure_logging("console", "INFO")
    configure_logging("json", "INFO")
    log_as_a_worker()
    assert len(json_lines(capsys)) == 1


def test_the_library_leaves_logging_alone() -> None:
    """Neither importing stepcast nor running a group touches the embedder's logging."""
    code = (
        "import logging\n"
        "from stepcast import Executor, ExecutorConfig\n"
        "root = logging.getLogger()\n"
        "with Executor(ExecutorConfig(worker='stepcast.workers.echo:Echo', backend='mp')) as executor:\n"
        "    assert executor.step(1) == 1\n"
        "assert root.handlers == [] and root.level == logging.WARNING\n"
        "assert logging.getLogger('stepcast').handlers == [] and not logging.getLogger('stepcast').level\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
