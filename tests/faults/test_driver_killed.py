"""SIGKILL of the driver, in each phase of its workers' lives: none of them is left two seconds later."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepcast import Executor
from tests.faults.rig import METHODS, TORCH, Embedder, Stage, run_directories, wait_for_none_left

GONE_WITHIN_S = 2.0

#: By phase: what the embedder does, what with, the plan for its workers, and the notes that tell that it has come.
PHASES: dict[str, tuple[str, Any, dict[str, Any], list[str]]] = {
    "spawning": ("start", None, {"at": "spawning", "do": "wait_for_orphanhood"}, ["spawning-0", "spawning-1"]),
    "importing": ("start", None, {"at": "importing"}, ["importing-0", "importing-1"]),
    "importing in C": ("start", None, {"at": "importing", "do": "hold_gil"}, ["importing-0", "importing-1"]),
    "loading": ("start", None, {"at": "loading"}, ["loading-0", "loading-1"]),
    "loading on one rank": ("start", None, {"at": "loading", "ranks": [0]}, ["loading-0"]),
    "idle": ("idle", None, {}, ["ready"]),
    "step": ("step", ["block"], {}, ["block-0", "block-1"]),
    "step in C": ("step", ["hold_gil"], {}, ["hold_gil-0", "hold_gil-1"]),
    "stopping": ("stop", None, {"at": "stopping"}, ["stopping-0", "stopping-1"]),
}
# A fork server's workers are its children, not the driver's: no signal of the kernel's can reach them where they hold
# the GIL, since the server itself lives as long as they do.
NOT_WITH_FORKSERVER = {"spawning", "importing in C", "step in C"}
PLACES = [
    (method, phase)
    for method in METHODS
    for phase in PHASES
    if method != "forkserver" or phase not in NOT_WITH_FORKSERVER
]


@pytest.fixture(autouse=True)
def listener_of_a_dead_fork_server_removed() -> Iterator[None]:
    """Removes what multiprocessing leaves where a process dies that has a fork server."""
    yield
    for path in Path(os.environ["TMPDIR"]).glob("pymp-*"):
        shutil.rmtree(path)


def kill_driver(stage: Stage, settings: dict[str, Any], scenario: str, argument: Any, notes: list[str]) -> float:
    with Embedder(stage, scenario, settings, argument) as driver:
        stage.wait_for(*notes, by=driver)
        driver.process.kill()
        driver.process.wait()
        took_s = wait_for_none_left(GONE_WITHIN_S)
    # Now without their memory, they may still be closing their files.
    stage.wait_for_ends()
    return took_s


@pytest.mark.parametrize(("method", "phase"), PLACES)
def test_no_worker_outlives_its_driver(
    stage: Stage, measured: Callable[[str, object], None], method: str, phase: str
) -> None:
    """The workers go by themselves, also those that hold the GIL; the next start sweeps the dead run's directory."""
    scenario, argument, plan, notes = PHASES[phase]
    settings = stage.settings(world_size=2, start_method=method, **plan)

    measured("gone_after_s", kill_driver(stage, settings, scenario, argument, notes))

    assert len(run_directories()) == 1
    with Executor(stage.config(world_size=2, start_method="fork")):
        [living] = run_directories()
        assert living
    assert run_directories() == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_worker_in_a_collective_outlives_its_driver(
    stage: Stage, measured: Callable[[str, object], None], method: str
) -> None:
    """One rank waits for the other in an all-reduce."""
    pytest.importorskip("torch")
    settings = stage.settings(world_size=2, worker=TORCH, start_method=method)

    took_s = kill_driver(stage, settings, "step", {"0": "collective", "1": "block"}, ["collective-0", "block-1"])

    measured("gone_after_s", took_s)
    with Executor(stage.config(world_size=2, start_method="fork")):
        assert len(run_directories()) == 1
