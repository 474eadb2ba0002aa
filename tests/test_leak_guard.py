"""The leak guard blames the test that leaks, cleans up after it, and lets clean tests pass."""

from __future__ import annotations

import os
import re

import psutil
import pytest

from tests.harness import ROOT, process_has_ended
from tests.leaks import MARK

CONFTEST = f"""
import sys

sys.path.append({str(ROOT)!r})
import tests.leaks

tests.leaks.GRACE_S = 0.5
from tests.leaks import leak_guard, session_guard
"""

PRELUDE = """
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

KEPT = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def note_pid(pid):
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{pid}\\n")


def fork(run):
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


def sleep_long():
    note_pid(os.getpid())
    time.sleep(600)
"""

LEAKY = {
    "child": """
        KEPT.append(subprocess.Popen(SLEEP))
        note_pid(KEPT[-1].pid)
    """,
    "zombie": """
        fork(lambda: None)
    """,
    "spawned_orphan": """
        code = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdout=-3, start_new_session=True).pid)"
        note_pid(int(subprocess.run([sys.executable, "-c", code], stdout=-1, check=True).stdout))
    """,
    "forked_orphan": """
        os.waitpid(fork(lambda: fork(sleep_long)), 0)
    """,
    "thread": """
        threading.Thread(target=time.sleep, args=(3,), name="left-behind").start()
    """,
    "descriptor": """
        KEPT.append(open(os.devnull))
    """,
    "file": """
        os.close(tempfile.mkstemp(prefix="left-behind")[0])
    """,
    "shared_memory": """
        with open(f"/dev/shm/left-behind-{os.getpid()}", "w"):
            pass
    """,
}

CLEAN = {
    "nothing": """
        pass
    """,
    "tidy": """
        subprocess.run([sys.executable, "-c", ""], check=True)
        thread = threading.Thread(target=print)
        thread.start()
        thread.join()
        with tempfile.TemporaryDirectory() as directory, open(os.path.join(directory, "file"), "w"):
            assert len(directory) < 60
    """,
    "still_ending": """
        threading.Thread(target=time.sleep, args=(0.2,)).start()
    """,
    "cycle": """
        cycle = [open(os.devnull)]
        cycle.append(cycle)
    """,
    "forkserver": """
        process = multiprocessing.get_context("forkserver").Process(target=print)
        process.start()
        process.join()
        process.close()
    """,
    "fixtures_clean_up": """
        request.addfinalizer(subprocess.Popen(SLEEP).wait)
        request.addfinalizer(lambda: [each.kill() for each in __import__("psutil").Process().children()])
    """,
}


def write_tests(pytester: pytest.Pytester, *parts: dict[str, str]) -> None:
    pytester.makeconftest(CONFTEST)
    bodies = [f"def test_{name}(request):{body}" for part in parts for name, body in part.items()]
    pytester.makepyfile(PRELUDE + "\n\n" + "\n\n".join(bodies))


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *arguments, timeout=100)


def test_each_leak_fails_the_test_that_left_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = pytester.path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    interleaved = {}
    for name, body in LEAKY.items():
        interleaved |= {name: body, f"clean_after_{name}": CLEAN["nothing"]}
    write_tests(pytester, interleaved)

    result = run(pytester)

    result.assert_outcomes(passed=2 * len(LEAKY), errors=len(LEAKY))
    text = result.stdout.str()
    blamed = dict(re.findall(r"::test_(\w+) left behind:\n((?:  .*\n)+)", text))
    assert blamed.keys() == LEAKY.keys(), text
    assert all(len(told.splitlines()) == 1 for told in blamed.values()), blamed
    expected = {
        "child": "time.sleep(600)",
        "zombie": "(zombie)",
        "spawned_orphan": "time.sleep(600)",
        "forked_orphan": "pytest",
        "thread": "thread 'left-behind'",
        "descriptor": "descriptor of /dev/null",
        "file": "file left-behind",
        "shared_memory": "shared memory left-behind",
    }
    for name, words in expected.items():
        assert words in blamed[name]
    noted = [int(line) for line in pids.read_text().split()]
    assert len(noted) == 3
    assert all(process_has_ended(pid) for pid in noted)


def test_tests_that_clean_up_pass(pytester: pytest.Pytester) -> None:
    write_tests(pytester, CLEAN)

    result = run(pytester)

    result.assert_outcomes(passed=len(CLEAN))


def test_a_module_fixture_may_keep_a_process_for_its_tests_but_no_longer(pytester: pytest.Pytester) -> None:
    module = """
@pytest.fixture(scope="module")
def server():
    KEPT.append(subprocess.Popen(SLEEP))
    yield
    {stop}

def test_one(server): pass
def test_two(server): pass
"""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_stops=PRELUDE + module.format(stop="KEPT[-1].kill(); KEPT[-1].wait()"),
        test_leaves=PRELUDE + module.format(stop="pass"),
    )

    run(pytester, "test_stops.py").assert_outcomes(passed=2)
    result = run(pytester, "test_leaves.py")

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*fixtures left processes:*", "*time.sleep(600)*"])


def test_every_test_has_its_own_directory_and_mark() -> None:
    assert os.environ["TMPDIR"] == os.environ["XDG_RUNTIME_DIR"]
    assert len(os.environ["TMPDIR"]) < 20
    assert os.environ[MARK] not in psutil.Process().environ().values()
