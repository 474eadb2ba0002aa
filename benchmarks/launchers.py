"""The launchers side by side: the same program, started by each of them in turn, round after round."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.report import percentiles_us

#: The command that starts the program, by launcher, in front of "-m benchmarks.launched".
LAUNCHERS: dict[str, Callable[[int, str], list[str]]] = {
    "mp": lambda _ranks, _logs: [],
    "torchrun": lambda ranks, logs: ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--log-dir={logs}"],
    "ray": lambda _ranks, _logs: [],
}
SCHEMA_VERSION = 1
_MEDIANS = ("ready_s", "executor_s", "stop_s", "tokens_per_s", "decode_step_us")
_TURN_LIMIT_S = 300.0
_END_LIMIT_S = 35.0


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What one run measures.

    Attributes:
        launchers: names of the launchers.
        world_size: ranks.
        rounds: times that each has its turn.
        steps: timed steps of echo workers in a turn.
        payload_bytes: bytes of the encoded step.
        tokens: tokens that the demo's model decodes in a turn; 0 for no model.
        seed: of the order in each round.
    """

    launchers: tuple[str, ...]
    world_size: int = 3
    rounds: int = 5
    steps: int = 1_000
    payload_bytes: int = 1_400
    tokens: int = 40
    seed: int = 0


@dataclass(kw_only=True)
class Launched:
    """What one launcher did.

    Attributes:
        launcher: its name.
        turns: the figures of each round, as `benchmarks.launched` writes them.
        failure: why it dropped out; None if it did all of its turns.
    """

    launcher: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None


def measure_launchers(settings: LaunchSettings, progress: Callable[[str], None] = lambda _: None) -> list[Launched]:
    """Measure every launcher.

    Args:
        settings: what to measure.
        progress: told what comes next.

    Returns:
        An outcome for each launcher, in order.
    """
    outcomes = {name: Launched(launcher=name) for name in settings.launchers}
    order = random.Random(settings.seed)
    for number in range(settings.rounds):
        for name in order.sample(settings.launchers, len(settings.launchers)):
            outcome = outcomes[name]
            if outcome.failure is not None:
                continue
            progress(f"round {number + 1}: {name}")
            try:
                outcome.turns.append(_turn(name, settings))
            except Exception as problem:  # noqa: BLE001 - one launcher's failure is no other's
                outcome.failure = f"{type(problem).__name__}: {problem}"
    return list(outcomes.values())


def _turn(name: str, settings: LaunchSettings) -> dict[str, Any]:
    """Run the program once."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        out, log = Path(directory, "figures.json"), Path(directory, "output")
        command = [sys.executable, *LAUNCHERS[name](settings.world_size, directory), "-m", "benchmarks.launched"]
        command += ["--backend", name, "--world-size", str(settings.world_size), "--steps", str(settings.steps)]
        command += ["--payload", str(settings.payload_bytes), "--tokens", str(settings.tokens), "--out", str(out)]
        environment = {each: value for each, value in os.environ.items() if not each.startswith("TORCHELASTIC_")}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--began", repr(time.monotonic())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                code = process.wait(_TURN_LIMIT_S)
            except BaseException:
                _end(process)
                raise
        if code or not out.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            told = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it said nothing")
            raise RuntimeError(f"exit code {code}: {told.strip()}")
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return figures


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program in good order, its ranks with it: torchrun's agent passes the signal on."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def summarise_launched(outcome: Launched) -> dict[str, float] | None:
    """Sum one launcher up: medians over the rounds, percentiles over all rounds' steps.

    Args:
        outcome: what it did.

    Returns:
        The figures by name, the times in seconds or microseconds as the names say; None where it failed.
    """
    if outcome.failure is not None or not outcome.turns:
        return None
    p50, p99, _ = percentiles_us(sample for turn in outcome.turns for sample in turn["samples_ns"])
    names = set(_MEDIANS) & set(outcome.turns[0])
    medians = {name: statistics.median(turn[name] for turn in outcome.turns) for name in names}
    return {**medians, "step_p50_us": p50, "step_p99_us": p99}


def same_tokens(outcomes: Sequence[Launched]) -> bool:
    """Tell whether every launcher's every turn decoded the same tokens."""
    answers = [turn["token_ids"] for outcome in outcomes for turn in outcome.turns if "token_ids" in turn]
    return all(answer == answers[0] for answer in answers)


def launcher_table(outcomes: Sequence[Launched], settings: LaunchSettings) -> Table:
    """The table for a terminal; a failed launcher's row says so."""
    table = Table(
        title=f"{settings.world_size} ranks, {settings.rounds} rounds: echo {settings.payload_bytes} bytes "
        f"{settings.steps} times, then decode {settings.tokens} tokens",
        caption="ready: from the command until every rank is; executor: that part of it which Executor() takes",
        box=SIMPLE_HEAD,
    )
    table.add_column("launcher")
    columns = {
        "ready\ns": ("ready_s", 2),
        "executor\ns": ("executor_s", 2),
        "stop\ns": ("stop_s", 3),
        "step p50\nus": ("step_p50_us", 1),
        "step p99\nus": ("step_p99_us", 1),
        "decode step\nus": ("decode_step_us", 0),
        "tokens/s\n": ("tokens_per_s", 2),
    }
    for heading in columns:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        summary = summarise_launched(outcome)
        if summary is None:
            table.add_row(outcome.launcher, "[red]failed[/red]")
        else:
            cells = (f"{summary[name]:.{digits}f}" if name in summary else "-" for name, digits in columns.values())
            table.add_row(outcome.launcher, *cells)
    return table


def launcher_document(outcomes: Sequence[Launched], settings: LaunchSettings) -> dict[str, Any]:
    """What the JSON file holds; `benchmarks/README.md` describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "settings": asdict(settings),
        "same_tokens": same_tokens(outcomes),
        "results": [
            {
                "launcher": outcome.launcher,
                "failure": outcome.failure,
                "summary": summarise_launched(outcome),
                "rounds": [_round(turn) for turn in outcome.turns],
            }
            for outcome in outcomes
        ],
    }


def _round(turn: dict[str, Any]) -> dict[str, Any]:
    p50, p99, _ = percentiles_us(turn["samples_ns"])
    kept = {name: value for name, value in turn.items() if name not in ("samples_ns", "token_ids")}
    return {**kept, "step_p50_us": p50, "step_p99_us": p99}
