"""The header: every field travels, and what is not of this run and epoch is told apart before anything is decoded."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.bus.frames import (
    CONTROL_CLASS,
    DRIVER_RANK,
    HEADER_BYTES,
    MAGIC,
    PROBE_CLASS,
    REPLY_CLASS,
    STEP_CLASS,
    TIMES_BYTES,
    VERSION,
    BadFrame,
    Flag,
    Header,
    Kind,
    Times,
    Wire,
    pack_times,
    parse_times,
)

RUN_ID = bytes(range(16))
WIRE = Wire(RUN_ID, 7)
GOOD = WIRE.pack(Kind.STEP, 5, 9)

CLASSES = {
    STEP_CLASS: (Kind.BEGIN, Kind.STEP, Kind.CALL, Kind.KEEPALIVE, Kind.STOP),
    CONTROL_CLASS: (Kind.HEARTBEAT, Kind.ABORT, Kind.DUMP, Kind.STOP_NOW, Kind.RESUME),
    PROBE_CLASS: (Kind.PROBE,),
    REPLY_CLASS: (Kind.HELLO, Kind.READY, Kind.RESULT, Kind.FAILURE, Kind.ALIVE, Kind.GAP, Kind.BYE),
}

kinds = st.sampled_from(sorted(Kind))
run_ids = st.binary(min_size=16, max_size=16)
u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
epochs = st.integers(1, 2**32 - 1)
ranks = st.integers(-(2**31), 2**31 - 1)


def refused(head: bytes, reason: str, *words: str) -> None:
    """Assert that a frame is refused, for the reason meant."""
    with pytest.raises(BadFrame) as caught:
        WIRE.parse(head)
    assert caught.value.reason == reason
    for word in words:
        assert word in str(caught.value)


def parsed(head: bytes) -> Header | BadFrame:
    """Return the header, or the only error there may be."""
    try:
        return WIRE.parse(head)
    except BadFrame as problem:
        return problem


# --- Round trips ----------------------------------------------------------------------------------------------------


@given(run_ids, epochs, st.builds(Header, kinds, u16, u64, u64, ranks), st.binary())
def test_every_field_survives_the_round_trip(run_id: bytes, epoch: int, header: Header, payload: bytes) -> None:
    """A header arrives as it was packed, whatever its fields hold and whatever follows it in the frame."""
    wire = Wire(run_id, epoch)
    head = wire.pack(header.kind, header.sequence, header.step, header.rank, header.flags)
    assert len(head) == HEADER_BYTES
    assert wire.parse(head + payload) == header


@given(
    st.sampled_from([Kind.RESULT, Kind.FAILURE]),
    u64,
    u64,
    ranks,
    u16,
    st.tuples(u64, u64, u64, u64, u64, u64),
    st.binary(),
)
def test_the_times_travel_behind_the_header(
    kind: Kind,
    sequence: int,
    step: int,
    rank: int,
    flags: int,
    times: tuple[int, int, int, int, int, int],
    payload: bytes,
) -> None:
    """The header of a timed message is that of any other, and the times come back in their order."""
    head = WIRE.pack(kind, sequence, step, rank, flags) + pack_times(times)
    assert len(head) == HEADER_BYTES + TIMES_BYTES
    assert WIRE.parse(head + payload) == Header(kind, flags, sequence, step, rank)
    assert head[:HEADER_BYTES] == WIRE.pack(kind, sequence, step, rank, flags)
    assert parse_times(head[HEADER_BYTES:]) == Times(*times)


def test_the_fields_lie_where_the_documentation_says() -> None:
    """Each field can be read at its documented offset, in little-endian order."""
    head = WIRE.pack(Kind.CALL, 0x0102030405060708, 0x1112131415161718, -2, Flag.GATHER | Flag.BUFFERS)
    assert len(head) == 48
    assert head[0:1] == b"S"
    assert head[1:4] == MAGIC
    assert head[4] == VERSION
    assert head[5] == Kind.CALL
    assert head[6:8] == bytes([9, 0])
    assert head[8:24] == RUN_ID
    assert head[24:28] == bytes([7, 0, 0, 0])
    assert head[28:36] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert head[36:44] == bytes([0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11])
    assert struct.unpack("<i", head[44:48]) == (-2,)


def test_a_header_without_more_is_the_drivers() -> None:
    """What is left out is zero, and the rank is the driver's."""
    assert WIRE.parse(WIRE.pack(Kind.HEARTBEAT)) == Header(Kind.HEARTBEAT, 0, 0, 0, DRIVER_RANK)


def test_the_first_byte_is_the_class_that_subscriptions_filter_on() -> None:
    """Every kind has one class, and no class opens with another one's byte."""
    assert {kind for members in CLASSES.values() for kind in members} == set(Kind)
    assert len(CLASSES) == 4
    for message_class, members in CLASSES.items():
        assert len(message_class) == 1
        for kind in members:
            assert WIRE.pack(kind)[:1] == message_class


