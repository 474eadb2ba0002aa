"""SIGKILL of the driver, in each phase of its workers' lives: none of them is left two seconds later."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from stepcast import Executor

from tests.faults.rig import METHODS, TORCH, Stage, embedder, run_directories, wait_for_none_left

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
PLACES = [
    *((method, phase) for method in METHODS for phase in PHASES if (method, phase) != ("forkserver", "spawning")),
]


def kill_driver(stage: Stage, settings: dict[str, Any], scenario: str, argument: Any, notes: list[str]) -> float:
    with embedder(scenario, settings, argument) as driver:
        stage.wait_for(*notes, by=driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        return wait_for_none_left(GONE_WITHIN_S)


@pytest.mark.parametrize(("method", "phase"), PLACES)
def test_no_worker_outlives_its_driver(
    stage: Stage, record_property: Callable[[str, object], None], method: str, phase: str
) -> None:
    """The workers go by themselves, those included that hold the GIL; the next start sweeps the dead run's directory."""
    scenario, argument, plan, notes = PHASES[phase]
    settings = stage.settings(world_size=2, start_method=method, **plan)

    record_property("gone_after_s", kill_driver(stage, settings, scenario, argument, notes))

    assert len(run_directories()) == 1
    with Executor(stage.config(world_size=2, start_method="fork")):
        [living] = run_directories()
        assert living
    assert run_directories() == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_worker_in_a_collective_outlives_its_driver(
    stage: Stage, record_property: Callable[[str, object], None], method: str
) -> None:
    """One rank waits for the other in an all-reduce."""
    pytest.importorskip("torch")
    settings = stage.settings(world_size=2, worker=TORCH, start_method=method)

    took_s = kill_driver(stage, settings, "step", ["collective", "block", 1], ["collective-0", "block-1"])

    record_property("gone_after_s", took_s)
    with Executor(stage.config(world_size=2, start_method="fork")):
        assert len(run_directories()) == 1
