"""The command line: what it tells a user, and its exit codes. `tests/e2e` has it generate."""

from __future__ import annotations

import importlib.metadata
import io
import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("typer")

from rich.console import Console

from stepcast.bus.errors import ConfigError, StartupError
from stepcast.bus.frames import Times
from stepcast.runtime.cli.app import load_watching
from stepcast.runtime.cli.display import Columns, Sections, Stream, choose_display, progress
from stepcast.runtime.cli.errors import Outcome
from stepcast.runtime.cli.figures import Percentiles, StepClock, percentiles
from tests.e2e.command import COMMAND, error_line, stepcast

STRICT = {"PYTHONWARNINGS": "error"}
MODEL = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 8}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that looks like a model's, until somebody reads the weights."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").touch()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_version() -> None:
    """--version prints stepcast's version."""
    done = stepcast("--version", **STRICT)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"stepcast {importlib.metadata.version('stepcast')}\n",
        "",
    )


@pytest.mark.parametrize("command", [[], ["generate"], ["doctor"]])
def test_help(command: list[str]) -> None:
    """--help of each command exits with 0 and names the options."""
    done = stepcast(*command, "--help", **STRICT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "--config" in done.stdout or not command


# A user's mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Missing argument"),
        (["generate", "--bogus", "hi"], "No such option: --bogus"),
        (["generate", "--distributed-executor-backend", "foo", "hi"], "'foo' is not one of 'mp', 'torchrun', 'ray'"),
        (["generate", "--world-size", "three", "hi"], "Invalid value for '--world-size'"),
        (["train"], "No such command 'train'"),
    ],
)
def test_wrong_use_is_explained(arguments: list[str], message: str) -> None:
    """What the parser refuses exits with 2 and says what is wrong, without a traceback."""
    done = stepcast(*arguments, **STRICT)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "world_size=0: must be at least 1"),
        (["--world-size", "3", "--backend", "uni"], "backend='uni' runs one rank, but world_size=3"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0"),
        (["--max-tokens", "0"], "max_tokens must be a positive integer"),
        (["--top-p", "2"], "top_p must be a number above 0 and up to 1"),
        (["--model", "Hugging/Face"], "Hugging/Face is not a directory"),
        (["--config", "missing.toml"], "the configuration file missing.toml can't be read"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments: list[str], message: str) -> None:
    """A setting that won't do exits with 2, and one line on stderr tells why."""
    pytest.importorskip("transformers")
    done = stepcast("generate", *arguments, "hi", **STRICT)
    assert done.returncode == 2
    line = error_line(done)
    assert line.startswith("stepcast: error: ")
    assert message in line


def test_a_world_size_that_does_not_divide_names_those_that_do(model: str) -> None:
    """The sizes that the model's shape allows are in the message."""
    pytest.importorskip("transformers")
    done = stepcast("generate", "--model", model, "--world-size", "3", "hi", **STRICT)
    assert done.returncode == 2
    assert error_line(done).endswith("use one of 1, 2, 4")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("123456789", "fewer than max_sequence_length (8); this one has 9"),
        ("\udcff", "is not valid UTF-8"),
    ],
)
def test_a_prompt_that_can_not_be_answered_is_refused(model: str, prompt: str, message: str) -> None:
    """A prompt that is empty, too long or no text is refused before a group is started for it."""
    pytest.importorskip("transformers")
    done = stepcast("generate", "--model", model, "hi", prompt, **STRICT)
    assert done.returncode == 2
    assert message in error_line(done)


