"""A proxy between a group's driver and its ranks: a thread that passes messages on, or does not.

Each connection of a rank gets one of its own to the driver, and all that it says goes there in order: a PROBE that
arrives proves as much as without the proxy. Nothing is decoded but ZMTP's framing and stepcast's own header.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from stepcast.bus.endpoints import RunDirectory
from stepcast.workers.boot_config import BootConfig

from .frames import FrameFaults, MessageReader

_READ_BYTES = 1 << 18
#: How much a direction may hold for a reader that is slow, before it stops reading itself.
_MAX_HELD_BYTES = 1 << 20
_STOP_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _Direction:
    """One direction of a connection.

    Attributes:
        source, target: the sockets.
        rank: the rank at the other end of the link.
        to_rank: whether it leads from the driver to the rank.
        reader: finds the messages in what comes.
        unsent: what the target has not taken yet.
    """

    source: socket.socket
    target: socket.socket
    rank: int
    to_rank: bool
    reader: MessageReader = field(default_factory=MessageReader)
    unsent: bytearray = field(default_factory=bytearray)


class Proxy(threading.Thread):
    """Stands between every group that is planned while it is open, and its ranks.

    Args:
        faults: decides what happens to each message.
    """

    def __init__(self, faults: FrameFaults) -> None:
        super().__init__(name="stepcast-proxy", daemon=True)
        self._faults = faults
        self._directory = RunDirectory()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listeners: dict[socket.socket, tuple[int, str, bool]] = {}
        self._directions: dict[socket.socket, _Direction] = {}  # by their source
        self._by_target: dict[socket.socket, _Direction] = {}
        self._delayed: list[tuple[float, int, _Direction, bytes]] = []
        self._numbers = itertools.count()
        self._ended = False
        faults.on_change = self.wake

    def reroute(self, boot: BootConfig) -> BootConfig:
        """Give a rank the proxy's endpoints in place of the driver's.

        Args:
            boot: what the rank was to be told.

        Returns:
            What it is told instead.
        """
        return dataclasses.replace(
            boot,
            publish_endpoint=self._listen(boot, boot.publish_endpoint, to_rank=True),
            reply_endpoint=self._listen(boot, boot.reply_endpoint, to_rank=False),
        )

    def wake(self) -> None:
        """Have the thread look at the faults again: they have changed."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close every connection, and end the thread."""
        self._ended = True
        self.wake()
        self.join(_STOP_TIMEOUT_S)
        self._faults.on_change = lambda: None
        for each in (*self._listeners, *self._directions):
            each.close()
        self._selector.close()
        os.close(self._wake)
        self._directory.remove()

    def run(self) -> None:
        """Pass messages on until it is closed."""
        while not self._ended:
            for direction in self._directions.values():
                self._watch(direction.source)
            due_in_s = self._delayed[0][0] - time.monotonic() if self._delayed else None
            for key, events in self._selector.select(None if due_in_s is None else max(0.0, due_in_s)):
                self._turn(key.fileobj, events)
            self._send_delayed()

    def _turn(self, file: object, events: int) -> None:
        if not isinstance(file, socket.socket):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif file in self._listeners:
            self._accept(file)
        elif file in self._directions:  # else its connection was closed in this turn
            if events & selectors.EVENT_WRITE:
                self._flush(self._by_target[file])
            if events & selectors.EVENT_READ and file in self._directions:
                self._pass_on(self._directions[file])

    def _listen(self, boot: BootConfig, driver: str, *, to_rank: bool) -> str:
        name = f"{'p' if to_rank else 'r'}{next(self._numbers)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._directory.path / name))
        listener.listen()
        self._listeners[listener] = (boot.rank, driver.removeprefix("ipc://"), to_rank)
        self._selector.register(listener, selectors.EVENT_READ)
        self.wake()
        return self._directory.endpoint(name)

    def _accept(self, listener: socket.socket) -> None:
        rank, path, to_rank = self._listeners[listener]
        worker, _ = listener.accept()
        driver = socket.socket(socket.AF_UNIX)
        try:
            driver.connect(path)
        except OSError:  # the driver has not bound yet, or has ended: the rank tries again, as it would there
            worker.close()
            driver.close()
            return
        for source, target, toward_rank in ((worker, driver, False), (driver, worker, True)):
            source.setblocking(False)
            direction = _Direction(source, target, rank, toward_rank)
            direction.reader.carries_messages = toward_rank == to_rank
            self._directions[source] = self._by_target[target] = direction
            self._selector.register(source, selectors.EVENT_READ)

    def _watch(self, source: socket.socket) -> None:
        """Read from a side while the other takes what comes, and the link isn't stalled."""
        events = 0
        direction = self._directions[source]
        if len(direction.unsent) < _MAX_HELD_BYTES and not self._faults.is_stalled(direction.rank):
            events |= selectors.EVENT_READ
        if self._by_target[source].unsent:
            events |= selectors.EVENT_WRITE
        current = self._selector.get_map().get(source)
        if current is not None and current.events == events:
            return
        if current is None and events:
            self._selector.register(source, events)
        elif current is not None and events:
            self._selector.modify(source, events)
        elif current is not None:
            self._selector.unregister(source)

    def _pass_on(self, direction: _Direction) -> None:
        try:
            data = direction.source.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(direction)
            return
        for message in direction.reader.feed(data):
            if not message.head:
                direction.unsent += message.data
                continue
            for delay_s, changed in self._faults.judge(direction.rank, message, to_rank=direction.to_rank):
                if delay_s:
                    due = time.monotonic() + delay_s
                    heapq.heappush(self._delayed, (due, next(self._numbers), direction, changed))
                else:
                    direction.unsent += changed
        self._flush(direction)

    def _send_delayed(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            _, _, direction, data = heapq.heappop(self._delayed)
            if direction.source in self._directions:
                direction.unsent += data
                self._flush(direction)

    def _flush(self, direction: _Direction) -> None:
        try:
            sent = direction.target.send(direction.unsent) if direction.unsent else 0
        except BlockingIOError:
            return
        except OSError:
            self._close(direction)
            return
        del direction.unsent[:sent]

    def _close(self, direction: _Direction) -> None:
        for each in (direction.source, direction.target):
            self._directions.pop(each, None)
            self._by_target.pop(each, None)
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()
