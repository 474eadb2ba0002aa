"""A worker that wraps another one, and fails on demand."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from stepcast.workers.base import RankInfo, Worker
from stepcast.workers.loading import load_worker_class

#: The option that holds the wrapped worker's name; and the one that holds what is to happen in its setup.
WRAPPED, IN_SETUP = "stepcast.testing.worker", "stepcast.testing.setup"
#: The option that holds the number of the group.
GROUP = "stepcast.testing.group"
#: What holds the GIL lets go of it this often: a signal, such as SIGTERM, is noticed then.
_GIL_SLICE_S = 0.05
_FOREVER_S = 3600.0
#: Python computes this power for some 10 ms, in C code.
_EXPONENT = 200_000


class FaultyWorker(Worker):
    """Runs the embedder's worker, until it was told to fail: then on the rank, and at the step, that it was told."""

    def setup(self, rank: RankInfo) -> None:
        """Set the wrapped worker up, failing there where that was asked for."""
        options = dict(rank.options)
        name, in_setup = options.pop(WRAPPED), options.pop(IN_SETUP, {})
        del options[GROUP]
        self._rank = rank.rank
        self._orders: list[tuple[str, float]] = []
        self._linger_s = 0.0
        self._wrapped = load_worker_class(name, own_process=True)()
        type(self).idle = self._wrapped.idle
        fault = in_setup.get(rank.rank)
        if fault is not None:
            _ACTIONS[fault](_FOREVER_S)
        self._wrapped.setup(dataclasses.replace(rank, options=options))

    def order_fault(self, rank: int, fault: str, seconds: float) -> None:
        """Have the next step fail on one rank; called on all.

        Args:
            rank: the rank.
            fault: what is to happen.
            seconds: how long, where it takes time.
        """
        if rank == self._rank:
            self._orders.append((fault, seconds))

    def say(self, word: Any) -> list[Any]:
        """Answer a call with this rank and what the call said.

        Args:
            word: anything that can be sent.
        """
        return [self._rank, word]

    def note_at_exit(self, directory: str) -> None:
        """Leave a file, named for this rank, when the interpreter exits.

        Args:
            directory: where.
        """
        atexit.register(Path(directory, f"exited-{self._rank}").touch)

    def execute(self, step: Any) -> Any:
        """Run the wrapped worker's step, after the fault that was ordered for it."""
        if not self._orders:
            return self._wrapped.execute(step)
        fault, seconds = self._orders.pop(0)
        if fault == "answer":
            return _Unsendable()
        if fault == "teardown":
            self._linger_s = seconds
            return self._wrapped.execute(step)
        _ACTIONS[fault](seconds)
        return self._wrapped.execute(step)

    def abort(self, request_id: Any) -> None:
        """As the wrapped worker's."""
        self._wrapped.abort(request_id)

    def teardown(self) -> None:
        """As the wrapped worker's; stays there where that was ordered."""
        time.sleep(self._linger_s)
        self._wrapped.teardown()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)


class Collective(Worker):
    """Adds up, over all ranks, what each rank was sent; with a gloo process group."""

    def setup(self, rank: RankInfo) -> None:
        """Join the process group."""
        from stepcast.workers.process_group import init_process_group  # noqa: PLC0415 - torch, for this one alone

        init_process_group(rank)

    def execute(self, step: Any) -> Any:
        """All-reduce a number."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        number = torch.tensor([float(step)])
        dist.all_reduce(number)
        return number.item()

    def teardown(self) -> None:
        """Leave the process group."""
        from stepcast.workers.process_group import destroy_process_group  # noqa: PLC0415

        destroy_process_group()


class ParkedCollective(Collective):
    """The same; ranks that have nothing to do wait inside a broadcast."""

    idle: ClassVar[str] = "collective"


class InjectedFaultError(RuntimeError):
    """What a rank raises that was told to."""


class _Unsendable:
    """An answer that no message can hold."""


def hold_gil(seconds: float) -> None:
    """Stay in C code, without letting other Python threads run.

    Args:
        seconds: how long.
    """
    usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL
    deadline = time.monotonic() + seconds
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds + 1.0)  # nor between two slices
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            usleep(int(min(_GIL_SLICE_S, left_s) * 1e6))
    finally:
        sys.setswitchinterval(switch_interval_s)


def compute_in_gil(seconds: float) -> None:
    """Compute, without letting other Python threads run.

    Args:
        seconds: how long.
    """
    deadline = time.monotonic() + seconds
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds + 1.0)
    try:
        while time.monotonic() < deadline:
            pow(3, _EXPONENT)
    finally:
        sys.setswitchinterval(switch_interval_s)


def _extra_collective(_: float) -> None:
    import torch  # noqa: PLC0415 - for this one alone
    import torch.distributed as dist  # noqa: PLC0415

    dist.all_reduce(torch.zeros(1))


def _raise(_: float) -> None:
    raise InjectedFaultError("a fault was injected here")


def _kill(_: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_: float) -> None:
    sys.exit(3)


def _exit_cleanly(_: float) -> None:
    sys.exit(0)


def _os_exit(_: float) -> None:
    os._exit(7)


def _segfault(_: float) -> None:
    ctypes.string_at(0)


def _sleep_ignoring_sigterm(seconds: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(seconds)


_ACTIONS: Mapping[str, Callable[[float], object]] = {
    "raise": _raise,
    "kill": _kill,
    "exit": _exit,
    "exit_cleanly": _exit_cleanly,
    "os_exit": _os_exit,
    "segfault": _segfault,
    "sleep": time.sleep,
    "sleep_ignoring_sigterm": _sleep_ignoring_sigterm,
    "hold_gil": hold_gil,
    "compute_in_gil": compute_in_gil,
    "extra_collective": _extra_collective,
}
#: What can be ordered for a step.
STEP_FAULTS = frozenset({*_ACTIONS, "answer", "teardown"})
#: What can be ordered for the setup.
SETUP_FAULTS = frozenset(_ACTIONS)
