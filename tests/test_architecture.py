"""The rooms know of each other in one direction only, and stay small."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import ROOT

#: Each room and the rooms that it may import from.
ALLOWED = {
    "bus": {"bus"},
    "workers": {"workers", "bus"},
    "runtime": {"runtime", "workers", "bus"},
    "stepcast": {"stepcast", "runtime", "workers", "bus"},
}
HEAVY = {"numpy", "torch", "transformers"}
#: What the bus must not know of, wherever it is imported.
NOT_IN_BUS = {"torch", "transformers", "multiprocessing", "subprocess"}
MAX_LINES = 400
#: Folders that exist on somebody's machine only.
ABSOLUTE_PATH = re.compile(r"(?<![\w./-])/(?:home|mnt|opt|root|srv|Users|work)/")

MODULES = sorted(path for room in ALLOWED for path in (ROOT / room).rglob("*.py"))
SOURCES = sorted(path for folder in (*ALLOWED, "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """A module that another one imports.

    Attributes:
        name: its full name.
        line: where.
        at_import: whether importing the one imports the other, or only a call of a function does.
    """

    name: str
    line: int
    at_import: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "stepcast" else ("stepcast", *parts)).removesuffix(".__init__")


def imports_of(path: Path) -> list[Import]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), package, at_import=True))


def _imports(node: ast.AST, package: str, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                ancestors = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*ancestors, *filter(None, [base])])
            # `from stepcast import runtime` imports stepcast.runtime.
            yield from (Import(f"{base}.{alias.name}", child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, package, at_import=False)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, at_import=at_import and not is_function)


def room_of(name: str) -> str | None:
    package, _, rest = name.partition(".")
    if package != "stepcast":
        return None
    room = rest.partition(".")[0]
    return room if room in ALLOWED else "stepcast"


def describe(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"


def test_the_import_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path)
    module = tmp_path / "runtime" / "launch" / "example.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch.distributed as dist\n"
        "from . import plan\n"
        "from ..config import ExecutorConfig\n"
        "from stepcast import Executor\n"
        "class A:\n"
        "    import zmq\n"
        "    def method(self):\n"
        "        from stepcast.bus.codec import encode\n"
        "if TYPE_CHECKING:\n"
        "    import numpy\n"
    )

    found = {(each.name, each.at_import) for each in imports_of(module)}

    assert found == {
        ("typing.TYPE_CHECKING", True),
        ("torch.distributed", True),
        ("stepcast.runtime.launch.plan", True),
        ("stepcast.runtime.config.ExecutorConfig", True),
        ("stepcast.Executor", True),
        ("zmq", True),
        ("stepcast.bus.codec.encode", False),
        ("numpy", False),
    }
    assert [room_of(name) for name in ("stepcast.Executor", "stepcast.bus.codec", "zmq", "stepcast")] == [
        "stepcast",
        "bus",
        None,
        "stepcast",
    ]


def test_dependencies_point_one_way() -> None:
    wrong = [
        describe(path, each)
        for path in MODULES
        for each in imports_of(path)
        if (room := room_of(each.name)) is not None and room not in ALLOWED[path.relative_to(ROOT).parts[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_neither_its_tests_nor_its_benchmarks() -> None:
    # Nor its rooms by their folders' names, which are none of an installation's modules.
    not_ours = {"tests", "benchmarks", "bus", "runtime", "workers"}
    wrong = [
        describe(path, each) for path in MODULES for each in imports_of(path) if each.name.partition(".")[0] in not_ours
    ]
    assert not wrong, "\n".join(wrong)


def test_the_bus_knows_neither_torch_nor_processes() -> None:
    wrong = [
        describe(path, each)
        for path in MODULES
        if path.is_relative_to(ROOT / "bus")
        for each in imports_of(path)
        if each.name.partition(".")[0] in NOT_IN_BUS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_driver_needs_no_heavy_library_at_import() -> None:
    wrong = [
        describe(path, each)
        for path in MODULES
        if not path.is_relative_to(ROOT / "workers")
        for each in imports_of(path)
        if each.at_import and each.name.partition(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["stepcast", "stepcast.runtime", "stepcast.bus", "stepcast.workers.boot", "stepcast.workers.echo"]
)
def test_importing_it_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)

    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_modules_stay_short() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    wrong = [
        f"{path.relative_to(ROOT)} has {count} lines: split it by what it knows"
        for path, count in lines.items()
        if count > MAX_LINES and not path.is_relative_to(ROOT / "tests")
    ]
    assert not wrong, "\n".join(wrong)


def test_sources_name_no_machines_own_folders() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ABSOLUTE_PATH.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    folders = dict(re.split(r"\s*=\s*", line) for line in config["options"]["package_dir"].strip().splitlines())

    there = {module_name(path): str(path.parent.relative_to(ROOT)) for path in MODULES if path.name == "__init__.py"}

    assert folders == there
    assert sorted(listed) == sorted(there)
    assert {str(path.parent.relative_to(ROOT)) for path in MODULES} == set(there.values()), "__init__.py is missing"
