"""The ranks' subscribers: one stream in order and without holes, whatever the transport loses, repeats or cuts."""

from __future__ import annotations

import logging

import pytest
import zmq

from stepcast.bus.errors import ProtocolError
from stepcast.bus.frames import PROBE_CLASS, STEP_CLASS, Flag, Kind, Wire
from stepcast.bus.liveness import TailGap
from stepcast.bus.subscriber import Gap, Message
from tests.bus.rig import (
    EPOCH,
    LIMIT_S,
    RUN_ID,
    WIRE,
    Rig,
    greet,
    heartbeat,
    lose,
    publish,
    reconnected,
    take,
    take_message,
    take_sequences,
)
from tests.harness import wait_until


def driver(rig: Rig) -> zmq.Socket[bytes]:
    """Bind a plain socket in the publisher's place."""
    socket = rig.raw(zmq.XPUB)
    socket.bind(rig.directory.endpoint("publish"))
    return socket


def subscribed(socket: zmq.Socket[bytes], message_class: bytes) -> None:
    """Wait for a subscription to a class."""
    while socket.recv() != b"\1" + message_class:
        pass


# --- What arrives ---------------------------------------------------------------------------------------------------


def test_step_and_control_messages_come_over_their_own_sockets(rig: Rig) -> None:
    """The step socket receives no control message, and the control socket no step."""
    publisher, steps, control = rig.publisher(), rig.steps(), rig.control()
    greet(publisher, steps, control)
    publisher.control(Kind.HEARTBEAT)
    publish(publisher)
    publisher.control(Kind.ABORT)
    publish(publisher, kind=Kind.STOP)
    publisher.control(Kind.STOP_NOW)
    got = []
    while not got or got[-1] != Kind.STOP_NOW:
        assert control.socket.poll(LIMIT_S)
        message = control.receive()
        assert message is not None
        got.append(message.header.kind)
    assert [kind for kind in got if kind != Kind.PROBE] == [Kind.HEARTBEAT, Kind.ABORT, Kind.STOP_NOW]
    assert [take_message(steps).header.kind for _ in range(2)] == [Kind.STEP, Kind.STOP]
    assert not steps.socket.poll(0)


def test_a_payload_is_a_view_on_what_was_received(rig: Rig) -> None:
    """Neither the payload nor a buffer is copied out of the message."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    publish(publisher, b"payload", bytes(200_000), b"tail")
    payload, *buffers = take_message(rank).frames
    assert isinstance(payload, memoryview)
    assert bytes(payload) == b"payload"
    for buffer in buffers:
        assert isinstance(buffer, memoryview)
        assert isinstance(buffer.obj, (bytes, bytearray))
        assert buffer.readonly
    assert [len(buffer) for buffer in buffers] == [200_000, 4]


def test_a_view_outlives_later_messages_and_the_socket(rig: Rig) -> None:
    """What a worker keeps of a step stays as it was."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    contents = [bytes([number]) * 100_000 for number in range(3)]
    for content in contents:
        publish(publisher, content, content)
    kept = [take_message(rank).frames for _ in contents]
    rank.close()
    assert [[bytes(frame) for frame in frames] for frames in kept] == [[content, content] for content in contents]


def test_eight_mebibytes_arrive_intact(rig: Rig) -> None:
    """A large buffer arrives at each rank byte by byte as it was sent."""
    publisher = rig.publisher(world_size=2)
    ranks = [rig.steps(), rig.steps()]
    greet(publisher, *ranks)
    large = bytes(range(256)) * (8 << 12)
    publish(publisher, b"payload", large, b"small", memoryview(large)[1:])
    for rank in ranks:
        frames = take_message(rank).frames
        assert [len(frame) for frame in frames] == [7, 8 << 20, 5, (8 << 20) - 1]
        assert frames[1] == large
        assert frames[3] == memoryview(large)[1:]


def test_arrays_arrive_as_views(rig: Rig) -> None:
    """An array that is encoded into a step is decoded from the received buffer without a copy."""
    numpy = pytest.importorskip("numpy")
    codec = pytest.importorskip("stepcast.bus.codec")
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    array = numpy.arange(100_000, dtype="int64").reshape(100, 1000)
    publish(publisher, *codec.encode({"tokens": array}))
    frames = take_message(rank).frames
    got = codec.decode(frames)["tokens"]
    assert (got == array).all()
    assert numpy.shares_memory(got, numpy.frombuffer(frames[1], dtype="uint8"))


