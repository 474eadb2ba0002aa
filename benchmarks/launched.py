"""What each launcher runs in `python -m benchmarks.run --launchers`: one program, whichever starts its ranks.

Two groups: of echo workers, for the start and the latency of a step; then of the demo's model, for decoding. Rank 0
under torchrun, and the only process under the others, writes the figures.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from stepcast import Executor, ExecutorConfig

from .peer import decode_step

_WARMUP = 50


def main() -> None:
    """Measure, and write the figures to a file."""
    parser = argparse.ArgumentParser(prog="benchmarks.launched")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--began", type=float, required=True, help="the monotonic clock when the command was given")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--payload", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="to decode; 0: no model")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings = {"backend": arguments.backend, "world_size": arguments.world_size}
    figures = _echo(settings, arguments)
    if arguments.tokens:
        decoded = _decode(settings, arguments.tokens)
        if figures is not None:
            figures |= decoded
    if figures is not None:
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")


def _echo(settings: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Start a group of echo workers, and time steps. Returns None in a rank that torchrun has started for another."""
    more = bool(arguments.tokens)
    config = ExecutorConfig(worker="stepcast.workers.echo:Echo", followers_return=more, **settings)
    payload = decode_step(arguments.payload)
    began = time.monotonic()
    with Executor(config) as executor:
        if not executor.is_driver:
            return None
        ready = time.monotonic()
        for _ in range(_WARMUP):
            executor.step(payload, gather=True)
        samples_ns = []
        for _ in range(arguments.steps):
            before = time.perf_counter_ns()
            executor.step(payload, gather=True)
            samples_ns.append(time.perf_counter_ns() - before)
        ending = time.monotonic()
    return {
        "ready_s": ready - arguments.began,
        "executor_s": ready - began,
        "stop_s": time.monotonic() - ending,
        "samples_ns": samples_ns,
    }


def _decode(settings: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Have the demo's model answer one prompt, as `stepcast generate` does."""
    from stepcast.runtime.cli.display import Display  # noqa: PLC0415 - what the model needs
    from stepcast.runtime.cli.generate import prepare, run  # noqa: PLC0415
    from stepcast.runtime.generation import SamplingParams  # noqa: PLC0415

    config = ExecutorConfig(worker="stepcast.workers.causal_lm:CausalLM", **settings)
    params = SamplingParams(max_tokens=tokens)
    job = prepare(config, ["Tell me a story about a dragon."], params, model=None, chat=True, console=None)
    result = run(job, Display(), None)
    decoded = sum(len(answer.token_ids) for answer in result.outputs)
    return {
        "tokens": decoded,
        "token_ids": [list(answer.token_ids) for answer in result.outputs],
        "tokens_per_s": decoded / result.elapsed_s,
        "decode_step_us": result.step_latency_us.p50,
    }


if __name__ == "__main__":
    main()
