"""What can go wrong in the start of a rank: each error names the rank, the cause and what to do; nothing is left."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from stepcast import Executor, StartupError
from tests.faults import signs
from tests.faults.rig import METHODS, Stage

JudgeTime = Callable[[float], None]
METHOD = pytest.mark.parametrize("method", METHODS)


def fail_to_start(stage: Stage, **settings: object) -> StartupError:
    with pytest.raises(StartupError) as caught:
        Executor(stage.config(**settings))
    return caught.value


def raised_at(stage: Stage, phase: str) -> float:
    return signs.read(stage.directory, f"{phase}-1")[1]


@METHOD
@pytest.mark.parametrize(("phase", "told"), [("importing", "importing the worker's class"), ("loading", "setup()")])
def test_an_exception_in_the_start_of_one_rank(
    stage: Stage, judge_time: JudgeTime, method: str, phase: str, told: str
) -> None:
    """Type, text and traceback are in the error, at once, though the other ranks would take for ever."""
    error = fail_to_start(stage, at=phase, do="raise", ranks=[1], start_method=method)

    judge_time(time.monotonic() - raised_at(stage, phase))
    assert error.ranks == (1,)
    assert error.phases == {1: phase}
    assert f"LookupError: no luck in {phase} on rank 1" in str(error)
    assert f"rank 1 failed in {told}" in str(error).replace("the worker's setup", "setup")
    assert "correct it" in str(error)
    assert "victims.py" in str(error)


@METHOD
def test_a_module_that_does_not_exist(stage: Stage, method: str) -> None:
    """The error is Python's own, with the rank that told it first."""
    error = fail_to_start(stage, worker="no_such_module:Worker", start_method=method)

    assert len(error.ranks) == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in str(error)
    assert f"rank {error.ranks[0]} failed in importing the worker's class" in str(error)


@METHOD
@pytest.mark.parametrize(("action", "code"), [("exit", 3), ("os_exit", 7)])
@pytest.mark.parametrize("phase", ["importing", "loading"])
def test_a_rank_that_exits_in_its_start(
    stage: Stage, judge_time: JudgeTime, method: str, phase: str, action: str, code: int
) -> None:
    """The exit code is in the error, whether Python's exit or the kernel's."""
    error = fail_to_start(stage, at=phase, do=action, ranks=[1], start_method=method)

    judge_time(time.monotonic() - raised_at(stage, phase))
    assert error.ranks == (1,)
    assert error.exit_codes == {1: code}
    assert f"exited with code {code} while" in str(error)
    assert "before it was ready: look at its last lines" in str(error)


@METHOD
def test_a_rank_that_hangs_is_named_when_the_limit_passes(
    stage: Stage, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Only the rank that is missing is named, with its phase and the setting; its stack is in the log."""
    limit_s = 4.0

    began = time.monotonic()
    error = fail_to_start(
        stage, at="loading", ranks=[1], others="go on", start_method=method, startup_timeout_s=limit_s
    )

    assert time.monotonic() - began < limit_s + 3.0
    assert error.ranks == (1,)
    assert error.phases == {1: "loading"}
    assert error.exit_codes == {}
    assert f"not ready within startup_timeout_s={limit_s:g} s: rank 1 (loading): raise the limit" in str(error)
    stacks = "\n".join(record.getMessage() for record in caplog.records if record.name == "stepcast.worker")
    assert "signs.py" in stacks
    assert "in block" in stacks


@METHOD
def test_the_last_lines_of_a_rank_that_dies_shouting_are_in_the_error(stage: Stage, method: str) -> None:
    """Of half a megabyte on stderr the end is kept, down to the last line before the death."""
    error = fail_to_start(stage, at="loading", do="shout", ranks=[1], start_method=method)

    lines = error.stderr[1].splitlines()
    assert lines[-1] == "the very last words"
    assert lines[-2].startswith("line 4999 ")
    assert 20 <= len(lines) <= 100
    assert error.exit_codes == {1: 9}
    assert error.stderr[1] in str(error)


@pytest.mark.parametrize("executable", ["/no/such/python", "/", ""])
def test_an_interpreter_that_cannot_be_started(stage: Stage, monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    """An embedder's own program may stand in `sys.executable`, or nothing: the error says which and what to do."""
    monkeypatch.setattr(sys, "executable", executable)

    error = fail_to_start(stage)

    assert error.ranks == (0,)
    assert "rank 0" in str(error)
    assert f"sys.executable={executable!r}" in str(error)
    assert "start_method='fork'" in str(error)


@pytest.mark.parametrize(
    ("method", "problem"),
    [("fork", "[Errno 11] Resource temporarily unavailable"), ("forkserver", "unexpected EOF")],
)
def test_a_fork_that_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str, problem: Exception) -> None:
    """At the limit of processes, or by a fork server that dies, the error names the rank; those before it are gone."""
    start = BaseProcess.start

    def start_the_first(process: BaseProcess) -> None:
        if process.name.endswith("1"):
            if method == "fork":
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            raise EOFError("unexpected EOF")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", start_the_first)

    error = fail_to_start(stage, at="importing", start_method=method)

    assert error.ranks == (1,)
    assert f"rank 1: {problem}: start fewer ranks" in str(error)


def test_an_interpreter_that_is_none(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that takes the worker's arguments for its own and exits is a rank that died."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'program: unknown option -c' >&2\nexit 64\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    error = fail_to_start(stage)

    [rank] = error.ranks
    assert error.exit_codes == {rank: 64}
    assert "unknown option -c" in error.stderr[rank]
