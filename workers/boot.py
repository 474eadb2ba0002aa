"""The life of a worker's process, from its first line to its exit."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import msgpack

from stepcast.bus import codec
from stepcast.bus.errors import ConfigError
from stepcast.bus.frames import NO_TIMES, Flag, Kind
from stepcast.bus.liveness import Phase
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.subscriber import ControlSubscriber, StepSubscriber
from stepcast.bus.zmtp import RECONNECT_TIMEOUT_S, DriverGone, LinkLost

from .base import RankInfo, Worker
from .board import Board
from .boot_config import BootConfig
from .collective_log import CollectiveLog
from .death_watch import DriverWatch, die_with_parent_thread
from .loading import load_worker_class
from .log import configure_logging
from .loop import StepSource, WorkerLoop, describe_error
from .responder import DUMP_SIGNAL, EXIT_DRIVER_GONE, EXIT_LINK_LOST, Responder

#: Exit code after an exception that was reported to the driver.
EXIT_FAILED = 80
#: How often a forked rank looks whether the driver has bound its sockets.
_CONNECT_INTERVAL_S = 0.005
#: The conventional exit code of a process that SIGTERM ended.
EXIT_TERMINATED = 128 + signal.SIGTERM

#: Where ranks may wait for the next message, as in `Worker.idle`.
IDLE_PLACES = ("bus", "collective")

_log = logging.getLogger("stepcast.worker")


def main() -> NoReturn:
    """Boot a spawned worker: its configuration comes over stdin."""
    boot = BootConfig.from_bytes(read_stdin())
    sys.argv[:] = boot.arguments
    sys.exit(run_worker(boot))


def read_stdin() -> bytes:
    """Read what the process that has started this one hands over.

    Returns:
        The bytes. From now on stdin is empty.
    """
    data = sys.stdin.buffer.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return data


def run_worker(boot: BootConfig, worker_class: type[Worker] | None = None) -> int:
    """Be one rank, until the driver says STOP or something fails.

    Args:
        boot: what the launcher has handed over.
        worker_class: the worker's class, where this process has it already.

    Returns:
        The exit code.
    """
    if boot.die_with_driver:
        die_with_parent_thread()
    watch = DriverWatch(boot.driver_pid, boot.driver_start_time)
    if watch.is_dead():  # it died before the watch was armed
        return EXIT_DRIVER_GONE
    board = Board()
    if boot.own_process:
        configure_logging(boot.log_level, rank=boot.rank, epoch=boot.epoch, board=board)
    code: object = EXIT_FAILED
    try:
        with _signals(kept=boot.own_process):
            code = ended = _Rank(boot, board, watch, worker_class).run()
    except SystemExit as leaving:  # SIGTERM, or the worker's own
        code = leaving.code
        raise
    finally:
        group = _process_group()
        if group is not None and group.exit_waits_for_peers():
            # This rank does not leave with the others: they may be dead, or in a collective that waits for it. Its exit
            # handlers would wait for them, without a limit.
            exit_at_once(code if isinstance(code, int) else EXIT_FAILED)
    return ended


def exit_at_once(code: int) -> NoReturn:
    """End this process without its exit handlers, from any thread.

    Args:
        code: the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def bind_device(rank: RankInfo) -> None:
    """Bind this process to its device, before a module of the worker's can use another one.

    Args:
        rank: the rank's place in the group.

    Raises:
        ConfigError: the device can't be used.
    """
    if rank.device != "cpu":
        from .devices import open_device  # noqa: PLC0415 - torch, where a device needs it

        open_device(rank)


def _process_group() -> Any:
    """The module that joins and leaves process groups; None where the worker has no use for it, nor for torch."""
    return sys.modules.get("stepcast.workers.process_group")


