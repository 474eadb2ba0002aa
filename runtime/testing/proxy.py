"""A proxy between a group's driver and its ranks: a thread that passes messages on, or does not.

Each connection of a rank gets one of its own to the driver, and all that it says goes there in order: a PROBE that
arrives proves as much as without the proxy. Nothing is decoded but ZMTP's framing and stepcast's own header.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stepcast.bus.endpoints import RunDirectory
from stepcast.runtime.launch.plan import Link

from .frames import FrameFaults, MessageReader

_READ_BYTES = 1 << 18
#: How much a direction may hold for a reader that is slow, before it stops reading itself.
_MAX_HELD_BYTES = 1 << 20
_STOP_TIMEOUT_S = 5.0


class _Link(NamedTuple):
    """Where a rank connects to.

    Attributes:
        rank: the rank.
        driver: the driver's socket.
        to_rank: whether the driver sends there; else the rank does.
    """

    rank: int
    driver: Path
    to_rank: bool

    @property
    def is_over(self) -> bool:
        """Whether the epoch has ended: its run directory has gone."""
        return not self.driver.parent.exists()


@dataclass(eq=False)
class _Direction:
    """One direction of a connection.

    Attributes:
        source, target: the sockets.
        link: what it belongs to.
        life: the link's, when it was connected.
        to_rank: whether it leads from the driver to the rank.
        reader: finds the messages in what comes.
        unsent: what the target has not taken yet.
    """

    source: socket.socket
    target: socket.socket
    link: _Link
    life: int
    to_rank: bool
    reader: MessageReader = field(default_factory=MessageReader)
    unsent: bytearray = field(default_factory=bytearray)


class Proxy(threading.Thread):
    """Stands between the driver of one group and its ranks.

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
        self._planned: deque[tuple[socket.socket, _Link]] = deque()  # the thread takes them from here
        self._listeners: dict[socket.socket, _Link] = {}
        self._directions: dict[socket.socket, _Direction] = {}  # by their source
        self._by_target: dict[socket.socket, _Direction] = {}
        self._delayed: list[tuple[float, int, _Direction, bytes]] = []
        self._numbers = itertools.count()
        self._ended = False
        faults.on_change = self.wake

    def reroute(self, rank: int, link: Link) -> Link:
        """Give a rank the proxy's endpoints in place of the driver's.

        Args:
            rank: the rank.
            link: its link to the driver.

        Returns:
            Its link to the proxy.
        """
        return link._replace(
            publish_endpoint=self._listen(rank, link.publish_endpoint, to_rank=True),
            reply_endpoint=self._listen(rank, link.reply_endpoint, to_rank=False),
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
        for each in (*(listener for listener, _ in self._planned), *self._listeners, *self._directions):
            each.close()
        self._selector.close()
        os.close(self._wake)
        self._directory.remove()

    def run(self) -> None:
        """Pass messages on until it is closed."""
        while not self._ended:
            while self._planned:
                self._begin(*self._planned.popleft())
            for direction in list(self._directions.values()):
                self._watch(direction)
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

    def _listen(self, rank: int, endpoint: str, *, to_rank: bool) -> str:
        """In the thread that starts the group: the rank may connect at once, and be heard a little later."""
        name = f"{'p' if to_rank else 'r'}{next(self._numbers)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._directory.path / name))
        listener.listen()
        self._planned.append((listener, _Link(rank, Path(endpoint.removeprefix("ipc://")), to_rank)))
        self.wake()
        return self._directory.endpoint(name)

    def _begin(self, listener: socket.socket, link: _Link) -> None:
        """Listen for a new epoch, and no longer for those that are over."""
        self._listeners[listener] = link
        self._selector.register(listener, selectors.EVENT_READ)
        for each in [each for each, old in self._listeners.items() if old.is_over]:
            del self._listeners[each]
            self._selector.unregister(each)
            Path(each.getsockname()).unlink(missing_ok=True)
            each.close()
        for direction in [each for each in self._directions.values() if each.link.is_over]:
            self._close(direction)

    def _accept(self, listener: socket.socket) -> None:
        link = self._listeners[listener]
        worker, _ = listener.accept()
        life = self._faults.life(link.rank)
        driver = socket.socket(socket.AF_UNIX)
        try:
            if life is None:
                raise ConnectionRefusedError
            driver.connect(str(link.driver))
        except OSError:  # the driver has not bound yet, or has ended: the rank tries again, as it would there
            worker.close()
            driver.close()
            return
        for source, target, toward_rank in ((worker, driver, False), (driver, worker, True)):
            source.setblocking(False)
            direction = _Direction(source, target, link, life, toward_rank)
            direction.reader.carries_messages = toward_rank == link.to_rank
            self._directions[source] = self._by_target[target] = direction
            self._selector.register(source, selectors.EVENT_READ)

    def _watch(self, direction: _Direction) -> None:
        """Read from a side while the other takes what comes, and the link is neither cut nor stalled."""
        source = direction.source
        if source not in self._directions:  # closed just now, with its other direction
            return
        if self._is_cut(direction):
            self._close(direction)
            return
        events = 0
        if len(direction.unsent) < _MAX_HELD_BYTES and self._is_open(direction):
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

    def _is_cut(self, direction: _Direction) -> bool:
        return direction.life != self._faults.life(direction.link.rank)

    def _is_open(self, direction: _Direction) -> bool:
        return not self._is_cut(direction) and not self._faults.is_stalled(direction.link.rank)

    def _pass_on(self, direction: _Direction) -> None:
        if not self._is_open(direction):  # since the selector was asked
            return
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
            for delay_s, changed in self._faults.judge(direction.link.rank, message, to_rank=direction.to_rank):
                if delay_s:
                    due = time.monotonic() + delay_s
                    heapq.heappush(self._delayed, (due, next(self._numbers), direction, changed))
                else:
                    direction.unsent += changed
        self._flush(direction)

    def _send_delayed(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            _, _, direction, data = heapq.heappop(self._delayed)
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
        """Close both directions of a connection."""
        for each in (direction.source, direction.target):
            self._directions.pop(each, None)
            self._by_target.pop(each, None)
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()
        self._delayed = [each for each in self._delayed if each[2].source in self._directions]
        heapq.heapify(self._delayed)
