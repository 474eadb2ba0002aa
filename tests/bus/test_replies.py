"""The replies: every rank's messages over one socket, whole and in order; what is not of this group is dropped."""

from __future__ import annotations

import logging
import select
import threading
import time

import pytest
import zmq

from stepcast.bus.frames import (
    HEADER_BYTES,
    NO_TIMES,
    REPLY_CLASS,
    TIMES_BYTES,
    Flag,
    Kind,
    Times,
    Wire,
    pack_times,
    parse_times,
)
from stepcast.bus.replies import ReplyReader
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.zmtp import LinkLost
from tests.bus.rig import EPOCH, LIMIT_MS, LIMIT_S, RUN_ID, WIRE, Rig, read
from tests.harness import wait_until

TIMES = (10**12, 2_000_000, 500_000, 1_000_000, 3, 2**64 - 1)
REPLY_KINDS = (Kind.HELLO, Kind.READY, Kind.ALIVE, Kind.GAP, Kind.BYE)


def pusher(rig: Rig) -> zmq.Socket[bytes]:
    """Connect a plain socket in a rank's place."""
    socket = rig.raw(zmq.PUSH)
    socket.connect(rig.directory.endpoint("replies"))
    return socket


def has_settled(reader: ReplyReader) -> bool:
    """Whether the reader has nothing, and its descriptor says so."""
    return reader.read() is None and not select.select([reader.fd], [], [], 0)[0]


# --- What arrives ---------------------------------------------------------------------------------------------------


def test_the_reader_is_bound_where_it_was_told_to(rig: Rig) -> None:
    """The endpoint is the one that was given."""
    assert rig.reader().endpoint == rig.directory.endpoint("replies")


def test_nothing_comes_of_nothing(rig: Rig) -> None:
    """Reading does not wait."""
    reader = rig.reader()
    assert reader.read() is None
    assert not reader.dropped


@pytest.mark.parametrize("kind", REPLY_KINDS)
def test_a_message_without_times_arrives_with_all_its_fields(rig: Rig, kind: Kind) -> None:
    """Kind, sequence, step, rank, flags and payload arrive as they were sent."""
    reader, sender = rig.reader(), rig.sender(1)
    sender.send(kind, 2**60, 2**50, (b"payload",), Flag.STEP_SOCKET)
    header, times, frames = read(reader)
    assert header == (kind, Flag.STEP_SOCKET, 2**60, 2**50, 1)
    assert times == b""
    assert [bytes(frame) for frame in frames] == [b"payload"]


@pytest.mark.parametrize("kind", [Kind.RESULT, Kind.FAILURE])
@pytest.mark.parametrize("frames", [(), (b"payload",), (b"payload", b"one", bytes(100_000), b"")])
def test_an_answer_arrives_with_its_times_and_buffers(rig: Rig, kind: Kind, frames: tuple[bytes, ...]) -> None:
    """RESULT and FAILURE carry times before their payload, and any number of buffers behind it."""
    reader, sender = rig.reader(), rig.sender()
    sender.send(kind, 5, 3, frames, times=TIMES)
    reply = read(reader)
    assert reply.header == (kind, Flag.BUFFERS if len(frames) > 1 else 0, 5, 3, 0)
    assert parse_times(reply.times) == Times(*TIMES)
    assert [bytes(frame) for frame in reply.frames] == list(frames)


def test_a_message_without_payload_has_no_frames(rig: Rig) -> None:
    """A header alone is a message."""
    reader, sender = rig.reader(), rig.sender()
    sender.send(Kind.HELLO)
    assert read(reader) == ((Kind.HELLO, 0, 0, 0, 0), b"", [])


def test_buffers_arrive_as_views_of_what_was_received(rig: Rig) -> None:
    """A large result is not copied on its way out of the socket."""
    reader, sender = rig.reader(), rig.sender()
    large = bytes(range(256)) * (8 << 12)
    sender.send(Kind.RESULT, 1, 1, (b"payload", memoryview(large), b"small"), times=TIMES)
    _, _, frames = read(reader)
    for buffer in frames[1:]:
        assert isinstance(buffer, memoryview)
        assert isinstance(buffer.obj, zmq.Frame)
    assert frames[1] == large
    assert frames[2] == b"small"


