"""`stepcast chaos`: its table, its JSON and its scenarios."""

from __future__ import annotations

import itertools
import json
import random

import pytest

pytest.importorskip("typer")

from stepcast.runtime.testing.chaos import Scenario, play
from stepcast.runtime.testing.scenarios import SCENARIOS
from stepcast.runtime.testing.soak import soak
from tests.e2e.command import stepcast

METHODS = ("spawn", "fork", "forkserver")
SEED = 20261202
#: Draws a kill first, with and without faults of frames.
SOAK_SEED = 735
#: A sample in which every pair of world size and start method occurs; the command runs all.
PAIRS = list(itertools.product((2, 4), METHODS))
SAMPLE = list(zip(random.Random(SEED).sample(SCENARIOS, len(PAIRS)), PAIRS, strict=True))


@pytest.mark.parametrize(
    ("scenario", "size", "method"), [pytest.param(s, n, m, id=f"{s.name}-{n}-{m}") for s, (n, m) in SAMPLE]
)
def test_a_scenario_ends_as_expected(scenario: Scenario, size: int, method: str) -> None:
    """The error is the expected one, nothing hangs and nothing is left."""
    if "Collective" in scenario.settings.get("worker", ""):
        pytest.importorskip("torch")
    outcome = play(scenario, world_size=size, start_method=method, seed=SEED)
    assert outcome.passed, outcome


def test_an_unexpected_end_is_no_pass() -> None:
    """A scenario that breaks its promise is told of."""
    kill = next(each for each in SCENARIOS if each.name == "kill-idle")
    outcome = play(Scenario("wrong", "none", kill.play), world_size=2, start_method="fork", seed=SEED)
    assert (outcome.passed, outcome.seen) == (False, "WorkerLost")


def test_json_and_table() -> None:
    """One object for each scenario; the table has the same."""
    arguments = ["chaos", "--scenario", "kill-idle", "--start-method", "fork"]
    [told] = json.loads(stepcast(*arguments, "--json").stdout)
    assert (told["scenario"], told["passed"], told["lost_steps"], told["leaks"]) == ("kill-idle", True, 0, [])
    assert told["detected_ms"] <= told["released_ms"]
    table = stepcast(*arguments).stdout
    assert "kill-idle" in table
    assert "WorkerLost" in table


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_soak_hangs_leaks_and_loses_nothing(method: str, request: pytest.FixtureRequest) -> None:
    """Every step has one outcome, and nothing grows; `--soak-seconds 600` makes it last."""
    report = soak(request.config.getoption("--soak-seconds"), world_size=2, start_method=method, seed=SOAK_SEED)
    assert report.passed, report
    assert report.faults
    assert report.answered > 0
    assert report.restarts > 0, report


def test_the_soak_of_the_command_tells_what_it_did() -> None:
    """The table, and the exit code."""
    told = json.loads(stepcast("chaos", "--soak", "1", "--seed", "1", "--json").stdout)
    assert (told["passed"], told["seed"], told["leaks"], told["problem"]) == (True, 1, [], None)
    assert told["submitted"] == told["answered"] + told["failed"] > 0


def test_scenarios_are_listed_and_unknown_ones_refused() -> None:
    """At least 25, each with a name of its own."""
    names = stepcast("chaos", "--list").stdout.split()
    assert len(set(names)) == len(names) >= 25
    refused = stepcast("chaos", "--scenario", "explode")
    assert refused.returncode == 2
    assert "no scenario explode" in refused.stderr
