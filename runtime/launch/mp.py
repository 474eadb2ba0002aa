"""The "mp" launcher: a process for each rank on this host."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import io
import logging
import multiprocessing
import multiprocessing.spawn
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from stepcast.bus.endpoints import RunDirectory
from stepcast.runtime import failures
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.sockets import DriverSockets
from stepcast.runtime.state import Life
from stepcast.workers.base import Worker
from stepcast.workers.boot import run_worker
from stepcast.workers.boot_config import BootConfig

from .forking import check_not_daemon, release_openmp_threads
from .interpreter import run_main
from .launcher import Launcher
from .plan import plan_ranks, rank_environment
from .process import ForkedProcess, SpawnedProcess, WorkerProcess

_log = logging.getLogger("stepcast.runtime")

#: Held while `multiprocessing.spawn` is told what to leave out: two executors may be started at once.
_preparing = threading.Lock()


class MpLauncher(Launcher):
    """Starts a process for each rank on this host.

    Args:
        config: the settings, with the device resolved.
        directory: the run's private directory.
        life: run id and epoch.
    """

    def __init__(self, config: ExecutorConfig, directory: RunDirectory, life: Life) -> None:
        self._config = config
        in_main_thread = threading.current_thread() is threading.main_thread()
        # Spawned ranks end with the monitor's thread. A fork's parent is the thread that calls here: only the main
        # thread is known to live as long as the group. A fork server's ranks are not our children at all.
        die_with_driver = config.start_method == "spawn" or (config.start_method == "fork" and in_main_thread)
        self._boots = plan_ranks(config, directory, life, die_with_driver=die_with_driver)
        self._environments = [rank_environment(config, boot) for boot in self._boots]
        self._forked: list[WorkerProcess] = []

    def prepare(self) -> None:
        """Fork, where that is asked for."""
        config = self._config
        if config.start_method != "spawn":
            self._forked = fork(config.start_method, self._boots, self._environments, config.worker)

    def launch(self, sockets: DriverSockets, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:  # noqa: ARG002 - all on this host, and at once
        """Spawn, unless it has forked."""
        forked, self._forked = self._forked, []
        return forked or spawn_all(self._boots, self._environments)

    def close(self) -> None:
        """Kill forks that no monitor has in hand."""
        discard(self._forked)


def spawn_all(boots: Sequence[BootConfig], environments: Sequence[Mapping[str, str]]) -> list[WorkerProcess]:
    """Start all ranks in fresh interpreters.

    Args:
        boots: what each rank is told.
        environments: each rank's whole environment.

    Returns:
        The processes.

    Raises:
        StartupError: one can't be started; those before it have been killed.
    """
    started: list[WorkerProcess] = []
    try:
        for boot, environment in zip(boots, environments, strict=True):
            with _told(boot.rank, f"sys.executable={sys.executable!r} must be a Python; else use start_method='fork'"):
                started.append(spawn(boot, environment))
    except BaseException:
        discard(started)
        raise
    return started


def spawn(boot: BootConfig, environment: Mapping[str, str]) -> WorkerProcess:
    """Start a rank in a fresh interpreter.

    Call it from the thread that lives as long as the group: the kernel ends the rank when that thread ends.

    Args:
        boot: what the rank is told, over an anonymous file as its stdin, so that nothing of it shows in a process list.
        environment: the rank's whole environment.

    Returns:
        The process.

    Raises:
        OSError: it can't be started.
    """
    return SpawnedProcess(boot.rank, run_main("stepcast.workers.boot", boot.to_bytes(), environment))


def fork(
    method: str,
    boots: Sequence[BootConfig],
    environments: Sequence[Mapping[str, str]],
    worker: str | type[Worker],
) -> list[WorkerProcess]:
    """Start all ranks by multiprocessing's "fork" or "forkserver".

    Args:
        method: the start method.
        boots: what each rank is told.
        environments: each rank's whole environment; set in the child, after the modules that this process has imported.
        worker: the worker's class, where a fork can take it as it is; else its name.

    Returns:
        The processes.

    Raises:
        ConfigError: this process may not have children.
        StartupError: one can't be started; those before it have been killed.
    """
    check_not_daemon(method)
    _warn_of_threads(method)
    if method == "fork":
        release_openmp_threads()
    context: Any = multiprocessing.get_context(method)
    started: list[WorkerProcess] = []
    siblings: list[int] = []
    inherited_class = worker if method == "fork" and isinstance(worker, type) else None
    try:
        for boot, environment in zip(boots, environments, strict=True):
            stdout_read, stdout_write = context.Pipe(duplex=False)
            stderr_read, stderr_write = context.Pipe(duplex=False)
            # A fork inherits the read ends of its elder siblings' pipes; it closes them.
            inherited = [*siblings, stdout_read.fileno(), stderr_read.fileno()] if method == "fork" else []
            process = context.Process(
                target=_run_forked,
                args=(boot, dict(environment), stdout_write, stderr_write, inherited, inherited_class),
                name=f"stepcast-rank-{boot.rank}",
            )
            with _main_module_left_out(method), _told(boot.rank, "start fewer ranks, or free memory and processes"):
                process.start()
            # Ours to join. multiprocessing would do it at exit, without a limit, and in a fork of this process, where
            # it can't.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # noqa: SLF001
            stdout_write.close()
            stderr_write.close()
            outputs = (_as_file(stdout_read), _as_file(stderr_read))
            siblings.extend(output.fileno() for output in outputs)
            started.append(ForkedProcess(boot.rank, process, outputs))
    except BaseException:
        discard(started)
        raise
    return started


@contextlib.contextmanager
def _told(rank: int, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as problem:  # the latter of a fork server that dies
        raise failures.not_started(rank, problem, remedy) from problem


def discard(processes: Sequence[WorkerProcess]) -> None:
    """Kill processes that no monitor has in hand.

    Args:
        processes: the processes.
    """
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
        process.close()
        for output in process.outputs:
            output.close()


def _as_file(connection: Connection) -> IO[bytes]:
    # The descriptor outlives the connection object, which would close it.
    descriptor = os.dup(connection.fileno())
    connection.close()
    return io.FileIO(descriptor, "rb")  # unbuffered, as Popen's are


def _run_forked(
    boot: BootConfig,
    environment: dict[str, str],
    stdout: Connection,
    stderr: Connection,
    inherited: Sequence[int],
    worker: type[Worker] | None,
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    for descriptor in inherited:
        os.close(descriptor)
    # The parent's objects may stand for other files (a test runner's, a notebook's).
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    # Of the embedder's thread pools, only the thread that has forked is here, which can't join itself at the exit.
    concurrent.futures.thread._threads_queues.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    _restore_signals()
    sys.exit(run_worker(boot, worker))


@contextlib.contextmanager
def _main_module_left_out(method: str) -> Iterator[None]:
    """Keep a fork server and its children from running the embedder's script again: what they need of it, they load.

    A restart comes here in a thread of its own, while the embedder's threads go on: for them nothing changes.
    """
    if method != "forkserver":
        yield
        return
    this_thread = threading.get_ident()
    module: Any = multiprocessing.spawn
    with _preparing:
        prepare = module.get_preparation_data

        def prepare_without_main(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            if threading.get_ident() == this_thread:
                for key in ("init_main_from_name", "init_main_from_path"):
                    data.pop(key, None)
            return data

        module.get_preparation_data = prepare_without_main
        try:
            yield
        finally:
            module.get_preparation_data = prepare


def _restore_signals() -> None:
    """Drop the handlers that the embedder had set up for itself."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _warn_of_threads(method: str) -> None:
    if method == "fork" and threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        _log.warning(
            "start_method='fork' in a process with other threads (%s): a lock that one of them holds stays locked "
            "in the workers; use 'spawn' where they hang",
            names,
        )
