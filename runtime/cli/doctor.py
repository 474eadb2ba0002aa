"""The report of `stepcast doctor`, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepcast.runtime.doctor import Limit, Memory, Processors, Report, RunDirectoryReport
from stepcast.runtime.platforms import Platform
from stepcast.runtime.trial import Trial

_GIB = 1 << 30


def print_report(report: Report, console: Console) -> None:
    """Print a report.

    Args:
        report: the report.
        console: where to.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for title, lines in _sections(report):
        for number, line in enumerate(lines):
            table.add_row(title if number == 0 else "", line)
    console.print(table)


def _sections(report: Report) -> Iterator[tuple[str, list[Text]]]:
    yield "platform", [_platform(each, chosen=each.name == report.platform) for each in report.platforms]
    yield "packages", [Text(", ".join(f"{name} {version or '-'}" for name, version in report.packages.items()))]
    for extra, missing in report.missing.items():
        if missing:
            how = f"pip install 'stepcast[{extra}]'"
            yield f"extra {extra}", [_verdict(False, f"lacks {', '.join(missing)}: {how}")]
    yield "cores", [Text(_processors(report.processors))]
    yield "memory", [Text(_memory(report.memory))]
    yield "run directory", _run_directory(report.run_directory)
    limits = (f"{name.replace('_', ' ')} {_limit(each)}" for name, each in report.limits.items())
    yield "limits", [Text(", ".join(limits))]
    yield "kernel", [_kernel(report)]
    yield "start methods", [Text(", ".join(report.start_methods))]
    for name, trial in report.backends.items():
        yield f"backend {name}", [_trial(trial)]


def _platform(platform: Platform, *, chosen: bool) -> Text:
    count = f" ({len(platform.devices)}: {', '.join(platform.devices)})" if platform.devices else ""
    masks = "".join(f", {name}={value}" for name, value in platform.masks.items())
    software = f", {platform.software}" if platform.software else ""
    problem = f": {platform.problem}" if platform.problem else ""
    return _verdict(platform.problem is None, f"{platform.name}{count}{software}{masks}{problem}", strong=chosen)


def _processors(processors: Processors) -> str:
    usable = len(processors.usable)
    quota = "" if processors.quota is None else f", time of {processors.quota:g} by the control group"
    return f"{processors.cores}, {usable} usable ({', '.join(map(str, processors.usable))}){quota}"


def _memory(memory: Memory) -> str:
    limit = "" if memory.limit is None else f", limit {memory.limit / _GIB:.1f} GiB by the control group"
    return f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB available{limit}"


def _run_directory(report: RunDirectoryReport) -> list[Text]:
    if report.problem is not None:
        return [_verdict(False, report.problem)]
    lines = [
        _verdict(
            True,
            f"in {report.root}, mode {report.mode}, socket paths of {report.longest_socket_path_bytes} bytes "
            f"(limit {report.limit_bytes})",
        )
    ]
    if report.stale:
        lines.append(Text(f"deleted what dead runs had left: {', '.join(report.stale)}", style="yellow"))
    return lines


def _limit(limit: Limit) -> str:
    soft, hard = ("unlimited" if value is None else str(value) for value in (limit.soft, limit.hard))
    return soft if soft == hard else f"{soft} (may be raised to {hard})"


def _kernel(report: Report) -> Text:
    features = ", ".join(
        f"{name} {'yes' if there else 'no'}" for name, there in report.kernel.items() if name != "release"
    )
    return Text(f"{report.kernel['release']}: {features}")


def _trial(trial: Trial) -> Text:
    if not trial.available:
        return _verdict(False, trial.problem or "")
    ranks = "1 rank" if trial.world_size == 1 else f"{trial.world_size} ranks"
    return _verdict(
        True, f"{ranks} up in {trial.start_s:g} s, a step in {trial.step_us:g} us, down in {trial.shutdown_s:g} s"
    )


def _verdict(good: bool, text: str, *, strong: bool = False) -> Text:
    mark = Text("ok  ", style="green") if good else Text("no  ", style="red")
    return mark.append(text, style="bold" if strong else "")
