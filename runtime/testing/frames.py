"""Faults of frames, and the framing that they need to know: which messages a link loses, delays, or changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stepcast.bus.frames import HEADER_BYTES, MAGIC, Kind

#: ZMTP 3: what each side says first, and the flags of a frame (RFC 23).
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_HEAD, _LONG_HEAD = 2, 9
_KIND_AT = 5
#: A byte of the run id: what is changed there must be dropped undecoded.
_CORRUPT_AT = 9


class ZmtpMessage(NamedTuple):
    """What one side has said: a message of stepcast's, or whatever ZMTP itself needs.

    Attributes:
        data: its bytes on the wire.
        head: where stepcast's header begins in them; 0 where there is none.
    """

    data: bytes
    head: int

    @property
    def kind(self) -> int:
        """The message's `Kind`."""
        return self.data[self.head + _KIND_AT]


class MessageReader:
    """Cuts a stream of ZMTP into messages.

    Attributes:
        carries_messages: whether this direction of the link carries stepcast's messages; the other has only ZMTP's.
    """

    def __init__(self) -> None:
        self.carries_messages = False
        self._data = bytearray()
        self._greeting_left = _GREETING_BYTES

    def feed(self, data: bytes) -> Iterator[ZmtpMessage]:
        """Take what came next.

        Args:
            data: bytes.

        Yields:
            Each message that is complete, in order.
        """
        greeting = data[: self._greeting_left]
        if greeting:  # at once, in whatever pieces: each side waits for the other's
            self._greeting_left -= len(greeting)
            yield ZmtpMessage(greeting, 0)
        self._data += data[len(greeting) :]
        while (length := self._complete()) > 0:
            message = bytes(self._data[:length])
            del self._data[:length]
            yield ZmtpMessage(message, self._head_of(message))

    def _complete(self) -> int:
        """The bytes of the first message that is here as a whole; 0 where none is."""
        at = 0
        while True:
            head = self._data[at : at + _LONG_HEAD]
            if len(head) < _SHORT_HEAD:
                return 0
            if head[0] & _LONG:
                if len(head) < _LONG_HEAD:
                    return 0
                at += _LONG_HEAD + int.from_bytes(head[1:], "big")
            else:
                at += _SHORT_HEAD + head[1]
            if at > len(self._data):
                return 0
            if not head[0] & _MORE:
                return at

    def _head_of(self, message: bytes) -> int:
        if not self.carries_messages or message[0] & _COMMAND:
            return 0
        head = _LONG_HEAD if message[0] & _LONG else _SHORT_HEAD
        is_ours = message[head + 1 : head + 1 + len(MAGIC)] == MAGIC and len(message) >= head + HEADER_BYTES
        return head if is_ours else 0


@dataclass
class _Rule:
    name: str
    rank: int
    kind: int
    left: int
    act: Callable[[ZmtpMessage], list[tuple[float, bytes]]]