# --- What is refused ------------------------------------------------------------------------------------------------


def test_a_frame_shorter_than_a_header_is_foreign() -> None:
    """A header that is cut anywhere, or empty, is refused and its length told."""
    for length in range(HEADER_BYTES):
        refused(GOOD[:length], "foreign", f"this frame has {length}")


def test_a_wrong_byte_in_magic_or_run_id_is_foreign() -> None:
    """No byte of the magic and the run id may differ."""
    for offset, word in [*((each, "magic") for each in range(1, 4)), *((each, "another run") for each in range(8, 24))]:
        for damage in (0x01, 0x80, 0xFF):
            refused(GOOD[:offset] + bytes([GOOD[offset] ^ damage]) + GOOD[offset + 1 :], "foreign", word)


def test_another_protocol_version_is_foreign_and_says_what_to_do() -> None:
    """A message of another version names both versions and the way out."""
    for version in (0, VERSION + 1, 255):
        head = GOOD[:4] + bytes([version]) + GOOD[5:]
        refused(head, "foreign", f"version {version}, expected {VERSION}", "same stepcast")


def test_another_epoch_of_the_same_run_is_told_apart() -> None:
    """A message of another life of the group is refused with a reason of its own."""
    for epoch in (0, 6, 8, 7 << 8, 7 << 24, 2**32 - 1):
        refused(Wire(RUN_ID, epoch).pack(Kind.STEP, 5), "epoch", f"epoch {epoch}, expected 7")


def test_another_run_is_foreign_whatever_its_epoch() -> None:
    """Only this run's epochs are told apart: another run has epochs of its own."""
    for epoch in (6, 7, 8):
        refused(Wire(bytes(16), epoch).pack(Kind.STEP, 5), "foreign", "another run")


def test_a_kind_in_a_class_that_is_not_its_own_is_foreign() -> None:
    """A kind travels in its own class only: else a filter would let it by to a thread that does not know it."""
    for message_class, members in CLASSES.items():
        for kind in members:
            head = WIRE.pack(kind)
            for other in {*CLASSES, b"\0", b"s", b"\xff"} - {message_class}:
                refused(other + head[1:], "foreign", f"kind {int(kind)} does not exist in class {other!r}")


def test_an_unknown_kind_is_foreign_in_every_class() -> None:
    """A kind that does not exist is refused in each class."""
    for kind in set(range(256)) - set(Kind):
        for message_class in CLASSES:
            refused(message_class + GOOD[1:5] + bytes([kind]) + GOOD[6:], "foreign", f"kind {kind} ")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_foreign(junk: bytes) -> None:
    """Garbage of any length is told from a message, and raises nothing else."""
    refused(junk, "foreign")


@given(st.binary(max_size=200), st.sampled_from([1, 4, 5, 8, 24, 28, 40]))
def test_random_bytes_behind_a_good_opening_raise_nothing_else(junk: bytes, length: int) -> None:
    """Garbage that opens as a message does is parsed or refused as a bad frame."""
    head = GOOD[:length] + junk
    header = parsed(head)
    if isinstance(header, BadFrame):
        assert header.reason in {"foreign", "epoch"}
    else:
        assert len(head) >= HEADER_BYTES
        assert header.kind in CLASSES[head[:1]]


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_damaged_byte_never_yields_a_header_of_another_run(offset: int, damage: int) -> None:
    """Damage is refused where it changes what the message is; elsewhere it changes that field alone."""
    head = bytearray(GOOD)
    head[offset] ^= damage
    header = parsed(bytes(head))
    if isinstance(header, BadFrame):
        assert offset < 28
        assert header.reason == ("epoch" if offset >= 24 else "foreign")
    else:
        good = WIRE.parse(GOOD)
        changed = [name for name in Header._fields if getattr(header, name) != getattr(good, name)]
        last = {5: "kind", 7: "flags", 35: "sequence", 43: "step", 47: "rank"}
        assert changed == [next(name for end, name in last.items() if offset <= end)]


def test_a_bad_frame_is_foreign_unless_it_says_otherwise() -> None:
    """The reason is one of the two that are counted, and the error is a ValueError."""
    assert BadFrame("x").reason == "foreign"
    assert BadFrame("x", "epoch").reason == "epoch"
    assert isinstance(BadFrame("x"), ValueError)


def test_times_of_a_wrong_length_are_an_error() -> None:
    """Times are exactly five numbers."""
    for length in (0, TIMES_BYTES - 1, TIMES_BYTES + 1):
        with pytest.raises(struct.error):
            parse_times(bytes(length))
