"""What embedding programs do: dropped executors, Ctrl-C, forks, threads. Nothing hangs, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.faults.rig import METHODS, Embedder, Stage, run_directories, wait_for_none_left

METHOD = pytest.mark.parametrize("method", METHODS)
#: With no step under way, and with one that never ends.
METHOD_AND_STEP = pytest.mark.parametrize(
    ("method", "argument"), [("spawn", None), ("spawn", ["block"]), ("fork", ["block"]), ("forkserver", ["block"])]
)
#: Past STOP, SIGTERM and SIGKILL of `QUICK`, and as long again for a busy machine.
QUICK = {"stop_timeout_s": 0.5, "terminate_timeout_s": 0.5}
PROMPTLY_S = 3.0


def run(stage: Stage, scenario: str, argument: Any = None, **settings: Any) -> tuple[int, str]:
    """Run a scenario to its end; nothing of it may be left."""
    with Embedder(stage, scenario, stage.settings(world_size=2, **settings), argument) as embedder:
        code = embedder.finish()
    check_nothing_left()
    return code, embedder.output


def check_nothing_left() -> None:
    wait_for_none_left(2.0)
    assert run_directories() == []


# --- Without a shutdown ---------------------------------------------------------------------------------------------


@METHOD_AND_STEP
def test_an_executor_that_is_dropped_ends_its_group(stage: Stage, method: str, argument: Any) -> None:
    """The program lives on without threads or workers; a step that was under way is closed."""
    code, output = run(stage, "drop", argument, start_method=method, **QUICK)
    assert code == 0
    assert output.endswith("threads left: 0\n" if argument is None else "the step: Closed\nthreads left: 0\n")


@pytest.mark.parametrize(
    ("method", "argument"), [*product(METHODS, [None]), *product(["spawn", "fork"], [["block"], ["ignore_sigterm"]])]
)
def test_a_program_that_exits_without_shutdown_ends_its_group(stage: Stage, method: str, argument: Any) -> None:
    """At the interpreter's exit the group is shut down, within its limits."""
    code, output = run(stage, "leave", argument, start_method=method, **QUICK)
    assert code == 0
    assert ("sending SIGTERM" in output) == (argument is not None)
    assert "Traceback" not in output


@pytest.mark.parametrize("argument", ["quick", ["block"]])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_program_exits_though_a_daemon_thread_waits_for_a_step(stage: Stage, method: str, argument: Any) -> None:
    """The thread gets an error, or is frozen with the interpreter; neither keeps the group alive."""
    code, _ = run(stage, "leave_with_a_daemon_thread_in_a_step", argument, start_method=method, **QUICK)
    assert code == 0


@METHOD_AND_STEP
def test_an_exception_in_the_body_comes_out_of_the_with_block(stage: Stage, method: str, argument: Any) -> None:
    """The body's own error is what the program sees, whatever the group does meanwhile."""
    code, output = run(stage, "raise_in_the_body", argument, start_method=method, **QUICK)
    assert code == 1
    assert output.endswith("ValueError: the body's own error\n")
    assert output.count("Traceback") == 1


def test_an_exit_in_the_body_has_its_code(stage: Stage) -> None:
    """`sys.exit` passes through the with block."""
    assert run(stage, "exit_in_the_body") == (5, "")


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


def interrupt(embedder: Embedder, *, whole_group: bool) -> float:
    """Press Ctrl-C: a terminal sends it to the whole process group, an IDE's stop button to one process."""
    pressed_at = time.monotonic()
    if whole_group:
        os.killpg(embedder.process.pid, signal.SIGINT)
    else:
        embedder.process.send_signal(signal.SIGINT)
    return pressed_at


#: With "fork" the workers are in the program's process group, and with "spawn" not.
METHOD_AND_GROUP = pytest.mark.parametrize(
    ("method", "whole_group"), [*product(METHODS, [True]), ("spawn", False)], ids=str
)