# --- What is dropped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(STEP_CLASS, id="too short"),
        pytest.param(STEP_CLASS + bytes(100), id="no magic"),
        pytest.param(Wire(bytes(16), EPOCH).pack(Kind.STEP, 1), id="another run"),
        pytest.param(Wire(RUN_ID, EPOCH + 1).pack(Kind.STEP, 1), id="another epoch"),
        pytest.param(STEP_CLASS + WIRE.pack(Kind.HEARTBEAT)[1:], id="a kind of another class"),
    ],
)
def test_a_foreign_message_is_dropped_whole(rig: Rig, caplog: pytest.LogCaptureFixture, head: bytes) -> None:
    """What is not of this run and epoch is dropped with all its frames, counted, logged once, and delays nothing."""
    socket, rank = driver(rig), rig.steps()
    subscribed(socket, STEP_CLASS)
    with caplog.at_level(logging.WARNING, "stepcast.bus"):
        for _ in range(3):
            socket.send_multipart([head, WIRE.pack(Kind.STEP, 1), b"buffer"])
        socket.send(WIRE.pack(Kind.STEP, 1))
        assert [take(rank) for _ in range(3)] == [None, None, None]
    assert isinstance(take(rank), Message)
    assert rank.foreign == 3
    assert len(caplog.records) == 1
    assert "dropped a message from the driver's endpoint" in caplog.text


def test_a_frame_over_the_limit_is_not_received(rig: Rig) -> None:
    """The rank ends with an error instead of allocating what a frame's length claims; other ranks receive it."""
    publisher = rig.publisher(world_size=2)
    small, large = rig.steps(max_message_bytes=1000), rig.steps(max_message_bytes=100_000)
    greet(publisher, small, large)
    publish(publisher, bytes(1000))
    publish(publisher, b"", bytes(1000 + 256))
    assert take_sequences(small, 2) == [1, 2]
    publish(publisher, b"", bytes(1000 + 257))
    with pytest.raises(ProtocolError, match=r"a frame of 1257 bytes came from the driver, over the limit of 1256"):
        take(small)
    publish(publisher)
    assert take_sequences(large, 4) == [1, 2, 3, 4]


def test_a_stray_publisher_of_the_probe_class_is_told_apart(rig: Rig) -> None:
    """A PROBE of another run leaves the subscriber waiting for its own."""
    socket, control = driver(rig), rig.control()
    subscribed(socket, PROBE_CLASS)
    socket.send(Wire(bytes(16), EPOCH).pack(Kind.PROBE))
    assert control.socket.poll(LIMIT_S)
    assert control.receive() is None
    socket.send(WIRE.pack(Kind.PROBE))
    assert control.wait_for_probe(LIMIT_S)
    assert control.foreign == 1


# --- Order ----------------------------------------------------------------------------------------------------------


def test_messages_are_taken_in_order(rig: Rig) -> None:
    """Each message that follows the last one is taken."""
    publisher, rank = rig.publisher(window=100), rig.steps()
    greet(publisher, rank)
    assert rank.sequence == 0
    for sequence in range(1, 51):
        publish(publisher)
        assert take_sequences(rank, 1) == [sequence]
        assert rank.sequence == sequence
    assert rank.duplicates == 0


def test_a_lost_message_shows_as_a_gap(rig: Rig) -> None:
    """A message that does not follow the last one is not taken: what is told is the first one missing and what came."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    for _ in range(6):
        publish(publisher)
    assert take_sequences(rank, 2) == [1, 2]
    for _ in range(2):
        lose(rank)
    assert [take(rank), take(rank)] == [Gap(3, 5), Gap(3, 6)]
    assert rank.sequence == 2


def test_a_replay_closes_a_gap(rig: Rig) -> None:
    """After a replay the rank has every message once, in order; what it had before is dropped as a duplicate."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    for number in range(5):
        publish(publisher, bytes([number]), bytes([number]) * 10)
    taken = [take_message(rank)]
    lose(rank)
    assert take(rank) == Gap(2, 3)
    publisher.replay(1)
    assert [take(rank), take(rank)] == [Gap(2, 4), Gap(2, 5)]
    assert take(rank) is None  # the first again
    taken += [take_message(rank) for _ in range(4)]
    assert [message.header.sequence for message in taken] == [1, 2, 3, 4, 5]
    assert [bytes(message.frames[1]) for message in taken] == [bytes([number]) * 10 for number in range(5)]
    assert [bool(message.header.flags & Flag.REPLAY) for message in taken] == [False, True, True, True, True]
    assert rank.duplicates == 1


def test_a_replay_for_one_rank_is_dropped_by_the_others(rig: Rig) -> None:
    """A rank that had everything takes nothing twice, and counts what it dropped."""
    publisher = rig.publisher(world_size=2)
    gappy, whole = rig.steps(), rig.steps()
    greet(publisher, gappy, whole)
    for _ in range(3):
        publish(publisher)
    assert take_sequences(whole, 3) == [1, 2, 3]
    for _ in range(3):
        lose(gappy)
    publisher.replay(1)
    publish(publisher)
    assert take_sequences(gappy, 4) == [1, 2, 3, 4]
    assert [take(whole) for _ in range(3)] == [None, None, None]
    assert take_sequences(whole, 1) == [4]
    assert (gappy.duplicates, whole.duplicates) == (0, 3)


