"""A group under torchrun, for `stepcast chaos` to play with.

``python -m stepcast.runtime.testing.job JSON`` is what each of torchrun's ranks runs: the scenario, as in any process.
Where it builds its group, all but rank 0 serve it from there; rank 0 plays on, and leaves what it has seen in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from stepcast.bus.errors import StepcastError
from stepcast.runtime.config import ExecutorConfig

from .census import MARK, Census, marked
from .chaos import HANG_S, LEAK_GRACE_S, Record, Scenario

#: The longest that a job may take to start and to end, beside what the scenario takes.
_JOB_S = 60.0
#: How soon the agent must have ended after the scenario. It gives its ranks 30 s: ours are to be gone long before.
_AGENT_ENDS_WITHIN_S = 10.0
_POLL_S = 0.02
_OUTPUT_CHARACTERS = 6000
_SEEN = "seen.json"


def agent_command(config: ExecutorConfig, module: str, told: Any) -> list[str]:
    """Put together how torchrun is started.

    Args:
        config: the group's settings, with `run_dir`.
        module: what each rank runs.
        told: its argument, as JSON.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = [f"--nproc-per-node={config.world_size}", f"--log-dir={config.run_dir}/logs"]
    return [*torchrun, *options, "-m", module, json.dumps(told)]


def as_json(config: ExecutorConfig) -> dict[str, Any]:
    """Settings as another process can be told them; all but the worker's options and variables, which are empty."""
    names = [each.name for each in dataclasses.fields(config) if not each.name.startswith("worker_")]
    return {name: getattr(config, name) for name in names}


def play_in_job(scenario: Scenario, config: ExecutorConfig, draw: random.Random, record: Record) -> None:
    """Play a scenario in rank 0 of a job of torchrun's.

    Args:
        scenario: one of `SCENARIOS`.
        config, draw, record: as in `Scenario.run`.

    Raises:
        AssertionError: something happened there that should not have, or something was left.
        TimeoutError: the job does not end.
    """
    root, mark = Path(str(config.run_dir)), uuid.uuid4().hex
    told = {"scenario": scenario.name, "seed": draw.random(), "settings": as_json(config)}
    output = root / "output"
    with output.open("wb") as file:
        agent = subprocess.Popen(
            agent_command(config, "stepcast.runtime.testing.job", told),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, MARK: mark, "TMPDIR": str(root)},
            start_new_session=True,
        )
    try:
        try:
            agent.wait(HANG_S + _JOB_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"torchrun has not ended: {_tail(output)}") from None
        ended_at = time.monotonic()
        left = _left(mark)
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
    if not (root / _SEEN).exists():
        raise AssertionError(f"rank 0 has told nothing: {_tail(output)}")
    seen = json.loads((root / _SEEN).read_text(encoding="utf-8"))
    record.restore(seen["record"])
    problems = [*filter(None, [seen["problem"]]), *(f"left in rank 0: {each}" for each in seen["leaks"])]
    problems += [f"process {pid} has outlived torchrun" for pid in left]
    if (waited_s := ended_at - seen["at"]) > _AGENT_ENDS_WITHIN_S:
        problems.append(f"torchrun has ended {waited_s:.1f} s after the scenario")
    if problems:
        raise AssertionError("; ".join(problems))


def _left(mark: str) -> list[int]:
    deadline = time.monotonic() + LEAK_GRACE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _tail(output: Path) -> str:
    return output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARACTERS:]


def main() -> None:
    """Be one of the ranks."""
    import torch.distributed  # noqa: F401, PLC0415 - what it holds is there before the scenario, and no leak

    from .scenarios import SCENARIOS  # noqa: PLC0415 - they import this

    told = json.loads(sys.argv[1])
    config = ExecutorConfig(**told["settings"])
    (scenario,) = (each for each in SCENARIOS if each.name == told["scenario"])
    # It comes as soon as a rank has died, and what becomes of the others is to be seen. What this process starts is
    # not deaf to it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    root = Path(str(config.run_dir))
    census, record, problem = Census(root), Record(), None
    try:
        scenario.run(config, random.Random(told["seed"]), record)  # noqa: S311 - to be drawn again
    except StepcastError as error:
        record.see(error)
        record.released_at = record.detected_at
    except Exception as error:  # noqa: BLE001 - to be told
        problem = f"{type(error).__name__}: {error}"
    if os.environ["RANK"] != "0":
        sys.exit(1)  # it has not even served
    seen = {"record": record.to_json(), "problem": problem, "leaks": census.leaks(LEAK_GRACE_S), "at": time.monotonic()}
    draft = root / "seen.draft"
    draft.write_text(json.dumps(seen), encoding="utf-8")
    draft.rename(root / _SEEN)


if __name__ == "__main__":
    main()