@dataclass
class FrameFaults:
    """What is to happen to the messages between the driver and the ranks. May be used from any thread.

    A fault waits for the next messages of its kind on the rank's link, `count` of them; what is not hit passes
    untouched. `happened` counts the messages that were hit.

    Attributes:
        happened: by fault's name, how many messages it has hit; for `cut`, how often the link was cut.
        on_change: called when a link is cut, stalled or healed; the proxy's.
    """

    happened: dict[str, int] = field(default_factory=dict)
    on_change: Callable[[], object] = lambda: None
    _rules: list[_Rule] = field(default_factory=list)
    _cut: set[int] = field(default_factory=set)
    _cuts: dict[int, int] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    _stalled: set[int] = field(default_factory=set)
    _held: dict[int, list[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def drop(self, rank: int, kind: Kind = Kind.STEP, count: int = 1) -> None:
        """Lose messages.

        Args:
            rank: at whose link.
            kind: of which kind.
            count: how many.
        """
        self._add("drop", rank, kind, count, lambda _: [])

    def duplicate(self, rank: int, kind: Kind = Kind.STEP, count: int = 1) -> None:
        """Deliver messages twice; arguments as in `drop`."""
        self._add("duplicate", rank, kind, count, lambda message: [(0.0, message.data * 2)])

    def corrupt(self, rank: int, kind: Kind = Kind.STEP, count: int = 1) -> None:
        """Change a byte of messages' headers; arguments as in `drop`."""

        def corrupted(message: ZmtpMessage) -> list[tuple[float, bytes]]:
            data = bytearray(message.data)
            data[message.head + _CORRUPT_AT] ^= 0xFF
            return [(0.0, bytes(data))]

        self._add("corrupt", rank, kind, count, corrupted)

    def delay(self, rank: int, seconds: float, kind: Kind = Kind.STEP, count: int = 1) -> None:
        """Deliver messages later than those that follow them.

        Args:
            rank, kind, count: as in `drop`.
            seconds: how much later.
        """
        self._add("delay", rank, kind, count, lambda message: [(seconds, message.data)])

    def reorder(self, rank: int, kind: Kind = Kind.STEP) -> None:
        """Deliver the next message right after the one that follows it; arguments as in `drop`."""
        self._add("reorder", rank, kind, 1, lambda _: [])

    def cut(self, rank: int) -> None:
        """Close a rank's connections, with all that is on its way in them, and refuse new ones until `heal`."""
        with self._lock:
            self._cut.add(rank)
            self._cuts[rank] = self._cuts.get(rank, 0) + 1
            self._held.pop(rank, None)
            self._count("cut")
        self.on_change()

    def blackhole(self, rank: int) -> None:
        """Lose everything on a rank's link, both ways, until `heal`; its connections stay open, and show nothing."""
        with self._lock:
            self._lost.add(rank)

    def stall(self, rank: int) -> None:
        """Let nothing pass on a rank's link until `heal`: it waits, in queues that fill up."""
        with self._lock:
            self._stalled.add(rank)
        self.on_change()

    def heal(self, rank: int) -> None:
        """End what `cut`, `blackhole` and `stall` began, and forget the faults that still wait for a message.

        Args:
            rank: whose link.
        """
        with self._lock:
            self._cut.discard(rank)
            self._lost.discard(rank)
            self._stalled.discard(rank)
            self._rules = [rule for rule in self._rules if rule.rank != rank]
        self.on_change()

    def is_stalled(self, rank: int) -> bool:
        """Tell whether nothing may pass on a rank's link; for the proxy."""
        return rank in self._stalled

    def life(self, rank: int) -> int | None:
        """Tell which connections a rank's link has; for the proxy.

        Args:
            rank: whose link.

        Returns:
            How often the link was cut: what was connected at another count is to be closed. None while it is cut.
        """
        with self._lock:
            return None if rank in self._cut else self._cuts.get(rank, 0)

    def judge(self, rank: int, message: ZmtpMessage, *, to_rank: bool) -> list[tuple[float, bytes]]:
        """Decide on one message; for the proxy.

        Args:
            rank: at whose link.
            message: the message.
            to_rank: whether the driver has sent it.

        Returns:
            What to deliver: each with the seconds to wait before.
        """
        with self._lock:
            if rank in self._lost:
                self._count("blackhole")
                return []
            for rule in self._rules:
                if rule.rank == rank and rule.kind == message.kind:
                    return self._apply(rule, message)
            held = self._held.pop(rank, []) if to_rank and message.kind in _ORDERED else []
            return [(0.0, message.data), *((0.0, each) for each in held)]

    def _apply(self, rule: _Rule, message: ZmtpMessage) -> list[tuple[float, bytes]]:
        rule.left -= 1
        if not rule.left:
            self._rules.remove(rule)
        self._count(rule.name)
        if rule.name == "reorder":
            self._held.setdefault(rule.rank, []).append(message.data)
        return rule.act(message)

    def _add(
        self, name: str, rank: int, kind: Kind, count: int, act: Callable[[ZmtpMessage], list[tuple[float, bytes]]]
    ) -> None:
        with self._lock:
            self._rules.append(_Rule(name, rank, int(kind), count, act))

    def _count(self, name: str) -> None:
        self.happened[name] = self.happened.get(name, 0) + 1


#: The kinds that come in order on one socket, so that one can overtake another.
_ORDERED = frozenset({int(Kind.STEP), int(Kind.CALL), int(Kind.STOP)})
