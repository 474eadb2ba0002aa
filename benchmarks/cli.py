"""The command line of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.launchers import LAUNCHERS, LaunchSettings, launcher_document, launcher_table, measure_launchers
from benchmarks.measure import Outcome, Settings, measure
from benchmarks.peer import PEERS, SMALLEST_PAYLOAD_BYTES
from benchmarks.report import document, failures, table

_QUICK = {"rounds": 10, "steps": 250, "idle_s": 2.0}
_FULL = {"rounds": 30, "steps": 1_000, "idle_s": 6.0}
_RANKS, _LAUNCHED_RANKS = "1,2,4", "3"
"""The demo's model can be cut in three."""
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
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Rank counts.", show_default=f"{_RANKS}, with --launchers {_LAUNCHED_RANKS}"
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of every peer per rank count.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps in a turn.")] = None,
    payload: Annotated[
        int, typer.Option(metavar="BYTES", min=SMALLEST_PAYLOAD_BYTES, help="Size of the encoded step.")
    ] = 1_400,
    peers: Annotated[str, typer.Option(metavar="A,B,...", help="The peers to measure.")] = ",".join(PEERS),
    idle_s: Annotated[
        float | None, typer.Option("--idle-s", min=0, help="Seconds to measure idle workers for; 0: not at all.")
    ] = None,
    launchers: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help=f"Compare launchers instead of peers: {', '.join(LAUNCHERS)}."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens that each launcher's turn decodes; 0: none.")] = 40,
) -> None:
    """Measure the latency of one step to all ranks and back, for every peer, interleaved in rounds.

    With --launchers: start-up, step latency and decoding of one program, under each launcher.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_file.absolute().parent}", param_hint="--json")
    if launchers is not None:
        _compare_launchers(
            launchers,
            ranks or _LAUNCHED_RANKS,
            rounds or (1 if quick else 5),
            steps or 1_000,
            payload,
            tokens,
            json_file,
        )
        return
    preset = _QUICK if quick else _FULL
    settings = Settings(
        peers=_parse_peers(peers),
        ranks=_parse_ranks(ranks or _RANKS),
        rounds=int(preset["rounds"] if rounds is None else rounds),
        steps=int(preset["steps"] if steps is None else steps),
        payload_bytes=payload,
        idle_s=float(preset["idle_s"] if idle_s is None else idle_s),
    )
    outcomes = _measure_with_progress(settings)
    _print(outcomes, settings)
    if json_file is not None:
        json_file.write_text(json.dumps(document(outcomes, settings), indent=2) + "\n", encoding="utf-8")
    if all(outcome.failure is not None for outcome in outcomes):
        raise typer.Exit(1)


def _compare_launchers(
    launchers: str, ranks: str, rounds: int, steps: int, payload: int, tokens: int, json_file: Path | None
) -> None:
    names = tuple(dict.fromkeys(name.strip() for name in launchers.split(",") if name.strip()))
    unknown = [name for name in names if name not in LAUNCHERS]
    if unknown or not names:
        told = ", ".join(unknown) or repr(launchers)
        raise typer.BadParameter(f"no such launcher: {told}; there are {', '.join(LAUNCHERS)}")
    console = Console(stderr=True)
    documents = []
    for world_size in _parse_ranks(ranks):
        settings = LaunchSettings(
            launchers=names, world_size=world_size, rounds=rounds, steps=steps, payload_bytes=payload, tokens=tokens
        )
        outcomes = measure_launchers(settings, lambda text: console.print(text, style="dim"))
        _print_table(launcher_table(outcomes, settings))
        for outcome in outcomes:
            if outcome.failure is not None:
                console.print(f"[red]{escape(f'{outcome.launcher} failed: {outcome.failure}')}[/red]", soft_wrap=True)
        documents.append(launcher_document(outcomes, settings))
    if json_file is not None:
        json_file.write_text(json.dumps(documents, indent=2) + "\n", encoding="utf-8")
    if any(result["failure"] for document in documents for result in document["results"]):
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


def _print_table(shown: Table) -> Console:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(shown)
    return console


def _print(outcomes: list[Outcome], settings: Settings) -> None:
    console = _print_table(table(outcomes, settings))
    for line in failures(outcomes):
        console.print(f"[red]{escape(line)}[/red]", soft_wrap=True)
