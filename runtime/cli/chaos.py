"""The tables of `stepcast chaos`, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stepcast.runtime.testing.chaos import NotApplicable, Outcome
from stepcast.runtime.testing.soak import SoakReport


def print_outcomes(outcomes: Sequence[Outcome], not_played: Sequence[NotApplicable], console: Console) -> None:
    """Print what became of the scenarios.

    Args:
        outcomes: one for each that was played.
        not_played: one for each that was not.
        console: where to.
    """
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("", "fault", "ranks", "start", "expected", "seen", "verdict"):
        table.add_column(title, no_wrap=True)
    for title in ("detected ms", "released ms", "lost steps"):
        table.add_column(title, justify="right")
    table.add_column("left behind, problem", overflow="fold")
    for each in outcomes:
        table.add_row(
            "[green]ok[/]" if each.passed else "[red]no[/]",
            each.scenario,
            str(each.world_size),
            each.start_method if each.backend == "mp" else each.backend,
            each.expected,
            each.seen,
            _verdict(each),
            _milliseconds(each.detected_ms),
            _milliseconds(each.released_ms),
            str(each.lost_steps),
            "; ".join([*each.leaks, *filter(None, [each.problem])]) or "-",
        )
    console.print(table)
    for other in not_played:
        console.print(f"not under {other.backend}: {other.scenario}: {other.not_applicable}", highlight=False)


def _verdict(outcome: Outcome) -> str:
    if outcome.verdict == outcome.expected_verdict:
        return outcome.verdict or "-"
    return f"{outcome.verdict or '-'}, not {outcome.expected_verdict}"


def print_soak(report: SoakReport, console: Console) -> None:
    """Print what became of a soak.

    Args:
        report: the soak's.
        console: where to.
    """
    table = Table(box=None, padding=(0, 1), show_header=False)
    faults = ", ".join(f"{count} {name}" for name, count in sorted(report.faults.items()))
    for name, value in (
        ("outcome", "[green]ok[/]" if report.passed else "[red]no[/]"),
        ("faults", faults or "-"),
        ("steps", f"{report.submitted} submitted, {report.answered} answered, {report.failed} failed"),
        ("restarts", str(report.restarts)),
        ("descriptors", " -> ".join(f"{value:g}" for value in report.descriptors)),
        ("memory, MiB", " -> ".join(f"{value:.1f}" for value in report.memory_mib)),
        ("left behind, problem", "; ".join([*report.leaks, *filter(None, [report.problem])]) or "-"),
    ):
        table.add_row(name, value)
    console.print(table)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
