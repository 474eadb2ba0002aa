"""Finding the worker's class: in a module, or in the script that builds the executor."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepcast import AsyncExecutor, ConfigError, Executor, ExecutorConfig, Worker
from stepcast.workers import loading
from stepcast.workers.echo import Echo
from stepcast.workers.loading import SCRIPT_MODULE, ScriptReachedExecutorError, load_worker_class

CLASS = """
from stepcast import AsyncExecutor, Executor, ExecutorConfig, Worker

class Mine(Worker):
    pass

class Outer:
    class Inner(Worker):
        pass

anything = 7
"""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules of a test's own folder can be imported, and are forgotten after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, *parts: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts))
    return str(path)


def test_a_class_is_found_in_its_module(tmp_path: Path) -> None:
    """Already imported or not, in a package or not, inside another class or not."""
    assert load_worker_class("stepcast.workers.echo:Echo") is Echo
    write(tmp_path / "module_of_mine.py", CLASS)
    assert load_worker_class("module_of_mine:Mine").__module__ == "module_of_mine"
    write(tmp_path / "package_of_mine/__init__.py", "")
    write(tmp_path / "package_of_mine/part.py", CLASS)
    found = load_worker_class("package_of_mine.part:Outer.Inner")
    assert found.__qualname__ == "Outer.Inner"
    assert sys.modules["package_of_mine"].part.Outer.Inner is found


def test_a_module_is_loaded_once(tmp_path: Path) -> None:
    """As by an import: a second class comes from the same module."""
    write(tmp_path / "module_of_mine.py", CLASS)
    load_worker_class("module_of_mine:Mine")
    module = sys.modules["module_of_mine"]
    load_worker_class("module_of_mine:Outer.Inner")
    assert sys.modules["module_of_mine"] is module


def test_a_class_is_found_in_its_script(tmp_path: Path) -> None:
    """By the script's path; there it is not called __main__, so that a guard holds."""
    path = write(tmp_path / "script.py", CLASS, "if __name__ == '__main__': raise RuntimeError", "name = __name__")
    found = load_worker_class(f"{path}:Mine")
    assert found.__module__ == SCRIPT_MODULE == sys.modules[SCRIPT_MODULE].name
    assert issubclass(found, Worker)


BUILDS = {
    "Executor": "Executor(ExecutorConfig(worker=Mine, world_size=2))",
    "AsyncExecutor": (
        "import asyncio\n"
        "async def main():\n"
        "    async with AsyncExecutor(ExecutorConfig(worker=Mine, world_size=2)): pass\n"
        "asyncio.run(main())"
    ),
    "a thread": (
        "import concurrent.futures\n"
        "with concurrent.futures.ThreadPoolExecutor() as pool:\n"
        "    pool.submit(Executor, ExecutorConfig(worker=Mine, world_size=2)).result()"
    ),
    "a handler of everything": (
        "try:\n    Executor(ExecutorConfig(worker=Mine, world_size=2))\nexcept BaseException:\n    raise SystemExit(3)"
    ),
}


@pytest.mark.parametrize("kind", ["script", "module"])
@pytest.mark.parametrize("build", BUILDS)
def test_the_line_that_builds_the_executor_is_the_last_that_is_run(tmp_path: Path, kind: str, build: str) -> None:
    """However it builds it, and whatever it makes of being stopped; no group is started."""
    path = write(tmp_path / "starts.py", CLASS, BUILDS[build], "raise RuntimeError('below the executor')")
    spec = path if kind == "script" else "starts"
    found = load_worker_class(f"{spec}:Mine", own_process=True)
    assert found.__name__ == "Mine"


def test_after_the_loading_executors_may_be_built(tmp_path: Path) -> None:
    """What was stopped once is not stopped for ever; nor does a script that failed leave anything behind."""
    stops = write(tmp_path / "stops.py", CLASS, BUILDS["Executor"])
    load_worker_class(f"{stops}:Mine", own_process=True)
    fails = write(tmp_path / "fails.py", CLASS, "raise LookupError('on its own')")
    for spec in (f"{fails}:Mine", "fails:Mine"):
        with pytest.raises(LookupError, match="on its own"):
            load_worker_class(spec, own_process=True)
    assert "fails" not in sys.modules
    loading.stop_if_loading_script()
    with Executor(ExecutorConfig(worker=Echo)) as executor:
        assert executor.step(1) == 1