@METHOD_AND_GROUP
def test_ctrl_c_in_a_step_ends_the_program(stage: Stage, method: str, whole_group: bool) -> None:
    """The workers don't see it; the with block ends them within the limits of a shutdown."""
    settings = stage.settings(world_size=2, start_method=method, **QUICK)
    with Embedder(stage, "step_in_a_with_block", settings, ["block"], start_new_session=True) as embedder:
        stage.wait_for("block-0", "block-1", by=embedder)
        pressed_at = interrupt(embedder, whole_group=whole_group)
        assert embedder.finish() == -signal.SIGINT
        assert time.monotonic() - pressed_at < PROMPTLY_S
    check_nothing_left()
    assert embedder.output.endswith("KeyboardInterrupt\n")
    assert embedder.output.count("Traceback") == 1


@METHOD_AND_GROUP
def test_a_second_ctrl_c_ends_the_patience_of_shutdown(stage: Stage, method: str, whole_group: bool) -> None:
    """The first would wait a minute for workers that take no notice; the second kills them."""
    settings = stage.settings(world_size=2, start_method=method, stop_timeout_s=60.0)
    with Embedder(stage, "step_in_a_with_block", settings, ["ignore_sigterm"], start_new_session=True) as embedder:
        stage.wait_for("ignore_sigterm-0", "ignore_sigterm-1", by=embedder)
        interrupt(embedder, whole_group=whole_group)
        stage.wait_for("stopping", by=embedder)
        pressed_at = interrupt(embedder, whole_group=whole_group)
        assert embedder.finish() == -signal.SIGINT
        assert time.monotonic() - pressed_at < PROMPTLY_S
    check_nothing_left()


@pytest.mark.parametrize(
    ("method", "phase", "whole_group"),
    [
        *product(["spawn", "fork"], ["spawning", "importing", "loading"], [True]),
        ("spawn", "spawning", False),
        ("spawn", "loading", False),
        ("forkserver", "loading", True),
    ],
)
def test_ctrl_c_while_the_group_starts_ends_the_program(
    stage: Stage, method: str, phase: str, whole_group: bool
) -> None:
    """Nobody waits for workers that load for minutes."""
    settings = stage.settings(world_size=2, start_method=method, at=phase)
    with Embedder(stage, "start", settings, start_new_session=True) as embedder:
        stage.wait_for(f"{phase}-0", f"{phase}-1", by=embedder)
        pressed_at = interrupt(embedder, whole_group=whole_group)
        assert embedder.finish() == -signal.SIGINT
        assert time.monotonic() - pressed_at < PROMPTLY_S
    check_nothing_left()
    assert embedder.output.endswith("KeyboardInterrupt\n")


@METHOD
def test_a_program_that_survives_ctrl_c_can_start_again(stage: Stage, method: str) -> None:
    """Nothing of the first start is in the way of the second."""
    settings = stage.settings(world_size=2, start_method=method, at="loading")
    with Embedder(stage, "interrupted_start_and_on", settings, start_new_session=True) as embedder:
        stage.wait_for("loading-0", "loading-1", by=embedder)
        interrupt(embedder, whole_group=True)
        assert embedder.finish() == 0
    check_nothing_left()
    assert embedder.output == "processes left: 0\nagain: again\n"


def test_a_ctrl_c_in_the_middle_of_a_fork_is_not_forgotten(stage: Stage) -> None:
    """It comes out when the processes are in good hands, which end them."""
    code, output = run(stage, "interrupted_fork", start_method="fork")
    assert (code, output) == (0, "interrupted\nthreads left: 0\nhandler left alone: True\nagain: again\n")


# --- Threads --------------------------------------------------------------------------------------------------------


@METHOD
def test_an_executor_outlives_the_thread_that_built_it(stage: Stage, method: str) -> None:
    """The kernel's signal at the end of a parent is one at the end of a parent's thread."""
    code, output = run(stage, "build_in_a_thread", start_method=method)
    assert (code, output.splitlines()[-1]) == (0, "20 steps")


