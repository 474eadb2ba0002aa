"""stepcast itself, through its public API, with the step on the ZeroMQ bus."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.peer import Payload


class StepcastBusPeer:
    """`Executor.step(payload, gather=True)` to echo workers started by the mp launcher."""

    name = "stepcast_bus"

    def __init__(self) -> None:
        self._executor: Any = None

    def start(self, world_size: int) -> None:
        """Start an executor of echo workers."""
        stepcast = importlib.import_module("stepcast")  # late: the other peers run without it
        config = stepcast.ExecutorConfig(worker="stepcast.workers.echo:Echo", world_size=world_size, backend="mp")
        self._executor = stepcast.Executor(config)
        self._executor.__enter__()

    def step(self, payload: Payload) -> list[Any]:
        """One synchronous step, every rank's answer."""
        answers: list[Any] = self._executor.step(payload, gather=True)
        return answers

    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return () if self._executor is None else tuple(self._executor.worker_pids)

    def stop(self) -> None:
        """Shut the executor down."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            executor.shutdown()
