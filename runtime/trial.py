"""Whether a backend can start here: by starting a small group on it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from stepcast.bus.errors import StepcastError

from .config import ExecutorConfig
from .executor import Executor

_WORKER = "stepcast.workers.echo:Echo"
_WORLD_SIZES = {"mp": 2, "uni": 1}
_TORCHRUN_RANKS = _RAY_RANKS = 2
#: torchrun, and each of its ranks, imports torch first.
_TORCHRUN_LIMIT_S = 60.0
_STEPS = 20
_LIMITS = {"startup_timeout_s": 20.0, "step_timeout_s": 5.0, "stop_timeout_s": 3.0, "terminate_timeout_s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How the start of a backend went. Times are None where it did not come to that.

    Attributes:
        available: whether it works.
        problem: why not.
        world_size: the number of ranks that were started.
        start_s: seconds until every rank was ready.
        step_us: microseconds of a step that every rank answers, the median of some.
        shutdown_s: seconds until nothing was left.
    """

    available: bool
    problem: str | None = None
    world_size: int | None = None
    start_s: float | None = None
    step_us: float | None = None
    shutdown_s: float | None = None


def try_backends(config: ExecutorConfig) -> dict[str, Trial]:
    """Try each backend.

    Args:
        config: the settings that a group would have; its start method and its directory are tried.

    Returns:
        How it went, by the backend's name.
    """
    trials = {name: try_backend(config, name, world_size) for name, world_size in _WORLD_SIZES.items()}
    ray = try_backend(config.replace(start_method="spawn"), "ray", _RAY_RANKS)
    return trials | {"torchrun": try_torchrun(), "ray": ray}


def try_backend(config: ExecutorConfig, backend: str, world_size: int) -> Trial:
    """Start a group of workers that only echo, run some steps, and end it.

    Args:
        config: the settings that a group would have.
        backend: the backend.
        world_size: the number of ranks.

    Returns:
        How it went.
    """
    try:
        began = time.monotonic()
        with Executor(
            config.replace(
                worker=_WORKER,
                backend=backend,
                world_size=world_size,
                output_rank=0,
                worker_options={},
                restart="never",
                watch_parent=False,
                **_LIMITS,
            )
        ) as executor:
            started = time.monotonic()
            steps_ns = [_time_step(executor) for _ in range(_STEPS)]
            ending = time.monotonic()
        ended = time.monotonic()
    except Exception as problem:  # noqa: BLE001 - whatever it is, it is why this backend can't start
        reason = str(problem).partition("\n")[0]
        if not isinstance(problem, StepcastError):
            reason = f"{type(problem).__name__}: {reason}"
        return Trial(available=False, problem=reason, world_size=world_size)
    return Trial(
        available=True,
        world_size=world_size,
        start_s=round(started - began, 3),
        step_us=round(statistics.median(steps_ns) / 1000, 1),
        shutdown_s=round(ended - ending, 3),
    )


def try_torchrun() -> Trial:
    """Have torchrun start a small group, as `try_backend` does, from an environment without torchrun's own variables.

    Returns:
        How it went.
    """
    if importlib.util.find_spec("torch") is None:
        return Trial(available=False, problem="needs torch, which brings torchrun: pip install torch")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={_TORCHRUN_RANKS}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    try:
        with tempfile.TemporaryDirectory() as logs:  # it makes a directory for them, and leaves it behind
            done = subprocess.run(
                [*command, f"--log-dir={logs}", "-m", "stepcast.runtime.trial"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TORCHRUN_LIMIT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Trial(available=False, problem=f"torchrun has not come to an end within {_TORCHRUN_LIMIT_S:g} s")
    line = done.stdout.strip().rpartition("\n")[2]
    try:
        return Trial(**json.loads(line))
    except (ValueError, TypeError):
        words = next((each for each in reversed(done.stderr.splitlines()) if "Error" in each), "it said nothing")
        return Trial(available=False, problem=f"torchrun exited with code {done.returncode}: {words.strip()}")


def main() -> None:
    """Be one rank of `try_torchrun`; rank 0 prints the outcome."""
    config = ExecutorConfig(worker=_WORKER, run_dir=os.environ.get("STEPCAST_RUN_DIR"))
    sys.stdout.write(json.dumps(dataclasses.asdict(try_backend(config, "torchrun", config.world_size))))


def _time_step(executor: Executor) -> int:
    began = time.perf_counter_ns()
    executor.step(b"", gather=True)
    return time.perf_counter_ns() - began


if __name__ == "__main__":
    main()