@pytest.mark.parametrize(
    ("content", "message"),
    [("world_size = \n", "settings.toml can't be read"), ("wrld_size = 3\n", "unknown setting wrld_size")],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    """A file that is no TOML, or holds a setting that does not exist, is one line."""
    file = tmp_path / "settings.toml"
    file.write_text(content)
    done = stepcast("doctor", "--config", str(file), **STRICT)
    assert done.returncode == 2
    assert message in error_line(done)


def test_options_win_over_variables_and_these_over_the_file(tmp_path: Path, model: str) -> None:
    """--world-size goes before STEPCAST_WORLD_SIZE, and that before the file; and so it is with the model."""
    pytest.importorskip("transformers")
    file = tmp_path / "settings.toml"
    file.write_text(f"[stepcast]\nworld_size = 5\n[stepcast.worker_options]\nmodel = '{model}'\nmax_sequences = 0\n")

    def told(*arguments: str, **variables: str) -> str:
        done = stepcast("generate", "--config", str(file), *arguments, "hi", **STRICT, **variables)
        assert done.returncode == 2
        return error_line(done)

    assert "world_size 5 does not divide" in told()
    assert "world_size 7 does not divide" in told(STEPCAST_WORLD_SIZE="7")
    assert "world_size 9 does not divide" in told("--world-size", "9", STEPCAST_WORLD_SIZE="7")
    assert "max_sequences must be a positive integer, not 0" in told("--world-size", "1")
    assert "variable is not a directory" in told(STEPCAST_MODEL="variable")
    assert "option is not a directory" in told("--model", "option", STEPCAST_MODEL="variable")


def test_debug_shows_the_traceback() -> None:
    """With --debug the traceback stands above the line."""
    done = stepcast("doctor", "--debug", "--config", "missing.toml")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("stepcast: error: the configuration file")


@pytest.mark.parametrize("debug", [False, True])
def test_with_json_logs_an_error_is_json_too(model: str, debug: bool) -> None:
    """Where logs are JSON every line of stderr is, the error included."""
    pytest.importorskip("transformers")
    options = ["--log-format", "json", *(["--debug"] if debug else [])]
    done = stepcast("generate", *options, "--model", model, "--world-size", "3", "hi")
    assert (done.returncode, done.stdout) == (2, "")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["level"] == "error"
    assert "world_size 3 does not divide" in lines[-1]["event"]
    assert ("exception" in lines[-1]) is debug


@pytest.mark.parametrize("missing", ["typer", "rich", "transformers"])
def test_missing_packages_are_named(missing: str) -> None:
    """Without the packages of an extra one line says which one to install."""
    if missing == "transformers":
        pytest.importorskip("transformers")  # else it is not the only one
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)\n"
        "from stepcast.__main__ import main\n"
        "main()"
    )
    done = stepcast("generate", "hi", command=(sys.executable, "-c", code), **STRICT)
    assert done.returncode == 2
    extra = "causal-lm" if missing == "transformers" else "cli"
    assert error_line(done).endswith(f"needs {missing}: pip install 'stepcast[{extra}]'")


# How a command ends.


def end(error: BaseException, *, debug: bool = False) -> Any:
    with pytest.raises(SystemExit) as caught, Outcome(debug=debug):
        raise error
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("x must be 1"), 2, "stepcast: error: x must be 1\n"),
        (StartupError("rank 1 failed\n\ntrace"), 1, "stepcast: error: rank 1 failed (--debug shows more)\n"),
        (PermissionError(13, "Permission denied", "f"), 1, "stepcast: error: [Errno 13] Permission denied: 'f'\n"),
        (KeyboardInterrupt(), 130, "stepcast: interrupted\n"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str) -> None:
    """2 for a wrong setting, 1 for other failures, 130 for Ctrl-C; one line each."""
    assert end(error) == code
    assert capsys.readouterr() == ("", line)


def test_bugs_keep_their_traceback() -> None:
    """An error that is nobody's mistake but ours is not put into one line."""
    with pytest.raises(ZeroDivisionError), Outcome(debug=False):
        raise ZeroDivisionError


