"""The launchers side by side: a short run of those that are here, and one that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import launchers
from benchmarks.cli import app
from benchmarks.launchers import Launched, LaunchSettings, measure_launchers, same_tokens, summarise_launched

SHORT = ["--rounds", "1", "--steps", "20", "--tokens", "0", "--ranks", "2"]


def test_each_launcher_runs_the_same_program(tmp_path: Path) -> None:
    """The start, the steps and the end of each are measured, and a failed one would be told."""
    pytest.importorskip("torch")
    out = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["--launchers", "mp,torchrun", *SHORT, "--json", str(out)])
    assert done.exit_code == 0, done.output
    [document] = json.loads(out.read_text())
    assert [result["launcher"] for result in document["results"]] == ["mp", "torchrun"]
    for result in document["results"]:
        summary = result["summary"]
        assert result["failure"] is None
        assert 0 < summary["executor_s"] < summary["ready_s"]
        assert 0 < summary["step_p50_us"] <= summary["step_p99_us"]


def test_a_launcher_that_fails_drops_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = ["-c", "raise SystemExit('RuntimeError: no luck')"]
    monkeypatch.setitem(launchers.LAUNCHERS, "broken", lambda _ranks, _logs: fails)
    settings = LaunchSettings(launchers=("broken", "mp"), world_size=1, rounds=2, steps=5, tokens=0)
    broken, mp = measure_launchers(settings)
    assert broken.failure == "RuntimeError: exit code 1: RuntimeError: no luck"
    assert summarise_launched(broken) is None
    assert len(mp.turns) == 2
    assert mp.failure is None


def test_an_unknown_launcher_is_refused() -> None:
    done = CliRunner().invoke(app, ["--launchers", "slurm", *SHORT])
    assert done.exit_code == 2
    assert "no such launcher: slurm" in done.output


def test_tokens_that_differ_are_told() -> None:
    one, other = Launched(launcher="mp"), Launched(launcher="torchrun")
    one.turns = [{"token_ids": [[1, 2]]}, {"token_ids": [[1, 2]]}]
    assert same_tokens([one, other])
    other.turns = [{"token_ids": [[1, 3]]}]
    assert not same_tokens([one, other])