def test_replies_of_many_ranks_come_whole_and_in_each_ranks_order(rig: Rig) -> None:
    """Ranks that answer at the same time, in several parts, are not mixed up."""
    world_size, count = 4, 50
    reader = rig.reader(world_size=world_size)

    def answer(sender: ReplySender, rank: int) -> None:
        for sequence in range(1, count + 1):
            content = bytes([rank]) * sequence
            sender.send(Kind.RESULT, sequence, sequence, (content, content, content * 2000), times=TIMES)

    threads = [threading.Thread(target=answer, args=(rig.sender(rank), rank)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    sequences = [0] * world_size
    for _ in range(world_size * count):
        header, _, frames = read(reader)
        sequences[header.rank] += 1
        assert header.sequence == sequences[header.rank]
        content = bytes([header.rank]) * header.sequence
        assert [bytes(frame) for frame in frames] == [content, content, content * 2000]
    for thread in threads:
        thread.join(LIMIT_S)
    assert reader.read() is None


# --- What is dropped ------------------------------------------------------------------------------------------------

GOOD = WIRE.pack(Kind.ALIVE, rank=1)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        pytest.param(b"x", "foreign", id="too short"),
        pytest.param(REPLY_CLASS + bytes(100), "foreign", id="no magic"),
        pytest.param(Wire(bytes(16), EPOCH).pack(Kind.ALIVE, rank=1), "foreign", id="another run"),
        pytest.param(Wire(bytes(16), EPOCH + 1).pack(Kind.ALIVE, rank=1), "foreign", id="another run and epoch"),
        pytest.param(Wire(RUN_ID, EPOCH + 1).pack(Kind.ALIVE, rank=1), "epoch", id="a later epoch"),
        pytest.param(Wire(RUN_ID, EPOCH - 1).pack(Kind.ALIVE, rank=1), "epoch", id="an earlier epoch"),
        pytest.param(WIRE.pack(Kind.ALIVE, rank=-1), "rank", id="the driver's rank"),
        pytest.param(WIRE.pack(Kind.ALIVE, rank=2), "rank", id="a rank past the last"),
        pytest.param(WIRE.pack(Kind.RESULT, 1, 1, 1), "foreign", id="an answer without times"),
        pytest.param(
            (WIRE.pack(Kind.FAILURE, 1, 1, 1) + pack_times(TIMES))[:-1],
            "foreign",
            id="an answer whose times are cut",
        ),
    ],
)
@pytest.mark.parametrize("buffers", [0, 2])
def test_what_is_not_of_this_group_is_dropped_and_counted(
    rig: Rig, caplog: pytest.LogCaptureFixture, head: bytes, reason: str, buffers: int
) -> None:
    """It is dropped with all its frames, counted by reason and logged once, and what comes after it is read."""
    reader, socket = rig.reader(world_size=2), pusher(rig)
    if buffers and len(head) >= HEADER_BYTES:
        head = head[:6] + bytes([Flag.BUFFERS]) + head[7:]
    with caplog.at_level(logging.WARNING, "stepcast.bus"):
        for _ in range(3):
            socket.send_multipart([head, *[GOOD] * buffers])
        socket.send(GOOD)
        assert read(reader).header == (Kind.ALIVE, 0, 0, 0, 1)
    assert reader.read() is None
    assert reader.dropped == {reason: 3}
    assert len(caplog.records) == 1
    assert "dropped a message on the reply endpoint" in caplog.text


