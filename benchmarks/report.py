"""What a run says: percentiles, ratios, the table and the JSON file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.measure import BASELINE, Outcome, Settings, Turn

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A peer's p50 over the baseline's p50 of the same round, over all rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rounds of one peer at one world size.

    Attributes:
        p50_us: half of the round trips took no longer, in microseconds; over all rounds' steps.
        p99_us: the same for 99 %.
        p999_us: the same for 99.9 %.
        steps: steps timed.
        steps_per_s: steps by the time of all turns.
        cpu_us_per_step: CPU of driver and workers by the steps.
        ratio: to the baseline; None where that failed or was not in the run.
    """

    p50_us: float
    p99_us: float
    p999_us: float
    steps: int
    steps_per_s: float
    cpu_us_per_step: float
    ratio: Ratio | None


def percentiles_us(samples_ns: Iterable[int]) -> tuple[float, float, float]:
    """The 50th, 99th and 99.9th percentile, in microseconds, linear between neighbours."""
    p50, p99, p999 = np.percentile(np.fromiter(samples_ns, dtype=np.int64), (50, 99, 99.9)) / 1_000
    return float(p50), float(p99), float(p999)


def round_ratio(turns: Sequence[Turn], baseline: Sequence[Turn]) -> Ratio:
    """The spread of the ratio of p50s, each taken within one round, so that drift of the machine cancels out."""
    ratios = [
        percentiles_us(turn.samples_ns)[0] / percentiles_us(base.samples_ns)[0]
        for turn, base in zip(turns, baseline, strict=True)
    ]
    return Ratio(median=statistics.median(ratios), min=min(ratios), max=max(ratios))


def summarise(outcome: Outcome, baseline: Outcome | None) -> Summary | None:
    """Sum one outcome up.

    Args:
        outcome: a peer at one world size.
        baseline: the plain loop's outcome at the same world size, if there is one.

    Returns:
        None for a peer that failed.
    """
    if outcome.failure is not None or not outcome.turns:
        return None
    p50, p99, p999 = percentiles_us(sample for turn in outcome.turns for sample in turn.samples_ns)
    steps = sum(len(turn.samples_ns) for turn in outcome.turns)
    comparable = baseline is not None and baseline.failure is None
    return Summary(
        p50_us=p50,
        p99_us=p99,
        p999_us=p999,
        steps=steps,
        steps_per_s=steps / (sum(turn.wall_ns for turn in outcome.turns) / 1e9),
        cpu_us_per_step=sum(turn.cpu_ns for turn in outcome.turns) / steps / 1_000,
        ratio=round_ratio(outcome.turns, baseline.turns) if comparable and baseline is not None else None,
    )


def summaries(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Summary | None]]:
    """Each outcome with its summary, ratios taken at the same world size."""
    baselines = {outcome.world_size: outcome for outcome in outcomes if outcome.peer == BASELINE}
    return [(outcome, summarise(outcome, baselines.get(outcome.world_size))) for outcome in outcomes]


def table(outcomes: Sequence[Outcome], settings: Settings) -> Table:
    """The table for a terminal; a failed peer's row says so."""
    result = Table(
        title=f"All ranks answering {settings.payload_bytes} bytes: {settings.rounds} rounds of {settings.steps} steps",
        caption=f"x {BASELINE}: the rounds' ratios of p50, median (min-max); idle: the busiest worker",
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    result.add_column("ranks", justify="right")
    result.add_column("peer")
    for heading in (
        "p50\nus",
        "p99\nus",
        "p99.9\nus",
        "steps/s\n",
        "CPU us\nper step",
        f"x {BASELINE}\n",
        "idle\ncore",
    ):
        result.add_column(heading, justify="right")
    previous = None
    for outcome, summary in summaries(outcomes):
        if previous not in (None, outcome.world_size):
            result.add_section()
        previous = outcome.world_size
        cells = ["[red]failed[/red]"] if summary is None else _cells(summary, outcome.idle_core_fractions)
        result.add_row(str(outcome.world_size), escape(outcome.peer), *cells)
    return result


def _cells(summary: Summary, idle: Sequence[float]) -> list[str]:
    ratio = summary.ratio
    return [
        f"{summary.p50_us:.1f}",
        f"{summary.p99_us:.1f}",
        f"{summary.p999_us:.1f}",
        f"{summary.steps_per_s:.0f}",
        f"{summary.cpu_us_per_step:.1f}",
        "-" if ratio is None else f"{ratio.median:.2f} ({ratio.min:.2f}-{ratio.max:.2f})",
        f"{max(idle):.2%}" if idle else "-",
    ]


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per failed peer and world size, with why."""
    return [
        f"{outcome.peer} failed (ranks: {outcome.world_size}, {outcome.failure.phase}): {outcome.failure.error}"
        for outcome in outcomes
        if outcome.failure is not None
    ]


def document(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, Any]:
    """What the JSON file holds; `benchmarks/README.md` describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "settings": {**asdict(settings), "baseline": BASELINE},
        "results": [_result(outcome, summary) for outcome, summary in summaries(outcomes)],
    }


def _result(outcome: Outcome, summary: Summary | None) -> dict[str, Any]:
    return {
        "peer": outcome.peer,
        "world_size": outcome.world_size,
        "status": "ok" if outcome.failure is None else "failed",
        "failure": None if outcome.failure is None else asdict(outcome.failure),
        "summary": None if summary is None else asdict(summary),
        "idle_core_fractions": list(outcome.idle_core_fractions),
        "rounds": [_round(turn) for turn in outcome.turns],
    }


def _round(turn: Turn) -> dict[str, float]:
    p50, p99, _ = percentiles_us(turn.samples_ns)
    steps = len(turn.samples_ns)
    return {
        "p50_us": p50,
        "p99_us": p99,
        "steps_per_s": steps / (turn.wall_ns / 1e9),
        "cpu_us_per_step": turn.cpu_ns / steps / 1_000,
    }