@contextlib.contextmanager
def _signals(*, kept: bool) -> Iterator[None]:
    """Set up the signals that a rank lives by; unless they are kept, what was there before is there again after it."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C goes to every process of the terminal's group; the driver alone decides what it means. SIGTERM comes
        # from the driver; but where somebody else has started the ranks, he sends it to all of them, and the driver,
        # which has it too, may want to finish what is under way.
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, _terminate if kept else signal.SIG_IGN)
    try:
        yield
    finally:
        if not kept:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            faulthandler.unregister(DUMP_SIGNAL)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


class _Rank:
    """The sockets and threads of one rank."""

    def __init__(self, boot: BootConfig, board: Board, watch: DriverWatch, worker_class: type[Worker] | None) -> None:
        self._boot = boot
        self._board = board
        self._worker_class = worker_class
        self._watch = watch

    def run(self) -> int:
        try:
            self._connect()
        except OSError as error:
            if self._watch.is_dead():
                return EXIT_DRIVER_GONE
            _log.error("rank %d can't reach the driver at %s: %s", self._boot.rank, self._boot.reply_endpoint, error)
            return EXIT_FAILED
        self._responder.start()
        try:
            return self._live()
        finally:
            self._steps.close()
            self._replies.close()
            self._responder.stop(self._boot.linger_s)

    def _connect(self) -> None:
        boot = self._boot
        # A forked rank may be here before the driver is: that binds this endpoint last.
        deadline = time.monotonic() + boot.startup_timeout_s
        while True:
            try:
                self._replies = self._reply_sender(RECONNECT_TIMEOUT_S)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if self._watch.is_dead() or time.monotonic() >= deadline:
                    raise
            time.sleep(_CONNECT_INTERVAL_S)
        self._steps = StepSubscriber(
            boot.publish_endpoint,
            run_id=boot.run_id,
            epoch=boot.epoch,
            max_message_bytes=boot.max_message_bytes,
            keys=boot.curve,
        )
        control = ControlSubscriber(
            boot.publish_endpoint,
            run_id=boot.run_id,
            epoch=boot.epoch,
            presence_of=None if boot.curve is None else boot.rank,
            keys=boot.curve,
        )
        # The responder watches the driver's life, and never waits for a connection.
        driver_timeout_s = None if boot.curve is None else boot.driver_timeout_s
        self._responder = Responder(control, self._reply_sender(0.0), self._board, self._watch, driver_timeout_s)

    def _live(self) -> int:
        boot = self._boot
        if not self._steps.wait_for_probe(boot.startup_timeout_s):
            _log.error("no handshake from the driver within startup_timeout_s=%g", boot.startup_timeout_s)
            return EXIT_FAILED
        self._replies.send(Kind.HELLO, flags=Flag.STEP_SOCKET)
        try:
            worker = self._set_up()
            loop = WorkerLoop(
                worker,
                self._step_source(worker),
                self._replies,
                self._board,
                rank=boot.rank,
                output_rank=boot.output_rank,
                max_answer_bytes=boot.max_message_bytes,
                keepalive=self._keep_alive if boot.keepalive == "collective" and worker.idle == "bus" else None,
                resume_timeout_s=boot.resume_timeout_s if boot.world_size > 1 else None,
            )
            self._tell(Phase.IDLE)
            loop.run()
            self._tell(Phase.STOPPING)
            worker.teardown()
            group = _process_group()
            if group is not None and group.exit_waits_for_peers():  # the worker has left it to us
                group.destroy_process_group()
        except DriverGone:
            return EXIT_DRIVER_GONE
        except LinkLost as error:  # nobody can be told
            _log.error("this rank ends: %s", error)
            return EXIT_LINK_LOST
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver is told
            _log.exception("%s failed", self._board.status.phase)
            status = self._board.status
            frames = codec.encode(describe_error(error))
            self._replies.send(Kind.FAILURE, status.sequence, 0, frames, times=NO_TIMES)
            return EXIT_FAILED
        self._replies.send(Kind.BYE)
        return 0

    def _set_up(self) -> Worker:
        boot = self._boot
        self._tell(Phase.IMPORTING)
        rank = RankInfo(
            rank=boot.rank,
            local_rank=boot.local_rank,
            local_world_size=boot.local_world_size,
            world_size=boot.world_size,
            epoch=boot.epoch,
            output_rank=boot.output_rank,
            device=boot.device,
            device_class=boot.device_class,
            rendezvous=boot.rendezvous,
            collective_timeout_s=boot.collective_timeout_s,
            options=boot.options,
            collective_log=CollectiveLog(self._board) if boot.check_collectives else None,
            is_aborted=self._board.is_aborted,
        )
        bind_device(rank)
        worker = (self._worker_class or load_worker_class(boot.worker, own_process=True))()
        self._tell(Phase.LOADING)
        worker.setup(rank)
        return worker

    def _step_source(self, worker: Worker) -> StepSource:
        boot = self._boot
        if worker.idle not in IDLE_PLACES:
            allowed = ", ".join(map(repr, IDLE_PLACES))
            raise ConfigError(f"{type(worker).__name__}.idle={worker.idle!r}: must be one of {allowed}")
        if worker.idle == "bus" or boot.world_size == 1:
            return self._steps
        if boot.keepalive == "bus" and boot.rank == 0:
            _log.warning(
                "ranks park inside a broadcast, and keepalive='bus' does not wake them: when idle for longer than "
                "collective_timeout_s=%g they end; use keepalive='collective'",
                boot.collective_timeout_s,
            )
        from .parking import park_in_broadcast  # noqa: PLC0415 - torch, for this one alone

        return park_in_broadcast(self._steps, self._board, boot.collective_timeout_s)

    def _keep_alive(self) -> None:
        if "torch.distributed" in sys.modules:  # else this rank has no collectives
            from .process_group import keep_alive  # noqa: PLC0415 - torch, where the worker has it

            keep_alive(self._boot.device)

    def _tell(self, phase: Phase) -> None:
        self._board.enter(phase)
        payload: bytes = msgpack.packb([phase, 0.0])
        self._replies.send(Kind.READY, frames=(payload,))

    def _reply_sender(self, reconnect_timeout_s: float) -> ReplySender:
        boot = self._boot
        return ReplySender(
            boot.reply_endpoint,
            run_id=boot.run_id,
            epoch=boot.epoch,
            rank=boot.rank,
            timeout_s=boot.reply_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            keys=boot.curve,
        )
