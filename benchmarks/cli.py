"""The command line of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure import Outcome, Settings, measure
from benchmarks.peer import PEERS, SMALLEST_PAYLOAD_BYTES
from benchmarks.report import document, failures, table

_QUICK = {"rounds": 10, "steps": 250, "idle_s": 2.0}
_FULL = {"rounds": 30, "steps": 1_000, "idle_s": 6.0}
_PLAIN_WIDTH = 100
"""Columns of the table where the output is not a terminal."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _parse_peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise typer.BadParameter(f"no such peer: {', '.join(unknown) or repr(text)}; there are {', '.join(PEERS)}")
    return names


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of rank counts, such as 1,2,4")
    return ranks


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and steps: under a minute.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write everything to this file.")
    ] = None,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Rank counts.")] = "1,2,4",
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of every peer per rank count.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps in a turn.")] = None,
    payload: Annotated[
        int, typer.Option(metavar="BYTES", min=SMALLEST_PAYLOAD_BYTES, help="Size of the encoded step.")
    ] = 1_400,
    peers: Annotated[str, typer.Option(metavar="A,B,...", help="The peers to measure.")] = ",".join(PEERS),
    idle_s: Annotated[
        float | None, typer.Option("--idle-s", min=0, help="Seconds to measure idle workers for; 0: not at all.")
    ] = None,
) -> None:
    """Measure the latency of one step to all ranks and back, for every peer, interleaved in rounds."""
    preset = _QUICK if quick else _FULL
    settings = Settings(
        peers=_parse_peers(peers),
        ranks=_parse_ranks(ranks),
        rounds=int(preset["rounds"] if rounds is None else rounds),
        steps=int(preset["steps"] if steps is None else steps),
        payload_bytes=payload,
        idle_s=float(preset["idle_s"] if idle_s is None else idle_s),
    )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_file.absolute().parent}", param_hint="--json")
    outcomes = _measure_with_progress(settings)
    _print(outcomes, settings)
    if json_file is not None:
        json_file.write_text(json.dumps(document(outcomes, settings), indent=2) + "\n", encoding="utf-8")
    if all(outcome.failure is not None for outcome in outcomes):
        raise typer.Exit(1)


def _measure_with_progress(settings: Settings) -> list[Outcome]:
    turns_per_world_size = len(settings.peers) * settings.rounds + bool(settings.idle_s)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Drawn between turns only: a refreshing thread would take the GIL from the driver that is being timed.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=turns_per_world_size * len(settings.ranks))

        def show(text: str, turns: int) -> None:
            progress.update(task, advance=turns, description=text or None, refresh=bool(text))

        return measure(settings, show)


def _print(outcomes: list[Outcome], settings: Settings) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(table(outcomes, settings))
    for line in failures(outcomes):
        console.print(f"[red]{escape(line)}[/red]", soft_wrap=True)