@METHOD
def test_shutdown_may_come_twice_and_from_other_threads(stage: Stage, method: str) -> None:
    """The thread that waits for a step gets Closed; all calls return."""
    code, output = run(stage, "shut_down_from_elsewhere", start_method=method, **QUICK)
    assert code == 0
    assert output.endswith("the step: Closed\nshut down: stopped\n")


# --- Forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "child", "circumstance"),
    [
        *product(["spawn"], ["return", "sys.exit", "os._exit"], ["idle", "in_a_step", "with_a_thread"]),
        *product(["fork"], ["return"], ["idle", "in_a_step", "with_a_thread"]),
        ("forkserver", "return", "in_a_step"),
    ],
)
def test_a_fork_of_the_embedder_ends_without_harm(stage: Stage, method: str, child: str, circumstance: str) -> None:
    """The child exits with code 0, by whatever way; the parent's steps go on, the one under way included."""
    code, output = run(stage, "fork_afterwards", {"child": child, circumstance: True}, start_method=method)
    assert code == 0, output
    assert "child: 0\n" in output
    assert ("the step under way: gone\n" in output) == (circumstance == "in_a_step")
    assert output.endswith("the parent's steps: [0, 1, 2]\nthe parent's group: ready\n")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("method", "child"), [*product(["spawn", "fork"], ["del", "shutdown", "use", "own"]), ("forkserver", "use")]
)
def test_a_fork_can_neither_end_nor_use_its_parents_group(stage: Stage, method: str, child: str) -> None:
    """Sockets can't be shared by a fork: it is refused, at once, and told to start another one."""
    code, output = run(stage, "fork_afterwards", {"child": child}, start_method=method)
    assert code == 0, output
    assert "child: 0\n" in output
    assert output.count("refused: ") == (6 if child == "use" else 0)
    assert output.count("start another one here") == (6 if child == "use" else 0)
    assert output.endswith("the parent's steps: [0, 1, 2]\nthe parent's group: ready\n")


# --- SIGCHLD --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "how", "kill"),
    [*product(["spawn", "fork"], ["ignore", "reap"], [False, True]), ("forkserver", "ignore", True)],
)
def test_exit_codes_that_somebody_else_has_taken_are_not_waited_for(
    stage: Stage, measured: Callable[[str, object], None], method: str, how: str, kill: bool
) -> None:
    """A program that ignores SIGCHLD, or reaps all children, still learns of a dead worker, and shuts down at once."""
    code, output = run(stage, "ignore_sigchld", {"how": how, "kill": kill}, start_method=method)
    assert code == 0, output
    told = dict(line.split(": ") for line in output.splitlines()[-5 if kill else -3 :])
    if kill:
        assert re.fullmatch(r"1 (None|-9)", told["lost"])
        assert float(told["seconds"]) < 2.0
        measured("error_after_s", float(told["seconds"]))
    assert float(told["shutdown seconds"]) < 2.0
    assert float(told["shutdown cpu seconds"]) < 1.0
    assert told["threads left"] == "0"


# --- SIGTERM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "number"), [*product(METHODS, [signal.SIGTERM]), ("spawn", signal.SIGHUP)], ids=str)
def test_a_program_that_a_signal_ends_leaves_no_worker(stage: Stage, method: str, number: signal.Signals) -> None:
    """Without a handler there is no shutdown: the workers go by themselves."""
    settings = stage.settings(world_size=2, start_method=method)
    with Embedder(stage, "idle", settings) as embedder:
        stage.wait_for("ready", by=embedder)
        embedder.process.send_signal(number)
        assert embedder.finish() == -number
        wait_for_none_left(2.0)
        stage.wait_for_ends()
    stage.sweep()
    assert run_directories() == []