def test_each_reason_is_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A flood of one kind does not hide the first of another."""
    reader, socket = rig.reader(world_size=2), pusher(rig)
    with caplog.at_level(logging.WARNING, "stepcast.bus"):
        for _ in range(5):
            socket.send(b"foreign")
            socket.send(Wire(RUN_ID, EPOCH + 1).pack(Kind.ALIVE, rank=1))
            socket.send(WIRE.pack(Kind.ALIVE, rank=7))
        socket.send(GOOD)
        read(reader)
    assert reader.dropped == {"foreign": 5, "epoch": 5, "rank": 5}
    assert [record.getMessage().partition(": ")[2].partition(" (")[0] for record in caplog.records] == [
        "a header has 48 bytes, this frame has 7",
        f"epoch {EPOCH + 1}, expected {EPOCH}",
        "rank 7 of a group of 2",
    ]


def test_a_frame_over_the_limit_ends_its_connection_and_no_other(rig: Rig) -> None:
    """ZeroMQ reads no frame that claims more than the limit: its sender is cut off, and the ranks go on."""
    reader, sender = rig.reader(max_message_bytes=10_000), rig.sender()
    socket = rig.raw(zmq.PUSH)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(rig.directory.endpoint("replies"))
    socket.send(GOOD + bytes(20_000))
    assert monitor.poll(LIMIT_MS), "still connected"
    socket.disable_monitor()
    monitor.close()
    sender.send(Kind.RESULT, 1, 1, (bytes(10_000), bytes(10_000)), times=TIMES)
    reply = read(reader)
    assert (reply.header.rank, len(reply.frames)) == (0, 2)
    assert reader.read() is None
    assert not reader.dropped
    # It connects again, and what it sends within the limit is read.
    socket.send(GOOD)
    assert read(reader).header.rank == 1


# --- Waiting --------------------------------------------------------------------------------------------------------


def test_the_descriptor_is_readable_when_a_reply_has_come(rig: Rig) -> None:
    """Once all is read, the descriptor becomes readable with the next reply, and not before."""
    reader, sender = rig.reader(), rig.sender()
    sender.send(Kind.HELLO)
    read(reader)
    for number in range(50):
        wait_until(lambda: has_settled(reader), LIMIT_S)
        sender.send(Kind.ALIVE, number)
        assert select.select([reader.fd], [], [], LIMIT_S)[0]
        assert read(reader).header.sequence == number


def test_replies_that_come_at_once_are_all_read_after_one_wake(rig: Rig) -> None:
    """The descriptor tells of the first of several: who reads until there is no more misses none."""
    reader, sender = rig.reader(), rig.sender()
    got: list[int] = []
    for sequence in range(200):
        sender.send(Kind.ALIVE, sequence)
    while len(got) < 200:
        while (reply := reader.read()) is not None:
            got.append(reply.header.sequence)
        assert len(got) == 200 or select.select([reader.fd], [], [], LIMIT_S)[0]
    assert got == [*range(200)]


def test_receiving_waits_for_a_reply(rig: Rig) -> None:
    """A thread that is blocked until a reply comes has it as soon as it comes."""
    reader, sender = rig.reader(), rig.sender()
    sender.send(Kind.ALIVE, 7, frames=(b"payload", b"buffer"))
    (reply,) = reader.receive(LIMIT_S)
    assert reply.header.sequence == 7
    assert [bytes(frame) for frame in reply.frames] == [b"payload", b"buffer"]


def answer(sender: ReplySender, sequence: int, *frames: bytes) -> None:
    """Send a RESULT."""
    sender.send(Kind.RESULT, sequence, sequence, frames, times=NO_TIMES)


def test_answers_that_belong_together_are_received_together(rig: Rig) -> None:
    """Where several answers are wanted, and one message is under way, the wait ends with the last of them."""
    reader, sender = rig.reader(), rig.sender()
    for sequence in (1, 2, 3):
        answer(sender, sequence, b"payload")
    replies = reader.receive(LIMIT_S, 3, [None])
    assert [reply.header.sequence for reply in replies] == [1, 2, 3]
    assert [bytes(reply.frames[0]) for reply in replies] == [b"payload"] * 3


def test_whatever_is_not_a_plain_answer_is_not_held_up(rig: Rig) -> None:
    """A failure, a message of another kind and an answer with buffers end the wait for further answers."""
    reader, sender = rig.reader(), rig.sender()
    answer(sender, 1)
    sender.send(Kind.FAILURE, 2, 2, (b"why",), times=NO_TIMES)
    answer(sender, 3)
    sender.send(Kind.ALIVE, 4)
    answer(sender, 5, b"payload", b"buffer")
    got = [[reply.header.sequence for reply in reader.receive(LIMIT_S, 9, [None])] for _ in range(3)]
    assert got == [[1, 2], [3, 4], [5]]


def test_answers_to_several_messages_are_not_held_up(rig: Rig) -> None:
    """Where another message is under way somebody else may wait for its answer: none waits for a further one."""
    reader, sender = rig.reader(), rig.sender()
    answer(sender, 1)
    answer(sender, 2)
    assert [reply.header.sequence for reply in reader.receive(LIMIT_S, 9, [None, None])] == [1]


def test_answers_that_have_come_are_given_out_at_the_limit(rig: Rig) -> None:
    """Where an answer is missing, the wait for it ends at its limit, with those that are there."""
    reader, sender = rig.reader(), rig.sender()
    answer(sender, 1)
    assert [reply.header.sequence for reply in reader.receive(0.1, 2, [None])] == [1]


def test_receiving_ends_at_its_limit(rig: Rig) -> None:
    """Where nothing comes the wait ends, each time at the limit it was given."""
    reader = rig.reader()
    for limit_s in (0.05, 0.0, 0.1, 0.1):
        started = time.monotonic()
        assert reader.receive(limit_s) == []
        assert limit_s * 0.9 <= time.monotonic() - started < LIMIT_S


def test_receiving_ends_with_what_is_dropped(rig: Rig) -> None:
    """A foreign message ends the wait without a reply, and is counted."""
    reader = rig.reader()
    pusher(rig).send(b"foreign")
    assert reader.receive(LIMIT_S) == []
    assert reader.dropped == {"foreign": 1}


def test_a_blocked_receive_can_be_woken_from_another_thread(rig: Rig) -> None:
    """`wake` ends a wait at once, and is neither a reply nor counted as dropped."""
    reader = rig.reader()
    for _ in range(20):
        thread = threading.Thread(target=reader.wake)
        thread.start()
        started = time.monotonic()
        assert reader.receive(60.0) == []
        assert time.monotonic() - started < LIMIT_S
        thread.join(LIMIT_S)
    assert not reader.dropped


def test_a_wake_that_comes_first_is_not_lost(rig: Rig) -> None:
    """Who is woken just before it waits does not wait."""
    reader = rig.reader()
    reader.wake()
    started = time.monotonic()
    assert reader.receive(60.0) == []
    assert time.monotonic() - started < LIMIT_S


def test_any_number_of_wakes_is_taken(rig: Rig) -> None:
    """Waking a reader that does not read neither blocks nor fails, and no reply is lost among the wakes."""
    reader, sender = rig.reader(), rig.sender()
    for _ in range(5000):
        reader.wake()
    sender.send(Kind.ALIVE, 3)
    assert read(reader).header.sequence == 3
    assert not reader.dropped


def test_waking_a_closed_reader_is_safe(rig: Rig) -> None:
    """Whoever wakes it too late does no harm."""
    reader = rig.reader()
    reader.close()
    reader.wake()
    reader.close()


# --- A driver that does not read ------------------------------------------------------------------------------------


def send_until_refused(sender: ReplySender, *frames: bytes) -> int:
    """Send until a send passes its limit, and return how many were taken."""
    count = 0
    while True:
        started = time.monotonic()
        try:
            sender.send(Kind.RESULT, count + 1, 1, frames, times=TIMES)
        except TimeoutError:
            assert 0.04 < time.monotonic() - started < LIMIT_S
            return count
        count += 1
        assert count < 100_000


def test_a_frozen_driver_holds_a_rank_no_longer_than_the_limit(rig: Rig) -> None:
    """What has reached the driver is whole and in order; the rank, in the middle of a message, is done for."""
    reader, sender = rig.reader(), rig.sender(timeout_s=0.05)
    content = bytes(10_000)
    assert send_until_refused(sender, b"payload", content, b"tail") > 0
    with pytest.raises(OSError, match=r"Bad file descriptor"):
        sender.send(Kind.BYE)

    rig.sender(1).send(Kind.BYE)
    replies = [read(reader), read(reader)]  # the ranks take turns
    while reply := reader.read():
        replies.append(reply)
    assert [reply.header.kind for reply in replies if reply.header.rank == 1] == [Kind.BYE]
    arrived = [reply for reply in replies if reply.header.rank == 0]
    assert [reply.header.sequence for reply in arrived] == [*range(1, len(arrived) + 1)]
    assert {tuple(map(len, reply.frames)) for reply in arrived} == {(7, 10_000, 4)}


def test_closing_gives_what_was_sent_its_time_to_leave(rig: Rig) -> None:
    """A last word that is sent just before the end arrives."""
    reader, sender = rig.reader(), rig.sender()
    for sequence in range(100):
        sender.send(Kind.ALIVE, sequence)
    sender.close()
    assert [read(reader).header.sequence for _ in range(100)] == [*range(100)]


def test_a_cut_connection_is_restored_for_the_reply(rig: Rig) -> None:
    """What was sent before the cut may be lost, which ALIVE tells; what is sent after it arrives."""
    reader, link = rig.reader(), rig.link("link", to="replies")
    sender = rig.sender(endpoint=link.endpoint)
    sender.send(Kind.RESULT, 1, 1, times=TIMES)
    assert read(reader).header.sequence == 1
    link.cut()
    link.mend()
    sender.send(Kind.RESULT, 2, 2, (b"payload", bytes(100_000)), times=TIMES)
    header, _, frames = read(reader)
    assert (header.sequence, [len(frame) for frame in frames]) == (2, [7, 100_000])


def test_a_reply_that_finds_no_driver_any_more_says_so(rig: Rig) -> None:
    """It tries for no longer than it may."""
    rig.reader()
    link = rig.link("link", to="replies")
    sender = rig.sender(endpoint=link.endpoint, reconnect_timeout_s=0.1)
    link.cut()
    with pytest.raises(LinkLost, match=r"did not come back within 0\.1 s"):
        sender.send(Kind.BYE)


def test_what_a_sender_puts_on_the_wire_is_its_ranks(rig: Rig) -> None:
    """The head is header, times and payload in one frame; buffers follow in frames of their own."""
    socket = rig.raw(zmq.PULL)
    socket.bind(rig.directory.endpoint("replies"))
    sender = rig.sender(3)
    sender.send(Kind.RESULT, 5, 6, (b"payload", b"buffer"), Flag.GATHER, TIMES)
    head = WIRE.pack(Kind.RESULT, 5, 6, 3, Flag.GATHER | Flag.BUFFERS) + pack_times(TIMES)
    assert socket.recv_multipart() == [head + b"payload", b"buffer"]
    assert len(head) == HEADER_BYTES + TIMES_BYTES
    sender.send(Kind.GAP, 5)
    assert socket.recv_multipart() == [WIRE.pack(Kind.GAP, 5, 0, 3)]


def test_a_connection_that_ends_again_and_again_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back each time, so that only the limit ends this."""
    rig.reader()
    sender = rig.sender(reconnect_timeout_s=0.05)

    def reset(*_: object) -> None:
        raise ConnectionResetError("again")

    monkeypatch.setattr(sender._socket, "send", reset)
    monkeypatch.setattr(sender._socket, "reconnect", lambda _: None)
    with pytest.raises(LinkLost, match="again and again"):
        sender.send(Kind.BYE)
