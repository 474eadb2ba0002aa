"""A live group, and the faults that can be injected into it."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from stepcast.bus.errors import ConfigError, StepcastError
from stepcast.runtime.config import ExecutorConfig, started_by_torchrun
from stepcast.runtime.executor import Executor
from stepcast.runtime.launch import plan
from stepcast.runtime.launch.agent import is_follower
from stepcast.runtime.launch.plan import Link, worker_spec

from .frames import FrameFaults
from .proxy import Proxy
from .worker import GROUP, IN_SETUP, SETUP_FAULTS, STEP_FAULTS, WRAPPED

_WORKER = "stepcast.runtime.testing.worker:FaultyWorker"
#: How long an order may take to reach all ranks.
_ORDER_TIMEOUT_S = 30.0
#: Stops a process, and lets it go on after a while.
_FREEZE = 'kill -STOP "$1"; sleep "$2"; kill -CONT "$1"'

_numbers = itertools.count(1)
#: What a group does with its ranks' links, by the group's number.
_reroutes: dict[int, Callable[[int, Link], Link]] = {}


class FaultyGroup:
    """A group of the embedder's own worker, into which faults can be injected. Use it as a context manager.

    Args:
        config: the settings; any backend but "uni", and "mp" where none is given outside of torchrun.
        frame_faults: whether the messages go through a proxy, where `frames` can lose or change them. Not with
            start_method "fork", since the proxy is a thread that would have to be there before the forks.
        in_setup: what is to happen in `Worker.setup`, by rank: a name of `SETUP_FAULTS`.
        on_failure: as `Executor`'s.

    Attributes:
        frames: the faults of frames.
        executor: the group's executor, once it was entered.
        run_directory: where the sockets of its current epoch are, likewise.

    Raises:
        ConfigError: the settings don't fit.
    """

    executor: Executor
    run_directory: Path

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        frame_faults: bool = False,
        in_setup: Mapping[int, str] | None = None,
        on_failure: Callable[[StepcastError], None] | None = None,
    ) -> None:
        if frame_faults and config.start_method == "fork":
            raise ConfigError("faults of frames need start_method 'spawn' or 'forkserver'")
        for fault in (in_setup or {}).values():
            _check(fault, SETUP_FAULTS)
        self._number = next(_numbers)
        options = {
            **config.worker_options,
            WRAPPED: worker_spec(config.worker),
            IN_SETUP: dict(in_setup or {}),
            GROUP: self._number,
        }
        self.config = config.replace(worker=_WORKER, worker_options=options, backend=_backend(config))
        self.frames = FrameFaults()
        self._frame_faults = frame_faults
        self._proxy: Proxy | None = None
        self._on_failure = on_failure
        self._exit = contextlib.ExitStack()
        self._stopped: set[int] = set()

    def __enter__(self) -> FaultyGroup:
        with contextlib.ExitStack() as undo:
            if not is_follower(self.config):  # whose driver's links are what counts
                if self._frame_faults:
                    self._proxy = Proxy(self.frames)
                    self._proxy.start()
                    undo.callback(self._proxy.close)
                undo.enter_context(_rerouted(self._number, self._reroute))
            self.executor = Executor(self.config, on_failure=self._on_failure)
            undo.callback(self._shut_down)
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a rank's process a signal.

        Args:
            rank: the rank.
            number: the signal.
        """
        os.kill(self.executor.worker_pids[rank], number)

    def kill_all(self) -> None:
        """Kill every rank's process."""
        for rank in range(self.config.world_size):
            self.kill(rank)

    def stop(self, rank: int) -> None:
        """Stop a rank's process, until `resume`."""
        self._stopped.add(self.executor.worker_pids[rank])
        self.kill(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a rank's process go on that was stopped."""
        self._stopped.discard(self.executor.worker_pids[rank])
        self.kill(rank, signal.SIGCONT)

    def in_next_step(self, rank: int, fault: str, seconds: float = 3600.0) -> None:
        """Have something happen to a rank in the next step.

        Args:
            rank: the rank.
            fault: "raise", "exit", "exit_cleanly", "os_exit", "kill", "segfault"; "sleep", "sleep_ignoring_sigterm",
                "hold_gil" (waiting in C code), "compute_in_gil" or "extra_collective" (an all-reduce) before the step
                is computed; "answer" with what can't be sent; or "teardown": stay in it.
            seconds: how long, of those that take time.

        Raises:
            ConfigError: there is no such fault.
        """
        _check(fault, STEP_FAULTS)
        self.executor.call("order_fault", rank, fault, seconds, timeout_s=_ORDER_TIMEOUT_S)

    def freeze_driver(self, seconds: float) -> None:
        """Stop this very process, every thread of it, and return when it goes on.

        Args:
            seconds: how long it is stopped.
        """
        command = ["/bin/sh", "-c", _FREEZE, "sh", str(os.getpid()), str(seconds)]
        subprocess.run(command, check=True, start_new_session=True)

    def lose_run_directory(self) -> None:
        """Delete the directory in which the group's sockets are."""
        shutil.rmtree(self.run_directory)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Wait until no process of the group is left.

        Args:
            timeout_s: the longest to wait.

        Returns:
            Whether none is.
        """
        return wait_for_ends(self.executor.worker_pids, timeout_s)

    def _reroute(self, rank: int, link: Link) -> Link:
        self.run_directory = Path(link.publish_endpoint.removeprefix("ipc://")).parent
        return link if self._proxy is None else self._proxy.reroute(rank, link)

    def _shut_down(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(StepcastError):
            self.executor.shutdown()


def wait_for_ends(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait until processes have ended.

    Args:
        pids: their ids.
        timeout_s: the longest to wait, for all together.

    Returns:
        Whether they have.
    """
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return False
            finally:
                os.close(pidfd)
    return True


def _backend(config: ExecutorConfig) -> str:
    """The backend, which must have processes of its own."""
    if config.backend == "uni":
        raise ConfigError("backend='uni' has no processes to do a fault to: use backend='mp'")
    return config.backend or ("torchrun" if started_by_torchrun() else "mp")


def _check(fault: str, known: frozenset[str]) -> None:
    if fault not in known:
        raise ConfigError(f"fault {fault!r}: must be one of {', '.join(sorted(known))}")


@contextlib.contextmanager
def _rerouted(number: int, reroute: Callable[[int, Link], Link]) -> Iterator[None]:
    _reroutes[number] = reroute
    plan.reroute = _reroute
    try:
        yield
    finally:
        del _reroutes[number]


def _reroute(config: ExecutorConfig, rank: int, link: Link) -> Link:
    """Other groups' ranks are linked to their driver."""
    reroute = _reroutes.get(config.worker_options.get(GROUP, 0))
    return link if reroute is None else reroute(rank, link)
