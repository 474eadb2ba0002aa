"""The table of `stepcast chaos`, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stepcast.runtime.testing.chaos import Outcome


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print what became of the scenarios.

    Args:
        outcomes: one for each.
        console: where to.
    """
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("", "fault", "ranks", "start", "expected", "seen"):
        table.add_column(title, no_wrap=True)
    for title in ("detected ms", "released ms", "lost steps"):
        table.add_column(title, justify="right")
    table.add_column("left behind, problem", overflow="fold")
    for each in outcomes:
        table.add_row(
            "[green]ok[/]" if each.passed else "[red]no[/]",
            each.scenario,
            str(each.world_size),
            each.start_method,
            each.expected,
            each.seen,
            _milliseconds(each.detected_ms),
            _milliseconds(each.released_ms),
            str(each.lost_steps),
            "; ".join([*each.leaks, *filter(None, [each.problem])]) or "-",
        )
    console.print(table)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