def test_a_replay_that_is_lost_in_part_leaves_a_gap_that_shows_again(rig: Rig) -> None:
    """Every hole is found, in a replay too, until there is none."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    for _ in range(4):
        publish(publisher)
    for _ in range(4):
        lose(rank)
    publisher.replay(1)
    assert take_sequences(rank, 1) == [1]
    lose(rank)
    assert take(rank) == Gap(2, 3)
    lose(rank)
    publisher.replay(2)
    assert take_sequences(rank, 3) == [2, 3, 4]


def test_a_lost_last_message_is_found_by_the_second_heartbeat(rig: Rig) -> None:
    """Where no later message shows the gap, the sequence number in HEARTBEAT does."""
    publisher, steps, control = rig.publisher(), rig.steps(), rig.control()
    greet(publisher, steps, control)
    tail = TailGap()
    for _ in range(3):
        publish(publisher)
    assert take_sequences(steps, 2) == [1, 2]
    lose(steps)
    asked = [tail.heartbeat(heartbeat(publisher, control), steps.sequence, idle=True) for _ in range(2)]
    assert asked == [False, True]
    assert publisher.replay(steps.sequence + 1) == 1
    assert take_sequences(steps, 1) == [3]
    assert not tail.heartbeat(heartbeat(publisher, control), steps.sequence, idle=True)


# --- A cut connection -----------------------------------------------------------------------------------------------


def test_what_was_published_while_a_connection_was_cut_is_replayed(rig: Rig) -> None:
    """A rank whose connection comes back has lost what was on its way, finds out, and skips nothing."""
    publisher = rig.publisher(world_size=2)
    link = rig.link("link")
    cut, whole = rig.steps(link.endpoint), rig.steps()
    greet(publisher, cut, whole)
    publish(publisher, b"1")
    assert take_sequences(cut, 1) == [1]
    link.cut()
    publish(publisher, b"2")
    publish(publisher, b"3", bytes(100_000))
    publisher.drain_subscriptions()
    link.mend()
    reconnected(publisher, cut)
    publish(publisher, b"4")
    assert take(cut) == Gap(2, 4)
    publisher.replay(2)
    taken = [take_message(cut) for _ in range(3)]
    assert [message.header.sequence for message in taken] == [2, 3, 4]
    assert [bytes(message.frames[0]) for message in taken] == [b"2", b"3", b"4"]
    assert take_sequences(whole, 4) == [1, 2, 3, 4]


def test_a_cut_that_takes_the_last_message_is_found_by_the_heartbeat(rig: Rig) -> None:
    """The control connection is whole and tells of what the step connection has lost."""
    publisher = rig.publisher()
    link = rig.link("link")
    steps, control = rig.steps(link.endpoint), rig.control()
    greet(publisher, steps, control)
    link.cut()
    publish(publisher)
    publisher.drain_subscriptions()
    link.mend()
    reconnected(publisher, steps)
    tail = TailGap()
    while not tail.heartbeat(heartbeat(publisher, control), steps.sequence, idle=True):
        pass
    publisher.replay(1)
    assert take_sequences(steps, 1) == [1]


def test_a_message_cut_in_the_middle_is_not_received(rig: Rig) -> None:
    """A connection that breaks within a message leaves nothing of it: it comes again whole."""
    publisher = rig.publisher()
    link = rig.link("link")
    rank = rig.steps(link.endpoint)
    greet(publisher, rank)
    publisher.drain_subscriptions()
    link.stall(after_bytes=150_000)  # as much as the socket's own buffer takes while nobody reads
    content = bytes(range(256)) * 4000
    publish(publisher, b"payload", content, content)
    wait_until(lambda: link.stalled, LIMIT_S)
    link.cut()
    link.resume()
    link.mend()
    reconnected(publisher, rank)
    publish(publisher)
    assert take(rank) == Gap(1, 2)
    publisher.replay(1)
    assert [bytes(frame) for frame in take_message(rank).frames] == [b"payload", content, content]


def test_a_subscriber_that_was_cut_off_is_not_asked_to_greet_again(rig: Rig) -> None:
    """A connection that comes back subscribes to what the socket subscribes to: no longer to PROBE."""
    publisher = rig.publisher()
    link = rig.link("link")
    rank = rig.steps(link.endpoint)
    greet(publisher, rank)
    publisher.drain_subscriptions()
    link.cut()
    link.mend()
    reconnected(publisher, rank)
    publisher.control(Kind.PROBE)
    publish(publisher)
    assert isinstance(take(rank), Message)  # PROBE would have come before it


def test_a_connection_may_be_cut_again_and_again(rig: Rig) -> None:
    """However often it is cut, each message is taken once and in order."""
    publisher = rig.publisher(window=100)
    link = rig.link("link")
    rank = rig.steps(link.endpoint)
    greet(publisher, rank)
    taken: list[int] = []
    for _ in range(4):
        link.cut()
        publish(publisher)
        publisher.drain_subscriptions()
        link.mend()
        reconnected(publisher, rank)
        publish(publisher)
        item = take(rank)
        while not isinstance(item, Gap):
            item = take(rank)
        publisher.replay(item.expected)
        taken += take_sequences(rank, publisher.sequence - len(taken))
    assert taken == [*range(1, 9)]