def test_in_the_embedders_process_only_the_script_itself_is_stopped(tmp_path: Path) -> None:
    """Another thread may build an executor while a script is loaded there."""
    path = write(
        tmp_path / "script.py",
        CLASS,
        "import sys",
        "sys.modules['shared_with_test'].meet.wait(30)",
        "sys.modules['shared_with_test'].meet.wait(30)",
        BUILDS["Executor"],
    )
    shared: Any = type(sys)("shared_with_test")
    shared.meet = threading.Barrier(2)
    sys.modules["shared_with_test"] = shared
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(load_worker_class, f"{path}:Mine")
        shared.meet.wait(30)
        loading.stop_if_loading_script()
        shared.meet.wait(30)
        assert found.result(30).__name__ == "Mine"


def test_a_worker_may_not_build_executors_while_it_is_imported(tmp_path: Path) -> None:
    """In its own process no thread may: it would start groups within groups."""
    path = write(
        tmp_path / "script.py",
        "import threading",
        CLASS,
        "from stepcast.workers import loading",
        "caught = []",
        "def build():",
        "    try: loading.stop_if_loading_script()",
        "    except BaseException as error: caught.append(error)",
        "thread = threading.Thread(target=build)",
        "thread.start()",
        "thread.join()",
    )
    load_worker_class(f"{path}:Mine", own_process=True)
    assert isinstance(sys.modules[SCRIPT_MODULE].caught[0], ScriptReachedExecutorError)


def test_a_missing_class_is_told(tmp_path: Path) -> None:
    """And where it must stand, if the script was stopped before its end."""
    path = write(tmp_path / "script.py", CLASS)
    with pytest.raises(ConfigError, match=r"script\.py has no Missing: the worker's class must be defined there$"):
        load_worker_class(f"{path}:Missing")
    with pytest.raises(ConfigError, match=r"^script has no Outer\.Missing: the worker's class must be defined there$"):
        load_worker_class("script:Outer.Missing")
    below = write(tmp_path / "below.py", CLASS, BUILDS["Executor"], "class Below(Worker): pass")
    for spec in (f"{below}:Below", "below:Below"):
        with pytest.raises(ConfigError, match=r"has no Below: .* above the line that builds the executor$"):
            load_worker_class(spec)


def test_what_is_no_worker_is_refused(tmp_path: Path) -> None:
    """A function, a value, or a class of another kind."""
    path = write(tmp_path / "script.py", CLASS)
    for name in ("anything", "Outer", "ExecutorConfig"):
        with pytest.raises(ConfigError, match=rf"{name} is not a subclass of stepcast\.Worker$"):
            load_worker_class(f"{path}:{name}")


def test_what_importing_raises_is_raised(tmp_path: Path) -> None:
    """A missing module, a missing file, a syntax error, an exit."""
    broken = write(tmp_path / "broken.py", "class Mine(")
    exits = write(tmp_path / "exits.py", "raise SystemExit(3)")
    for spec, error in (
        ("no_such_module_here:Mine", ModuleNotFoundError),
        ("no_such_package.module:Mine", ModuleNotFoundError),
        (f"{tmp_path}/none.py:Mine", FileNotFoundError),
        (f"{broken}:Mine", SyntaxError),
        ("broken:Mine", SyntaxError),
        (f"{exits}:Mine", SystemExit),
    ):
        with pytest.raises(error):
            load_worker_class(spec)
    assert SCRIPT_MODULE not in sys.modules


def test_a_module_that_puts_something_else_in_its_place_is_honoured(tmp_path: Path) -> None:
    """As by an import."""
    write(tmp_path / "lazy_module.py", "import sys, stepcast.workers.echo as echo", "sys.modules[__name__] = echo")
    assert load_worker_class("lazy_module:Echo") is Echo


def test_nothing_is_stopped_elsewhere() -> None:
    """Where no script is loaded, executors of both kinds are built."""
    loading.stop_if_loading_script()

    async def main() -> None:
        async with AsyncExecutor(ExecutorConfig(worker=Echo)) as executor:
            assert await executor.step(1) == 1

    asyncio.run(main())
