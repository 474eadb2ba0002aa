"""Workers for the tests of the runtime. Named by this file's path, so that no test runner's import system matters.

A test makes a rank wait by naming a gate, a file that the rank waits for: so nothing depends on how fast a machine is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from stepcast import RankInfo, Worker

_POLL_INTERVAL_S = 0.002
_LIMIT_S = 60.0

_log = logging.getLogger("tests.worker")


def wait_for_gate(path: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has opened the gate {path}")
        time.sleep(_POLL_INTERVAL_S)


class Obedient(Worker):
    """Does what each step tells it, on the ranks that it names.

    A step that is a dict is a set of orders, unless it has a "value". "ranks" (None for all): who follows the others.
    "gate": wait for a file, or for one of each rank's own. "until_aborted": wait until this step is aborted. "print",
    "print_error", "log": write these texts. "raise": raise a ValueError with this text. "return": answer this, instead
    of the rank. Everything else is echoed.
    """

    def setup(self, rank: RankInfo) -> None:
        self.info = rank
        self.history: list[Any] = []
        self.buffer: Any = None

    def execute(self, step: Any) -> Any:
        if not isinstance(step, dict) or "value" in step:
            self.history.append(step)
            return step
        if step.get("ranks") is not None and self.info.rank not in step["ranks"]:
            return None
        return self._obey(step)

    def _obey(self, step: dict[str, Any]) -> Any:
        if "gate" in step:
            gate = step["gate"]
            wait_for_gate(gate if isinstance(gate, str) else gate[self.info.rank])
        if "until_aborted" in step:
            self._wait_for_abort(step["until_aborted"])
        for stream, name in ((sys.stdout, "print"), (sys.stderr, "print_error")):
            if name in step:
                print(step[name], file=stream, flush=True)
        if "log" in step:
            _log.warning(step["log"], "argument")
        if "raise" in step:
            raise ValueError(step["raise"])
        return step.get("return", self.info.rank)

    def _wait_for_abort(self, step: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not self.info.is_aborted(step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not aborted")
            time.sleep(_POLL_INTERVAL_S)
        self.history.append(["saw the abort of", step])

    def abort(self, request_id: Any) -> None:
        self.history.append(["abort", request_id])

    # For `call`.

    def whoami(self) -> int:
        return self.info.rank

    def add(self, number: int, *, fail_on: list[int]) -> str:
        self.history.append(["add", number])
        if self.info.rank in fail_on:
            raise RuntimeError(f"no room for {number}")
        return f"added {number}"

    def remove(self, number: int, *, fail_on: list[int]) -> None:
        self.history.append(["remove", number])

    def take_history(self) -> list[Any]:
        history, self.history = self.history, []
        return history

    def wait_for(self, gate: str) -> str:
        wait_for_gate(gate)
        return f"went through {gate}"

    def keywords(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [list(args), kwargs]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def where(self) -> list[int]:
        return [os.getpid(), self.info.rank, self.info.local_rank, self.info.world_size, self.info.epoch]

    def options(self) -> Any:
        return self.info.options

    def describe_array(self, array: Any) -> list[Any]:
        """Tell what came, and that it can't be written to."""
        return [type(array).__module__, str(array.dtype), list(array.shape), array.flags.writeable, array.tolist()]

    def fill(self, value: float) -> Any:
        """Answer with an array that is written to again by the next call."""
        import numpy as np  # noqa: PLC0415 - only where it is asked for

        if self.buffer is None:
            self.buffer = np.zeros(4)
        self.buffer[:] = value
        return self.buffer

    def keep(self, array: Any) -> None:
        self.buffer = array

    def kept(self) -> Any:
        return self.buffer.tolist()

    def big(self, size: int) -> bytes:
        return bytes(size)

    def unsendable(self) -> Any:
        return {"deep": [object()]}

    def end_process(self, code: int) -> None:
        os._exit(code)

    def end_process_of(self, rank: int, code: int) -> None:
        if self.info.rank == rank:
            os._exit(code)

    def _private(self) -> str:
        return "secret"


class FailsInSetup(Obedient):
    """Its setup raises."""

    def setup(self, rank: RankInfo) -> None:
        raise LookupError("no weights here")


class FailsInTeardown(Obedient):
    """Its teardown raises."""

    def teardown(self) -> None:
        raise LookupError("can't let go")


class SlowSetup(Obedient):
    """Its setup waits for the gate that the options name."""

    def setup(self, rank: RankInfo) -> None:
        super().setup(rank)
        wait_for_gate(rank.options["gate"])


class MarksTeardown(Obedient):
    """Its teardown writes a file."""

    def teardown(self) -> None:
        Path(self.info.options["mark"], f"rank-{self.info.rank}").touch()
