"""The responder thread: answers for the rank while its loop computes, and ends the process when the driver dies."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time

import msgpack

from stepcast.bus.frames import Kind
from stepcast.bus.liveness import Phase, TailGap
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.subscriber import ControlSubscriber
from stepcast.bus.zmtp import RECONNECT_TIMEOUT_S

from .board import Board
from .death_watch import DriverWatch

#: Exit codes of a worker that ends by itself.
EXIT_DRIVER_GONE = 81
EXIT_STOPPED_NOW = 82
EXIT_RESPONDER_FAILED = 83
#: Its connection to the driver has ended for good, though the driver lives.
EXIT_LINK_LOST = 84

#: How often the driver's pid is looked up where the kernel has no pidfd.
_WATCH_INTERVAL_S = 0.5
#: How often a connection that has ended is tried again.
_RECONNECT_INTERVAL_S = 0.05
#: The signal that dumps every thread's stack to stderr, by faulthandler, without the GIL.
DUMP_SIGNAL = signal.SIGUSR1

_log = logging.getLogger("stepcast.worker")


class Responder(threading.Thread):
    """Owns the rank's control socket and a reply socket of its own.

    Args:
        control: the control socket; this thread closes it.
        replies: a reply socket; this thread closes it.
        board: what the loop thread is doing.
        watch: the driver's death watch; this thread closes it.
    """

    def __init__(self, control: ControlSubscriber, replies: ReplySender, board: Board, watch: DriverWatch) -> None:
        super().__init__(name="stepcast-responder", daemon=True)
        self._control = control
        self._replies = replies
        self._board = board
        self._watch = watch
        self._tail = TailGap()
        self._lost_at = 0.0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def run(self) -> None:
        """Answer until `stop` is called, the driver dies, or it says STOP-NOW."""
        try:
            if self._watch.is_dead():  # it died, and its id may belong to another process by now
                os._exit(EXIT_DRIVER_GONE)
            self._run()
        except BaseException:  # noqa: BLE001 - a rank without its responder would look alive
            _log.exception("the responder thread failed; this rank ends")
            os._exit(EXIT_RESPONDER_FAILED)
        finally:
            self._control.close()
            self._replies.close()
            self._watch.close()

    def stop(self, timeout_s: float) -> None:
        """End the thread; called by the loop thread at exit.

        Args:
            timeout_s: the longest to wait for it.
        """
        os.eventfd_write(self._wake, 1)
        self.join(timeout_s)
        os.close(self._wake)

    def _run(self) -> None:
        connected = True
        while True:
            # The descriptor may call for nothing, and libzmq's calls but once: the socket itself is asked, and first.
            if not connected:
                connected = self._reconnect()
            elif self._control.socket.poll(0):
                connected = self._answer_all()
            if self._watch.is_dead():
                # The loop thread may be in a collective or in user code that never returns: nothing is left to
                # finish for, so the process ends here and now.
                os._exit(EXIT_DRIVER_GONE)
            if self._must_stop(connected):
                return

    def _must_stop(self, connected: bool) -> bool:  # noqa: FBT001 - private, and there is only this one
        """Wait until something has come or is due. Returns whether it was `stop`."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        intervals_s = [_WATCH_INTERVAL_S] if self._watch.fd is None else []
        if self._watch.fd is not None:
            poller.register(self._watch.fd, select.POLLIN)
        if connected:
            poller.register(self._control.socket, select.POLLIN)
            intervals_s += [] if (look_s := self._control.socket.look_interval_s) is None else [look_s]
        else:
            intervals_s.append(_RECONNECT_INTERVAL_S)
        ready = poller.poll(min(intervals_s) * 1000 if intervals_s else None)
        return any(fd == self._wake for fd, _ in ready)

    def _reconnect(self) -> bool:
        try:
            self._control.socket.reconnect(0.0)
        except OSError as error:
            is_remote = self._control.socket.look_interval_s is not None
            if is_remote and time.monotonic() - self._lost_at >= RECONNECT_TIMEOUT_S:
                # The watch is over this host. That the driver's has gone shows in nothing else, and the loop thread may
                # be in a collective.
                _log.error("this rank ends after %g s without a connection: %s", RECONNECT_TIMEOUT_S, error)
                os._exit(EXIT_LINK_LOST)
            return False
        return True

    def _answer_all(self) -> bool:
        """Answer what has come. Returns False where the connection has ended: a link was cut, or the driver died."""
        try:
            self._answer()
            while self._control.socket.has_unread:
                self._answer()
        except ConnectionError:
            self._lost_at = time.monotonic()
            return False
        return True

    def _answer(self) -> None:
        message = self._control.receive()
        if message is None:
            return
        header = message.header
        if header.kind == Kind.HEARTBEAT:
            self._answer_heartbeat(header.sequence)
        elif header.kind == Kind.PROBE:
            self._control.probed()
            self._replies.send(Kind.HELLO)
        elif header.kind == Kind.ABORT:
            self._board.aborted.add(header.step)
        elif header.kind == Kind.RESUME:
            self._board.resume(header.step)
        elif header.kind == Kind.DUMP:
            os.kill(os.getpid(), DUMP_SIGNAL)
        elif header.kind == Kind.STOP_NOW:
            os._exit(EXIT_STOPPED_NOW)

    def _answer_heartbeat(self, highest: int) -> None:
        status = self._board.status
        age_s = (time.monotonic_ns() - status.since_ns) / 1e9
        payload: bytes = msgpack.packb([status.phase, age_s, self._board.collectives(status.sequence)])
        self._replies.send(Kind.ALIVE, status.sequence, status.step, (payload,))
        if self._tail.heartbeat(highest, status.sequence, idle=status.phase is Phase.IDLE):
            self._replies.send(Kind.GAP, status.sequence + 1)
