"""`faulty_group`, the fixture for embedders: it shuts groups down, and fails a test that leaves something behind."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from stepcast import ExecutorConfig
from stepcast.testing import FaultyGroup

CONFIG = """
import os
import subprocess
import sys
import threading

from stepcast import ExecutorConfig
from stepcast.runtime.testing import plugin

plugin.LEAK_GRACE_S = 0.5
CONFIG = ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=2, startup_timeout_s=60.0)
KEPT = []
"""

CLEAN = """
def test_unused(faulty_group):
    pass

def test_answers(faulty_group):
    group = faulty_group(CONFIG, frame_faults=True)
    group.frames.drop(1)
    assert group.executor.step("a step", gather=True) == ["a step"] * 2

def test_two_groups_of_which_one_is_stopped_and_one_killed(faulty_group):
    first, second = faulty_group(CONFIG), faulty_group(CONFIG)
    first.stop(1)
    second.kill(0)

def test_large_arrays(faulty_group):
    numpy = __import__("pytest").importorskip("numpy")
    faulty_group(CONFIG).executor.step(numpy.zeros(1 << 20))
"""

LEAKY = """
def test_descriptor(faulty_group):
    faulty_group(CONFIG)
    KEPT.append(open(os.devnull))

def test_thread(faulty_group):
    threading.Thread(target=threading.Event().wait, args=(3,), name="left-behind").start()

def test_process(faulty_group):
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))

def test_forgotten_group(faulty_group):
    from stepcast import Executor
    KEPT.append(Executor(CONFIG))

def test_clean_after_all(faulty_group):
    for kept in KEPT:
        if isinstance(kept, subprocess.Popen):
            kept.communicate()
        elif hasattr(kept, "shutdown"):
            kept.shutdown()
        else:
            kept.close()
"""

#: What pytest's start must not import.
HEAVY = ("torch", "numpy", "zmq", "msgpack", "stepcast.runtime.config", "stepcast.runtime.testing.group")


def run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "no:randomly", "-W", "error", timeout=100)


def test_clean_tests_pass(pytester: pytest.Pytester) -> None:
    """Whatever state their groups are in at the end."""
    outcomes = run(pytester, CONFIG + CLEAN).parseoutcomes()
    assert outcomes.get("passed", 0) + outcomes.get("skipped", 0) == 4
    assert set(outcomes) <= {"passed", "skipped"}


def test_what_a_test_leaves_fails_it(pytester: pytest.Pytester) -> None:
    """And it alone; the message tells what was left."""
    result = run(pytester, CONFIG + LEAKY)
    result.assert_outcomes(passed=5, errors=4)
    told = re.findall(r"(?:at teardown of test_(\w+) _|left behind:\n((?:  .*\n)+))", result.stdout.str())
    names, lines = [name for name, _ in told if name], [line for _, line in told if line]
    assert names == ["descriptor", "thread", "process", "forgotten_group"]
    for words, line in zip(("/dev/null", "'left-behind'", "process ", "run directory "), lines, strict=True):
        assert words in line


def test_pytest_starts_without_what_is_heavy(pytester: pytest.Pytester) -> None:
    """Not even a project that has stepcast installed and tests something else waits for it."""
    source = f"""
import sys

def test_nothing_was_imported():
    assert "stepcast.runtime.testing.plugin" in sys.modules
    assert not set(sys.modules) & set({HEAVY!r})
"""
    run(pytester, source).assert_outcomes(passed=1)


def test_it_goes_with_a_leak_guard(faulty_group: Callable[..., FaultyGroup]) -> None:
    """Such as this project's own, which watches this test."""
    group = faulty_group(ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=2, startup_timeout_s=60.0))
    assert group.executor.step(1, gather=True) == [1, 1]
