"""The header that opens every message.

A message is ZeroMQ multipart: ``head | buffer...``, and the head is ``header | payload`` in one frame, since each
frame costs several microseconds on its way. The header is a fixed little-endian struct, so that a message can be judged
before anything in it is decoded:

    ====== ====== ==============================================================
    offset bytes  field
    ====== ====== ==============================================================
    0      1      message class, which subscriptions filter on
    1      3      magic
    4      1      protocol version
    5      1      kind
    6      2      flags
    8      16     run id, random for each run
    24     4      epoch, one life of the group, from 1
    28     8      sequence number; 0 on messages that take none
    36     8      step id; 0 where there is none
    44     4      rank; -1 for the driver
    ====== ====== ==============================================================

In RESULT and FAILURE the rank's times (`Times`) stand between the header and the payload, the tally of its collectives
last: so whether two ranks agree on them is a comparison of bytes.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

MAGIC = b"scb"
VERSION = 3
DRIVER_RANK = -1

#: Sequenced messages, read by a worker's loop thread.
STEP_CLASS = b"S"
#: Messages for a worker's responder thread.
CONTROL_CLASS = b"C"
#: PROBE has a class of its own: a socket subscribes to it last, and leaves it once it has received one.
PROBE_CLASS = b"P"
#: Worker to driver.
REPLY_CLASS = b"R"
#: Nothing is published in it: that a rank's subscription comes and goes tells the driver of its connection.
PRESENCE_CLASS = b"W"
#: What a frame may have beside the payload.
HEAD_ROOM_BYTES = 256


class Kind(IntEnum):
    """What a message is."""

    # Step class: sequenced, and answered by every rank.
    BEGIN = 1
    STEP = 2
    CALL = 3
    KEEPALIVE = 4
    STOP = 5
    # Control and probe class: no sequence number of their own.
    PROBE = 16
    HEARTBEAT = 17
    ABORT = 18
    DUMP = 19
    STOP_NOW = 20
    RESUME = 21
    # Worker to driver.
    HELLO = 32
    READY = 33
    RESULT = 34
    FAILURE = 35
    ALIVE = 36
    GAP = 37
    BYE = 38


class Flag(IntFlag):
    """Modifiers of a message."""

    NONE = 0
    #: Every rank's answer is wanted, not only the output rank's.
    GATHER = 1
    #: The message was published before, and is published again to close a gap.
    REPLAY = 2
    #: Buffers follow the head, in frames of their own.
    BUFFERS = 8
    #: In HELLO: the PROBE came on the step socket (else on the control socket).
    STEP_SOCKET = 4


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        kind: what the message is.
        flags: its modifiers, as the plain integer of `Flag`.
        sequence: its sequence number; in HEARTBEAT the highest published, in replies that of the message answered.
        step: the step's id.
        rank: the sender's rank; -1 for the driver.
    """

    kind: int
    flags: int
    sequence: int
    step: int
    rank: int


class Times(NamedTuple):
    """When a rank worked on a message, and the collectives that it entered for it.

    Attributes:
        received_ns: CLOCK_MONOTONIC of that host when its loop had the message, in nanoseconds.
        compute_ns: nanoseconds from there to the answer.
        queued_ns: how long its thread was kept from a processor since it looked last, before it had the message or
            after; it looks in steps of a millisecond or more. 0 in shorter ones, and where the kernel does not tell.
        waited_ns: the part of `compute_ns` spent waiting in collectives.
        collectives: how many of them it has entered; 0 where they are not counted.
        fingerprint: which ones, as `stepcast.bus.tally` draws it.
    """

    received_ns: int
    compute_ns: int
    queued_ns: int
    waited_ns: int
    collectives: int
    fingerprint: int


#: Those of a rank that has worked on nothing.
NO_TIMES = Times(0, 0, 0, 0, 0, 0)

_HEADER = struct.Struct("<c3sBBH16sIQQi")
#: The same bytes, with what is only compared in one piece: opening, kind, flags, identity, sequence, step, rank.
_GROUPED = struct.Struct("<5sBH20sQQi")
#: Where the flags begin; all flags but those of later versions are in this byte.
FLAGS_AT = 6
#: Its end alone: sequence, step, rank.
PLACE = struct.Struct("<QQi")
PLACE_START = _GROUPED.size - PLACE.size
#: The same, and the times behind it.
TIMED_PLACE = struct.Struct(PLACE.format + "QQQQQQ")
_TIMES = struct.Struct("<QQQQQQ")
HEADER_BYTES = _HEADER.size
TIMES_BYTES = _TIMES.size
#: Where the tally of the collectives begins in the times.
TALLY_START = 32