def test_debug_shows_all_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With --debug nothing of a long message is held back."""
    assert end(StartupError("rank 1 failed\n\ntrace"), debug=True) == 1
    assert "trace" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    """`stepcast ... | head` is no error."""
    code = (
        "import os, sys\n"
        "from stepcast.runtime.cli.errors import Outcome\n"
        "read, write = os.pipe()\n"
        "os.dup2(write, 1); os.close(read); os.close(write)\n"
        "with Outcome(debug=False):\n"
        "    print('x', flush=True)"
    )
    done = stepcast(command=(sys.executable, "-c", code), **STRICT)
    assert (done.returncode, done.stderr) == (141, "")


# Displays.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_answer_is_written_as_it_comes() -> None:
    """Each piece is there at once; the end of the answer ends the line."""
    out = io.StringIO()
    with Stream(out) as display:
        display.show(0, "Once", None)
        assert out.getvalue() == "Once"
        display.show(0, " upon\x1b[2J", "length")
    assert out.getvalue() == "Once upon\x1b[2J\n"


def test_a_terminal_gets_no_escape_sequence_of_the_models() -> None:
    """Control characters are left out on a terminal, but for newlines and tabs; an answer cut short ends its line."""
    out = Terminal()
    with Stream(out) as display:
        display.show(0, "a\x1b[31mb\x07\r\n\tc\x9bd", None)
    assert out.getvalue() == "a[31mb\n\tcd\n"


def test_several_answers_come_in_order_each_when_complete() -> None:
    """Off a terminal an answer is written when it and those before it are complete, under its prompt."""
    out = io.StringIO()
    with Sections(out, ["one", "two\nlines"]) as display:
        display.show(0, "a", None)
        display.show(1, "b", "stop")
        assert out.getvalue() == ""
        display.show(0, "c", "length")
    assert out.getvalue() == "==> one <==\nac\n\n==> two lines <==\nb\n"


def columns(prompts: Sequence[str], width: int = 80, height: int = 24) -> tuple[Columns, Terminal]:
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=width, height=height, color_system=None)
    return Columns(console, prompts), out


def test_answers_stand_side_by_side() -> None:
    """Two answers share a line of a terminal that is wide enough, and end with why they ended."""
    display, out = columns(["first [red]", "second"])
    with display:
        display.show(0, "left [bold]\x1b[2J", "stop")
        display.show(1, "right", "length")
    last = out.getvalue().splitlines()[-3:]
    assert "first [red]" in last[0]
    assert "second" in last[0]
    assert "left [bold][2J" in last[1]
    assert "right" in last[1]
    assert "stop" in last[2]
    assert "length" in last[2]


def test_a_narrow_terminal_has_them_one_below_the_other() -> None:
    """Below the least width of a column they are stacked."""
    display, out = columns(["first", "second"], width=60)
    with display:
        display.show(0, "left", "stop")
        display.show(1, "right", "stop")
    assert not any("left" in line and "right" in line for line in out.getvalue().splitlines())


def test_the_end_shows_all_of_a_long_answer() -> None:
    """While it grows only the last lines show; at the end every word is there, however long."""
    display, out = columns(["first", "second"], height=8)
    words = [f"word{number:03}" for number in range(80)]
    with display:
        display.show(0, " ".join(words) + " " + "x" * 200, "length")
        display._live.refresh()
        assert "word000" not in out.getvalue()
        assert "xxxx" in out.getvalue()
    text = out.getvalue().rpartition("\x1b[2K")[2]  # after what moved was erased
    assert all(word in text for word in words)
    assert text.count("x") == 200


def test_the_display_suits_where_the_text_goes() -> None:
    """One prompt streams; several stand in columns on a terminal and below one another elsewhere."""
    assert isinstance(choose_display(Terminal(), ["a"]), Stream)
    assert isinstance(choose_display(Terminal(), ["a", "b"]), Columns)
    assert isinstance(choose_display(io.StringIO(), ["a", "b"]), Sections)


@pytest.mark.parametrize("moving", [True, False])
def test_progress_shows_on_a_terminal_only(moving: bool) -> None:
    """On a terminal it says what goes on; elsewhere nothing."""
    for terminal in (True, False):
        out = io.StringIO()
        with progress(Console(file=out, force_terminal=terminal), "Loading [it]", moving=moving):
            pass
        assert ("Loading [it]" in out.getvalue()) is terminal
    with progress(None, "Loading"):
        pass


# Figures.


def test_percentiles_are_linear_between_neighbours() -> None:
    """As numpy's: of 0 to 100 the 99th is 99; of two the median lies between them; of one both are it."""
    assert percentiles(range(100, -1, -1)) == Percentiles(p50=50, p99=99)
    assert percentiles([1, 2]) == Percentiles(p50=1.5, p99=2.0)
    assert percentiles([7]) == Percentiles(p50=7, p99=7)


def test_overhead_is_what_the_slowest_rank_did_not_compute() -> None:
    """Of a step of 100 us of which the slowest rank computed 60, 40 are overhead."""

    class Answered(Future[Any]):
        times: ClassVar = {0: Times(0, 20_000, 0, 0, 0, 0), 1: Times(0, 60_000, 0, 0, 0, 0)}

    class Ranks:
        def submit(self, payload: Any) -> Answered:
            future = Answered()
            future.set_result(payload)
            return future

    readings = iter([0, 100_000])
    clock = StepClock(Ranks(), lambda: next(readings))  # type: ignore[arg-type]
    assert clock.step("payload") == "payload"
    assert (clock.steps, clock.latencies_us(), clock.overheads_us()) == (1, [100.0], [40.0])


def test_the_module_runs_as_the_command_does() -> None:
    """`python -m stepcast` is the command."""
    assert COMMAND[1:] == ("-m", "stepcast")
    done = stepcast(**STRICT)
    assert "Usage: stepcast" in done.stdout + done.stderr


def test_ranks_end_with_who_has_started_the_command_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("watch_parent = false\n")
    given: dict[str, Any] = {"worker": "m:C", "world_size": 2}
    assert load_watching(None, given).watch_parent
    assert not load_watching(file, given).watch_parent
    assert not load_watching(None, {"worker": "m:C"}).watch_parent  # "uni" has no ranks that could be left
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert not load_watching(None, given).watch_parent
    finally:
        signal.signal(signal.SIGHUP, handler)
    monkeypatch.setenv("STEPCAST_WATCH_PARENT", "0")
    assert not load_watching(None, given).watch_parent
