"""The scenarios of `stepcast chaos` under torchrun: some of each kind, or with `--all-chaos` all that apply."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from stepcast.runtime.testing import suite
from stepcast.runtime.testing.chaos import Outcome
from stepcast.runtime.testing.scenarios import SCENARIOS
from tests.e2e.command import stepcast

SOME = (
    "kill-in-step",
    "kill-in-collective",
    "stopped-is-found",
    "raise-in-step",
    "drop-step",
    "cut-and-heal",
    "stuck-past-limit",
    "kill-driver-in-step",
    "kill-front-end",
)
RANKS = 3
SEED = 11


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        everywhere = metafunc.config.getoption("--all-chaos")
        applicable = [each.name for each in suite.choose((), "torchrun")[0]]
        metafunc.parametrize("name", applicable if everywhere else SOME)


def test_a_scenario_ends_as_under_mp(name: str) -> None:
    """The same error, the same verdict; nothing hangs, nothing is left, and the agent need not wait for a rank."""
    chosen, _ = suite.choose((name,), "torchrun")
    [outcome] = suite.play_each(chosen, backend="torchrun", start_method=None, world_size=RANKS, seed=SEED)
    assert isinstance(outcome, Outcome)
    assert outcome.passed, outcome


def test_what_does_not_apply_is_told_with_the_reason() -> None:
    """Nothing is left out in silence."""
    chosen, others = suite.choose((), "torchrun")
    assert {each.name for each in chosen} | {each.scenario for each in others} == {each.name for each in SCENARIOS}
    assert all(each.not_applicable for each in others)
    done = stepcast("chaos", "--backend", "torchrun", "--json", "--scenario", "fork-with-threads-then-exit")
    assert done.returncode == 0
    [told] = json.loads(done.stdout)
    assert told["not_applicable"] == "no rank is forked from the driver there"
