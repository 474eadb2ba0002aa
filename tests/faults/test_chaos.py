"""`stepcast chaos`: its table, its JSON and its scenarios."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable

import pytest

pytest.importorskip("typer")

from stepcast.bus.verdicts import Verdict
from stepcast.runtime import inbox
from stepcast.runtime.testing.chaos import Record, Scenario, play
from stepcast.runtime.testing.scenarios import SCENARIOS
from stepcast.runtime.testing.soak import soak
from stepcast.runtime.testing.stage import RankScenario
from tests.e2e.command import stepcast
from tests.harness import ROOT

METHODS = ("spawn", "fork", "forkserver")
SIZES = (2, 4)
SEED = 20261202
#: Draws a kill first, with and without faults of frames.
SOAK_SEED = 735

Run = tuple[Scenario, int, str]


def needs_torch(scenario: Scenario) -> bool:
    return "Collective" in scenario.settings.get("worker", "")


def deal(scenarios: Iterable[Scenario], sizes: tuple[int, ...]) -> list[Run]:
    """Give each scenario a world size and a start method, drawn, and each pair to as many as any other."""
    shuffled = list(scenarios)
    random.Random(SEED).shuffle(shuffled)
    return [(each, *pair) for each, pair in zip(shuffled, itertools.cycle(itertools.product(sizes, METHODS)))]


def one_of_each() -> list[Run]:
    """Each scenario once. Four ranks that import torch take four times as long on a small machine: they are two."""
    with_torch = [each for each in SCENARIOS if needs_torch(each)]
    return deal((each for each in SCENARIOS if not needs_torch(each)), SIZES) + deal(with_torch, SIZES[:1])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        everywhere = metafunc.config.getoption("--all-chaos")
        runs: list[Run] = list(itertools.product(SCENARIOS, SIZES, METHODS)) if everywhere else one_of_each()
        cases = [pytest.param(each, size, method, id=f"{each.name}-{size}-{method}") for each, size, method in runs]
        metafunc.parametrize(("scenario", "size", "method"), cases)


def test_a_scenario_ends_as_expected(
    scenario: Scenario, size: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error and the verdict are the expected ones, nothing hangs and nothing is left."""
    if needs_torch(scenario):
        pytest.importorskip("torch")
    monkeypatch.setattr(inbox, "_ANSWER_GRACE_S", 1.0)
    outcome = play(scenario, world_size=size, start_method=method, seed=SEED)
    assert outcome.passed, outcome


def test_every_size_goes_with_every_method() -> None:
    """In what is played without `--all-chaos`; and every scenario is."""
    runs = one_of_each()
    assert {(size, method) for _, size, method in runs} == set(itertools.product(SIZES, METHODS))
    assert sorted(each.name for each, _, _ in runs) == sorted(each.name for each in SCENARIOS)


@pytest.mark.parametrize(("expected", "verdict"), [("none", Verdict.GONE), ("WorkerLost", Verdict.BUSY)])
def test_an_unexpected_end_is_no_pass(expected: str, verdict: Verdict) -> None:
    """A scenario that breaks its promise is told of, be it the error or the verdict."""
    kill = next(each for each in SCENARIOS if isinstance(each, RankScenario) and each.name == "kill-idle")
    wrong = RankScenario("wrong", expected, kill.play, verdict=verdict)
    outcome = play(wrong, world_size=2, start_method="fork", seed=SEED)
    assert (outcome.passed, outcome.seen, outcome.verdict) == (False, "WorkerLost", "gone")


@pytest.mark.parametrize(
    ("seen", "expected", "told"),
    [
        (["busy", "slow", "busy"], Verdict.SLOW, Verdict.SLOW),
        (["busy", "unresponsive", "busy"], Verdict.BUSY, Verdict.UNRESPONSIVE),
        (["busy", "gone"], Verdict.BUSY, Verdict.BUSY),
        (["stopped", "idle"], Verdict.STOPPED, Verdict.STOPPED),
        (["busy", "idle"], Verdict.STOPPED, Verdict.IDLE),
        ([], Verdict.IDLE, None),
        (["idle"], None, None),
    ],
)
def test_the_verdict_that_contradicts_is_told(seen: list[str], expected: Verdict | None, told: Verdict | None) -> None:
    """A rank that was red for a while does not pass for healthy."""
    record = Record()
    for each in seen:
        record.judged(each)
    assert record.verdict(expected) is told


def test_json_and_table() -> None:
    """One object for each scenario; the table has the same."""
    arguments = ["chaos", "--scenario", "kill-idle", "--start-method", "fork"]
    [told] = json.loads(stepcast(*arguments, "--json").stdout)
    assert (told["scenario"], told["passed"], told["lost_steps"], told["leaks"]) == ("kill-idle", True, 0, [])
    assert (told["expected_verdict"], told["verdict"], told["lane"]) == ("gone", "gone", "bus")
    assert told["detected_ms"] <= told["released_ms"]
    table = stepcast(*arguments).stdout
    assert "kill-idle" in table
    assert "WorkerLost" in table
    assert "gone" in table


def test_every_scenario_is_in_the_table_of_faults() -> None:
    """And the table names no other."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!---|kind of fault)[^|]+\| ([^|]+) \|$", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row) if not name.startswith("--")]
    assert len(rows) > 20
    assert sorted(set(named)) == sorted(each.name for each in SCENARIOS)


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
