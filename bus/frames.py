"""The header that opens every message.

A message is ZeroMQ multipart: ``header | payload | buffer...``. The header is a fixed little-endian struct, so that a
message can be judged before anything in it is decoded:

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

The header of RESULT and FAILURE is followed, in the same frame, by the rank's times (`Times`).
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

MAGIC = b"scb"
VERSION = 1
DRIVER_RANK = -1

#: Sequenced messages, read by a worker's loop thread.
STEP_CLASS = b"S"
#: Messages for a worker's responder thread.
CONTROL_CLASS = b"C"
#: PROBE has a class of its own: a socket subscribes to it last, and leaves it once it has received one.
PROBE_CLASS = b"P"
#: Worker to driver.
REPLY_CLASS = b"R"


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
    #: In HELLO: the PROBE came on the step socket (else on the control socket).
    STEP_SOCKET = 4


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        kind: what the message is.
        flags: its modifiers, as the plain integer of `Flag`.
        epoch: the life of the group it belongs to.
        sequence: its sequence number; in HEARTBEAT the highest published, in replies that of the message answered.
        step: the step's id.
        rank: the sender's rank; -1 for the driver.
    """

    kind: int
    flags: int
    epoch: int
    sequence: int
    step: int
    rank: int


class Times(NamedTuple):
    """When a rank worked on a message.

    Attributes:
        received_ns: CLOCK_MONOTONIC of that host when its loop had the message, in nanoseconds.
        compute_ns: nanoseconds from there to the answer.
        waited_ns: the part of them spent waiting in collectives.
    """

    received_ns: int
    compute_ns: int
    waited_ns: int


_HEADER = struct.Struct("<c3sBBH16sIQQi")
_TIMES = struct.Struct("<QQQ")
HEADER_BYTES = _HEADER.size

_CLASS_OF: dict[int, bytes] = {
    **dict.fromkeys((Kind.BEGIN, Kind.STEP, Kind.CALL, Kind.KEEPALIVE, Kind.STOP), STEP_CLASS),
    **dict.fromkeys((Kind.HEARTBEAT, Kind.ABORT, Kind.DUMP, Kind.STOP_NOW), CONTROL_CLASS),
    Kind.PROBE: PROBE_CLASS,
    **dict.fromkeys(
        (Kind.HELLO, Kind.READY, Kind.RESULT, Kind.FAILURE, Kind.ALIVE, Kind.GAP, Kind.BYE), REPLY_CLASS
    ),
}


class BadFrame(ValueError):
    """A frame is not a header of this run; the message says why. It must be dropped undecoded."""


def pack_header(  # noqa: PLR0913 - one argument for each field of the wire
    kind: int, run_id: bytes, epoch: int, sequence: int = 0, step: int = 0, rank: int = DRIVER_RANK, flags: int = 0
) -> bytes:
    """Pack a header.

    Args:
        kind: a `Kind`; the message class follows from it.
        run_id: 16 bytes.
        epoch, sequence, step, rank, flags: as in `Header`.

    Returns:
        `HEADER_BYTES` bytes.
    """
    return _HEADER.pack(_CLASS_OF[kind], MAGIC, VERSION, kind, flags, run_id, epoch, sequence, step, rank)


def pack_times(received_ns: int, compute_ns: int, waited_ns: int) -> bytes:
    """Pack what follows the header of a RESULT or FAILURE.

    Args:
        received_ns, compute_ns, waited_ns: as in `Times`.

    Returns:
        24 bytes, to be appended to the header.
    """
    return _TIMES.pack(received_ns, compute_ns, waited_ns)


def parse_header(frame: bytes, run_id: bytes) -> Header:
    """Judge and parse a message's first frame.

    Args:
        frame: the first frame of a message.
        run_id: the 16 bytes that every message of this run carries.

    Returns:
        The header.

    Raises:
        BadFrame: wrong length, magic, version, class, kind or run id.
    """
    if len(frame) < HEADER_BYTES:
        raise BadFrame(f"a header has {HEADER_BYTES} bytes, this frame has {len(frame)}")
    message_class, magic, version, kind, flags, run, epoch, sequence, step, rank = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise BadFrame("wrong magic: not a stepcast message")
    if version != VERSION:
        raise BadFrame(f"protocol version {version}, expected {VERSION}: run the same stepcast on every host")
    if run != run_id:
        raise BadFrame("a message of another run")
    if _CLASS_OF.get(kind) != message_class:
        raise BadFrame(f"kind {kind} does not exist in class {message_class!r}")
    timed = kind in (Kind.RESULT, Kind.FAILURE)
    if len(frame) != HEADER_BYTES + (_TIMES.size if timed else 0):
        raise BadFrame(f"a header of kind {kind} has another length than {len(frame)}")
    return Header(kind, flags, epoch, sequence, step, rank)


def parse_times(frame: bytes) -> Times:
    """Read the times from the first frame of a RESULT or FAILURE.

    Args:
        frame: a frame that `parse_header` has accepted.

    Returns:
        The times.
    """
    return Times(*_TIMES.unpack_from(frame, HEADER_BYTES))