_CLASS_OF: dict[int, bytes] = {
    **dict.fromkeys((Kind.BEGIN, Kind.STEP, Kind.CALL, Kind.KEEPALIVE, Kind.STOP), STEP_CLASS),
    **dict.fromkeys((Kind.HEARTBEAT, Kind.ABORT, Kind.DUMP, Kind.STOP_NOW, Kind.RESUME), CONTROL_CLASS),
    Kind.PROBE: PROBE_CLASS,
    **dict.fromkeys((Kind.HELLO, Kind.READY, Kind.RESULT, Kind.FAILURE, Kind.ALIVE, Kind.GAP, Kind.BYE), REPLY_CLASS),
}
#: A header's class, magic and version, by kind.
OPENING_OF = {int(kind): message_class + MAGIC + bytes([VERSION]) for kind, message_class in _CLASS_OF.items()}
#: Makes a named tuple several times sooner than its own constructor; for what is made with each message.
new_tuple = tuple.__new__


class BadFrame(ValueError):
    """A frame is not the head of a message of this run and epoch; it must be dropped undecoded.

    Attributes:
        reason: "foreign" for what is not of this run, "epoch" for what is of another life of the group.
    """

    def __init__(self, message: str, reason: str = "foreign") -> None:
        super().__init__(message)
        self.reason = reason


class Wire:
    """Packs and judges the headers of one run and epoch.

    Args:
        run_id: 16 bytes.
        epoch: the life of the group.
    """

    def __init__(self, run_id: bytes, epoch: int) -> None:
        self._run_id = run_id
        self._epoch = epoch
        #: The run id and the epoch as they stand in every header.
        self.identity = run_id + epoch.to_bytes(4, "little")

    def start(self, kind: int, flags: int) -> bytes:
        """The first `PLACE_START` bytes of a header, alike in all messages of a kind and the same flags.

        Args:
            kind: a `Kind`.
            flags: `Flag` values.
        """
        return self.pack(kind, flags=flags)[:PLACE_START]

    def pack(self, kind: int, sequence: int = 0, step: int = 0, rank: int = DRIVER_RANK, flags: int = 0) -> bytes:
        """Pack a header.

        Args:
            kind: a `Kind`; the message class follows from it.
            sequence, step, rank, flags: as in `Header`.

        Returns:
            `HEADER_BYTES` bytes.
        """
        return _HEADER.pack(
            _CLASS_OF[kind], MAGIC, VERSION, kind, flags, self._run_id, self._epoch, sequence, step, rank
        )

    def parse(self, head: bytes | bytearray) -> Header:
        """Judge a message's first frame.

        Args:
            head: the frame.

        Returns:
            Its header.

        Raises:
            BadFrame: wrong length, magic, version, class, kind, run id or epoch.
        """
        if len(head) < HEADER_BYTES:
            raise BadFrame(f"a header has {HEADER_BYTES} bytes, this frame has {len(head)}")
        opening, kind, flags, identity, sequence, step, rank = _GROUPED.unpack_from(head)
        if identity != self.identity or OPENING_OF.get(kind) != opening:
            raise self._what_is_wrong(head)
        return new_tuple(Header, (kind, flags, sequence, step, rank))

    def _what_is_wrong(self, head: bytes | bytearray) -> BadFrame:
        message_class, magic, version, kind, _, run_id, epoch, *_ = _HEADER.unpack_from(head)
        if magic != MAGIC:
            return BadFrame("wrong magic: not a stepcast message")
        if version != VERSION:
            return BadFrame(f"protocol version {version}, expected {VERSION}: run the same stepcast everywhere")
        if run_id != self._run_id:
            return BadFrame("a message of another run")
        if _CLASS_OF.get(kind) != message_class:
            return BadFrame(f"kind {kind} does not exist in class {message_class!r}")
        return BadFrame(f"epoch {epoch}, expected {self._epoch}", "epoch")


def pack_times(times: tuple[int, int, int, int, int, int]) -> bytes:
    """Pack times alone, for `parse_times`.

    Args:
        times: as in `Times`.

    Returns:
        `TIMES_BYTES` bytes.
    """
    return _TIMES.pack(*times)


def parse_times(data: bytes) -> Times:
    """Read a rank's times.

    Args:
        data: the `TIMES_BYTES` bytes behind the header of a RESULT or FAILURE.

    Returns:
        The times.
    """
    return Times._make(_TIMES.unpack(data))


def presence_topic(rank: int) -> bytes:
    """What a rank of another host subscribes to, so that the driver knows of its connection.

    Args:
        rank: the rank.
    """
    return PRESENCE_CLASS + rank.to_bytes(4, "little")


def parse_presence(topic: bytes) -> int | None:
    """Tell whose presence a topic stands for.

    Args:
        topic: what was subscribed to.

    Returns:
        The rank; None where it is another topic.
    """
    if len(topic) != len(PRESENCE_CLASS) + 4 or not topic.startswith(PRESENCE_CLASS):
        return None
    return int.from_bytes(topic[len(PRESENCE_CLASS) :], "little")
