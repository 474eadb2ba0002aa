"""spawn, fork and forkserver: a group comes up from a script, with and without a guard, and from a module."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepcast import Executor, ExecutorConfig
from stepcast.runtime.launch.mp import _main_module_left_out
from tests.harness import ROOT

WORKERS = Path(__file__).with_name("workers_for_tests.py")
METHODS = ("spawn", "fork", "forkserver")
#: A script that started itself again and again would be stopped here.
MAX_DEPTH = 2

PRELUDE = f"""
import json
import os
import sys

depth = int(os.environ.get("DEPTH", "0")) + 1
if depth > {MAX_DEPTH}:
    os.write(2, b"started within a worker within a worker\\n")
    os._exit(9)
os.environ["DEPTH"] = str(depth)
print("top of the script in", "a worker" if depth > 1 else "the driver", file=sys.stderr, flush=True)

from stepcast import AsyncExecutor, Executor, ExecutorConfig, Worker

def config(worker, **settings):
    return ExecutorConfig(worker=worker, world_size=2, backend="mp", start_method=sys.argv[1], **settings)
"""

CLASS = """
class Mine(Worker):
    def setup(self, rank):
        self.rank = rank.rank

    def execute(self, step):
        return [self.rank, step]
"""

RUN = """
with Executor(config(Mine)) as executor:
    print(json.dumps(executor.step("hello", gather=True)))
"""

ANSWER = [[0, "hello"], [1, "hello"]]


def script(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in (PRELUDE, *parts))


def run(*command: str, cwd: Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    assert "within a worker" not in done.stderr
    return done


def run_script(directory: Path, text: str, method: str, **options: Any) -> subprocess.CompletedProcess[str]:
    path = directory / "mine.py"
    path.write_text(text)
    return run(str(path), method, cwd=directory, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_script_needs_no_guard(tmp_path: Path, method: str) -> None:
    """The class is defined in the script, above the line that builds the executor; what stands below runs once."""
    done = run_script(tmp_path, script(CLASS, RUN, 'print("the end")'), method)
    assert done.stdout.splitlines() == [json.dumps(ANSWER), "the end"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_guarded_script_works_as_well(tmp_path: Path, method: str) -> None:
    """The guard holds in the workers: there the script has another name."""
    guarded = 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(RUN), "    ")
    done = run_script(tmp_path, script(CLASS, guarded), method)
    assert json.loads(done.stdout) == ANSWER


@pytest.mark.parametrize("method", METHODS)
def test_an_asynchronous_script_needs_no_guard(tmp_path: Path, method: str) -> None:
    """The executor is built in a thread of asyncio's there."""
    text = script(
        CLASS,
        """
        import asyncio

        async def main():
            async with AsyncExecutor(config(Mine)) as executor:
                print(json.dumps(await executor.step("hello", gather=True)))

        asyncio.run(main())
        """,
    )
    assert json.loads(run_script(tmp_path, text, method).stdout) == ANSWER


@pytest.mark.parametrize(
    ("method", "guarded"), [("spawn", False), ("fork", False), ("forkserver", False), ("spawn", True)]
)
def test_a_module_that_is_run_is_its_workers_module(tmp_path: Path, method: str, guarded: bool) -> None:
    """`python -m package.module`, with imports relative to its package."""
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("GREETING = 'hello'\n")
    text = RUN.replace('"hello"', "GREETING")
    if guarded:
        text = 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(text), "    ")
    (package / "tool.py").write_text(script("from .parts import GREETING", CLASS, text))
    done = run("-m", "mypackage.tool", method, cwd=tmp_path)
    assert json.loads(done.stdout) == ANSWER


