"""Parked on the bus, or inside a broadcast: `python -m benchmarks.parking --json FILE`. Needs torch.

The same steps on the same group, once with ranks that wait for their next message on the bus, once with ranks that wait
inside a gloo broadcast from rank 0 (`Worker.idle`). Measured on both:

- a step's latency, one after another, and the first one's after the group was idle;
- the processor time that idle ranks use;
- how long a rank that was killed while parked takes to become an error, and which error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from stepcast import Executor, ExecutorConfig, RankInfo, StepcastError, Worker

from .machine import machine, versions

_ERROR_LIMIT_S = 30.0
_POLL_S = 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OnBus(Worker):
    """Joins a process group, and echoes."""

    def setup(self, rank: RankInfo) -> None:
        """Join."""
        from stepcast.workers.process_group import init_process_group  # noqa: PLC0415 - torch, in the ranks alone

        init_process_group(rank)

    def execute(self, step: Any) -> Any:
        """Echo."""
        return step

    def teardown(self) -> None:
        """Leave."""
        from stepcast.workers.process_group import destroy_process_group  # noqa: PLC0415

        destroy_process_group()


class InBroadcast(OnBus):
    """The same, parked inside a broadcast."""

    idle: ClassVar[str] = "collective"


def measure(worker: type[Worker], world_size: int, steps: int, idle_s: float, rounds: int) -> dict[str, Any]:
    """Measure one way of parking.

    Args:
        worker: the worker's class.
        world_size: ranks.
        steps: steps in a row.
        idle_s: how long the group idles before each first step.
        rounds: how often it does.

    Returns:
        The figures by name; seconds, microseconds or milliseconds as the names say.
    """
    config = ExecutorConfig(
        worker=worker, world_size=world_size, backend="mp", keepalive="collective", heartbeat_interval_s=2.0
    )
    executor = Executor(config)
    try:
        step_us = [_step_us(executor) for _ in range(steps)]
        wake_us, cpu_before = [], _cpu_s(executor)
        for _ in range(rounds):
            time.sleep(idle_s)
            wake_us.append(_step_us(executor))
        cpu_s = _cpu_s(executor) - cpu_before
        error, error_ms = _kill_one(executor)
    finally:
        executor.shutdown()
    return {
        "step_us_p50": round(median(step_us), 1),
        "step_us_p99": round(sorted(step_us)[int(len(step_us) * 0.99)], 1),
        "wake_us_p50": round(median(wake_us), 1),
        "wake_us_max": round(max(wake_us), 1),
        "idle_cpu_ms_per_s_and_rank": round(cpu_s * 1e3 / (rounds * idle_s) / world_size, 3),
        "killed_to_error_ms": round(error_ms, 1),
        "error": error,
    }


def _step_us(executor: Executor) -> float:
    began = time.perf_counter()
    executor.step(b"step", gather=True)
    return (time.perf_counter() - began) * 1e6


def _cpu_s(executor: Executor) -> float:
    """The processor time that the ranks have used so far, in seconds."""
    ticks = 0
    for pid in executor.worker_pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def _kill_one(executor: Executor) -> tuple[str, float]:
    """Kill the last rank while all are parked. Returns the group's error, and the milliseconds until it was known."""
    began = time.perf_counter()
    os.kill(executor.worker_pids[-1], signal.SIGKILL)
    while executor.health().failure is None:
        if time.perf_counter() - began > _ERROR_LIMIT_S:
            return "none", _ERROR_LIMIT_S * 1e3
        time.sleep(_POLL_S)
    passed_ms = (time.perf_counter() - began) * 1e3
    try:
        executor.step(b"step")
    except StepcastError as error:
        return type(error.__cause__ or error).__name__, passed_ms
    return "none", passed_ms


def main() -> None:
    """Measure both, print a table, and write a file where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parking", description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--idle", type=float, default=2.0, help="seconds of idleness before each wake-up")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {
        name: measure(worker, arguments.world_size, arguments.steps, arguments.idle, arguments.rounds)
        for name, worker in (("bus", OnBus), ("broadcast", InBroadcast))
    }
    for name in figures["bus"]:
        columns = (f"{place}: {values[name]!s:>12}" for place, values in figures.items())
        sys.stdout.write(f"{name:28} {'  '.join(columns)}\n")
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        document = {"machine": machine(), "versions": versions(), "settings": settings, "figures": figures}
        arguments.json.write_text(f"{json.dumps(document, indent=2)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
