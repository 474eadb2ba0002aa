"""What each rank is told, and the environment it gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepcast import ConfigError, ExecutorConfig, Worker
from stepcast.bus.endpoints import RunDirectory
from stepcast.runtime.launch.plan import plan_ranks, rank_environment, worker_spec
from stepcast.runtime.state import Life
from stepcast.workers.boot_config import BootConfig
from stepcast.workers.death_watch import process_start_time
from stepcast.workers.echo import Echo

RUN_ID = bytes(range(16))


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    made = RunDirectory()
    yield made
    made.remove()


def plan(directory: RunDirectory, **settings: Any) -> tuple[ExecutorConfig, list[BootConfig]]:
    config = ExecutorConfig(**{"worker": "module:Class", "world_size": 3, **settings})
    return config, plan_ranks(config, directory, Life(RUN_ID), die_with_driver=True)


def test_every_rank_is_told_its_place_and_where_to_find_the_others(directory: RunDirectory) -> None:
    """All is given by value; endpoints lie in the run's private directory, and so does the rendezvous."""
    config, boots = plan(directory, output_rank=2, worker_options={"a": {1: [2]}}, device="cpu")
    assert [(boot.rank, boot.local_rank, boot.world_size, boot.epoch) for boot in boots] == [
        (rank, rank, 3, 1) for rank in range(3)
    ]
    for boot in boots:
        assert boot.publish_endpoint == f"ipc://{directory.path}/publish"
        assert boot.reply_endpoint == f"ipc://{directory.path}/replies"
        assert boot.rendezvous == f"file://{directory.path}/rendezvous-1"
        assert (boot.driver_pid, boot.driver_start_time) == (os.getpid(), process_start_time(os.getpid()))
        assert (boot.run_id, boot.output_rank, boot.options) == (RUN_ID, 2, {"a": {1: [2]}})
        assert (boot.worker, boot.arguments, boot.die_with_driver) == ("module:Class", sys.argv, True)
        for name in ("device", "max_message_bytes", "startup_timeout_s", "reply_timeout_s", "linger_s", "log_level"):
            assert getattr(boot, name) == getattr(config, name)
        assert BootConfig.from_bytes(boot.to_bytes()) == boot


def test_a_new_epoch_has_a_new_rendezvous(directory: RunDirectory) -> None:
    """No process group is ever joined again."""
    config, _ = plan(directory)
    boots = plan_ranks(config, directory, Life(RUN_ID, 2), die_with_driver=False)
    assert {(boot.epoch, boot.rendezvous) for boot in boots} == {(2, f"file://{directory.path}/rendezvous-2")}


def test_each_rank_has_an_environment_of_its_own(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder's, with the rank in it; the embedder's own is left alone."""
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("RANK", "of the embedder")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    config, boots = plan(directory, worker_env={"EXTRA": "e", "MINE": "2"})
    for rank, environment in enumerate(rank_environment(config, boot) for boot in boots):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert (environment["EXTRA"], environment["MINE"], environment["OMP_NUM_THREADS"]) == ("e", "2", "1")
        own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA", "MINE"}
        assert {name: value for name, value in environment.items() if name not in own} == {
            name: value for name, value in before.items() if name not in own
        }
    assert dict(os.environ) == before


def test_a_card_that_the_parent_was_bound_to_is_not_every_ranks(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HLS_MODULE_ID is the parent's own, unless the embedder gives it on purpose."""
    monkeypatch.setenv("HLS_MODULE_ID", "3")
    config, boots = plan(directory)
    assert all("HLS_MODULE_ID" not in rank_environment(config, boot) for boot in boots)
    config, boots = plan(directory, worker_env={"HLS_MODULE_ID": "5"})
    assert {rank_environment(config, boot)["HLS_MODULE_ID"] for boot in boots} == {"5"}


def test_the_embedders_number_of_threads_holds(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a rank is only what nobody has said otherwise; a single rank has them all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    config, boots = plan(directory)
    assert rank_environment(config, boots[0])["OMP_NUM_THREADS"] == "4"
    monkeypatch.delenv("OMP_NUM_THREADS")
    config, boots = plan(directory, world_size=1)
    assert "OMP_NUM_THREADS" not in rank_environment(config, boots[0])


# How a class is named.


class OfThisModule(Worker):
    """A class that another process can import, if it can import this module."""

    class Inner(Worker):
        """One inside it."""


def test_a_name_is_kept_and_a_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker may change its directory before it loads the class."""
    monkeypatch.chdir(tmp_path)
    assert worker_spec("package.module:Class") == "package.module:Class"
    assert worker_spec("scripts/mine.py:Outer.Inner") == f"{tmp_path}/scripts/mine.py:Outer.Inner"
    assert worker_spec("/abs/mine.py:Class") == "/abs/mine.py:Class"


def test_a_class_is_named_by_its_module() -> None:
    """With the classes around it."""
    assert worker_spec(Echo) == "stepcast.workers.echo:Echo"
    assert worker_spec(OfThisModule.Inner) == f"{__name__}:OfThisModule.Inner"


def main_module(monkeypatch: pytest.MonkeyPatch, *, spec: str | None = None, name: str = "Mine") -> type[Worker]:
    """Stand in for the program's main module, and define a class there."""
    module = ModuleType("__main__")
    if spec is not None:
        module.__spec__ = ModuleType("spec")  # type: ignore[assignment]
        module.__spec__.name = spec  # type: ignore[union-attr]
    monkeypatch.setitem(sys.modules, "__main__", module)
    return type(name, (Worker,), {"__module__": "__main__", "__qualname__": name})


def test_a_class_of_the_main_module_is_named_by_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m package.module` and `python -m package`."""
    assert worker_spec(main_module(monkeypatch, spec="package.module")) == "package.module:Mine"
    assert worker_spec(main_module(monkeypatch, spec="package.__main__")) == "package.__main__:Mine"


def test_a_class_that_was_typed_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no file that another process could load."""
    with pytest.raises(ConfigError, match=r"worker=Mine: it was defined interactively.*define it in a file"):
        worker_spec(main_module(monkeypatch))


def test_a_class_of_a_function_is_refused() -> None:
    """It exists only while the function runs."""

    class Local(Worker):
        pass

    with pytest.raises(ConfigError, match=r"a class defined in a function.*define it at the top level of a module"):
        worker_spec(Local)