def test_a_package_that_is_run_is_its_workers_module(tmp_path: Path) -> None:
    """`python -m package` runs its `__main__` module, where the class is found again."""
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(script(CLASS, RUN))
    assert json.loads(run("-m", "mypackage", "spawn", cwd=tmp_path).stdout) == ANSWER


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_class_of_another_module_is_named_or_given(tmp_path: Path, method: str) -> None:
    """As the class, as module:Class and as path:Class; found where the embedder's own imports find it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/their_workers.py").write_text("from stepcast import Worker\n" + CLASS)
    text = script(
        """
        sys.path.insert(0, "elsewhere")
        from their_workers import Mine
        for worker in (Mine, "their_workers:Mine", "elsewhere/their_workers.py:Mine"):
            with Executor(config(worker)) as executor:
                print(json.dumps(executor.step("hello", gather=True)))
        """
    )
    done = run_script(tmp_path, text, method)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [ANSWER] * 3


def test_a_class_inside_a_class_is_found(tmp_path: Path) -> None:
    """By its qualified name."""
    nested = "class Outer:\n" + textwrap.indent(CLASS, "    ")
    done = run_script(tmp_path, script(nested, RUN.replace("Mine", "Outer.Mine")), "spawn")
    assert json.loads(done.stdout) == ANSWER


def test_a_script_that_catches_everything_is_stopped_all_the_same(tmp_path: Path) -> None:
    """What it makes of being stopped in a worker does not matter; the class is there."""
    text = script(
        CLASS,
        """
        try:
            executor = Executor(config(Mine))
        except BaseException:
            print("caught", file=sys.stderr, flush=True)
            raise SystemExit(5)
        with executor:
            print(json.dumps(executor.step("hello", gather=True)))
        """,
    )
    done = run_script(tmp_path, text, "spawn")
    assert json.loads(done.stdout) == ANSWER


def test_a_class_below_the_executor_is_told_where_it_belongs(tmp_path: Path) -> None:
    """The error says that it must stand above the line that builds the executor."""
    text = script(
        f"""
        with Executor(config({str(tmp_path / "mine.py")!r} + ":Mine")) as executor:
            pass
        """,
        CLASS,
    )
    done = run_script(tmp_path, text, "spawn", check=False)
    assert done.returncode == 1
    assert "the worker's class must be defined there above the line that builds the executor" in done.stderr


def test_a_class_typed_in_is_told_where_it_belongs(tmp_path: Path) -> None:
    """Given on the command line, where no other process can find it; a fork has it already."""
    done = run("-c", script(CLASS, RUN), "spawn", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "ConfigError: worker=Mine: it was defined interactively" in done.stderr
    assert "define it in a file" in done.stderr


def test_an_error_in_the_script_is_told_by_the_worker(tmp_path: Path) -> None:
    """One that comes before the executor is not mistaken for the line that builds it."""
    text = script("if depth > 1:\n    raise LookupError('not in a worker')", CLASS, RUN)
    done = run_script(tmp_path, text, "spawn", check=False)
    assert done.returncode == 1
    assert "failed in importing the worker's class: LookupError: not in a worker" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_several_groups_live_and_end_one_after_another(tmp_path: Path, method: str) -> None:
    """Also two at once; each has its own ranks, and nothing of the first disturbs the next."""
    text = script(
        CLASS,
        """
        first, second = Executor(config(Mine)), Executor(config(Mine))
        pids = {*first.worker_pids, *second.worker_pids}
        print(len(pids), first.step(1), second.step(2))
        first.shutdown()
        first = Executor(config(Mine))
        print(first.step(3), second.step(4))
        second.shutdown()
        first.shutdown()
        """,
    )
    done = run_script(tmp_path, text, method)
    assert done.stdout.splitlines() == ["4 [0, 1] [0, 2]", "[0, 3] [0, 4]"]
    assert "Traceback" not in done.stderr


def test_a_fork_beside_threads_is_warned_of(tmp_path: Path) -> None:
    """A lock that one of them holds stays locked in the workers; the warning names them."""
    text = script(
        CLASS,
        """
        import threading

        go_on = threading.Event()
        threading.Thread(target=go_on.wait, name="busy").start()
        try:
            with Executor(config(Mine)) as executor:
                print(json.dumps(executor.step("hello", gather=True)))
        finally:
            go_on.set()
        """,
    )
    done = run_script(tmp_path, text, "fork", PYTHONWARNINGS="ignore")
    assert json.loads(done.stdout) == ANSWER
    assert "start_method='fork' in a process with other threads (busy)" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_the_interpreters_options_and_the_embedders_handlers(tmp_path: Path, method: str) -> None:
    """Workers keep -X and -W; they drop what the embedder has set up for its signals, its streams and its exit."""
    text = script(
        """
        import atexit
        import signal

        class Mine(Worker):
            def execute(self, step):
                handlers = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)]
                return [sys.flags.dev_mode, all(handler is signal.SIG_DFL for handler in handlers), os.environ["MORE"]]

        if depth == 1:
            atexit.register(print, "exit of the driver")
            for number in (signal.SIGHUP, signal.SIGUSR2):
                signal.signal(number, lambda *_: print("the embedder's handler"))
        with Executor(config(Mine, worker_env={"MORE": "yes"})) as executor:
            print(executor.step(None), os.environ.get("MORE"))
        """
    )
    path = tmp_path / "mine.py"
    path.write_text(text)
    done = run("-X", "dev", "-W", "ignore", str(path), method, cwd=tmp_path)
    assert done.stdout.splitlines() == ["[True, True, 'yes'] None", "exit of the driver"]


def test_a_group_may_be_forked_in_a_process_that_has_had_one(tmp_path: Path) -> None:
    """A fork server, a fork and a spawn, in one process one after another."""
    text = script(
        CLASS,
        """
        for method in ("fork", "forkserver", "spawn", "fork"):
            with Executor(config(Mine).replace(start_method=method)) as executor:
                print(executor.step(method))
        """,
    )
    done = run_script(tmp_path, text, "spawn")
    assert done.stdout.splitlines() == [f"[0, {method!r}]" for method in ("fork", "forkserver", "spawn", "fork")]
    assert "Traceback" not in done.stderr


def test_a_group_starts_from_any_thread(tmp_path: Path) -> None:
    """Whichever thread builds it, the group outlives that thread."""
    text = script(
        CLASS,
        """
        import threading

        made = []
        thread = threading.Thread(target=lambda: made.append(Executor(config(Mine))))
        thread.start()
        thread.join()
        with made[0] as executor:
            print(json.dumps(executor.step("hello", gather=True)))
        """,
    )
    for method in METHODS:
        done = run_script(tmp_path, text, method, PYTHONWARNINGS="ignore")
        assert json.loads(done.stdout) == ANSWER


def test_a_spawned_group_in_this_process() -> None:
    """The guard of these tests sees that nothing is left of it."""
    with Executor(ExecutorConfig(worker=f"{WORKERS}:Obedient", world_size=2, start_method="spawn")) as executor:
        assert executor.call("whoami") == [0, 1]


def test_the_checkout_is_what_is_tested() -> None:
    """The scripts above import the package from here."""
    import stepcast.runtime  # noqa: PLC0415 - only here

    assert Path(stepcast.runtime.__file__).parent == ROOT / "runtime"


def test_a_fork_server_hides_the_main_module_from_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may start groups at once, while a third uses multiprocessing itself."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "/a/script.py", raising=False)
    prepare = multiprocessing.spawn.get_preparation_data

    def keys() -> set[str]:
        return {key for key in multiprocessing.spawn.get_preparation_data("a name") if key.startswith("init_main")}

    with ThreadPoolExecutor(1) as pool:
        with _main_module_left_out("forkserver"):
            assert keys() == set()
            assert pool.submit(keys).result(10.0) == {"init_main_from_path"}
            assert main.__file__ == "/a/script.py"
        assert keys() == {"init_main_from_path"}
    assert multiprocessing.spawn.get_preparation_data is prepare
