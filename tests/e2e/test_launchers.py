"""The same tokens, whoever has started the ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.command import stepcast

PROMPTS = ("Tell me a story about a dragon.", "hi")
WAYS = ["spawn", "fork", "forkserver", "torchrun", "ray"]


def generate(*options: str, command: tuple[str, ...] | None = None, **variables: str) -> dict[str, Any]:
    arguments = ("generate", "--json", "--max-tokens", "12", *options, *PROMPTS)
    done = stepcast(*arguments, **({"command": command} if command else {}), **variables)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def alone(tiny: str) -> Any:
    return generate("--model", tiny, "--backend", "uni")["outputs"]


@pytest.mark.parametrize("way", WAYS)
def test_three_ranks_say_what_one_says_whoever_starts_them(tiny: str, alone: Any, tmp_path: Path, way: str) -> None:
    """Under torchrun rank 0 alone writes to stdout."""
    if way == "torchrun":
        run = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--log-dir={tmp_path}")
        found = generate("--model", tiny, command=(*run, "-m", "stepcast"))
    elif way == "ray":
        if importlib.util.find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        found = generate("--model", tiny, "--distributed-executor-backend", "ray", "--world-size", "3")
    else:
        found = generate("--model", tiny, "--world-size", "3", "--start-method", way)
    assert (found["world_size"], found["backend"]) == (3, way if way in ("torchrun", "ray") else "mp")
    assert found["outputs"] == alone
