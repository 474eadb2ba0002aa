"""The driver's publisher: sequence numbers, credit, refusal by a full pipe, and the store that gaps are closed from."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.bus.errors import ProtocolError
from stepcast.bus.frames import CONTROL_CLASS, PROBE_CLASS, STEP_CLASS, Flag, Kind
from stepcast.bus.publisher import Publisher
from stepcast.bus.subscriber import Gap
from tests.bus.rig import (
    EPOCH,
    LIMIT_MS,
    LIMIT_S,
    RUN_ID,
    WIRE,
    Rig,
    greet,
    lose,
    meanwhile,
    publish,
    take,
    take_control,
    take_message,
    take_past_gaps,
    take_sequences,
    wait_for_subscription,
)
from tests.harness import wait_until

STEP_KINDS = (Kind.BEGIN, Kind.STEP, Kind.CALL, Kind.KEEPALIVE, Kind.STOP)


def fill(publisher: Publisher, *frames: bytes | memoryview) -> int:
    """Publish until a pipe is full, and return how many messages were taken."""
    count = 0
    while publish(publisher, *frames) is not None:
        count += 1
        assert count < 10_000
    return count


def stuck_subscriber(rig: Rig, message_class: bytes) -> zmq.Socket[bytes]:
    """Connect a socket that holds one message and reads none."""
    socket = rig.raw(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(rig.directory.endpoint("publish"))
    socket.setsockopt(zmq.SUBSCRIBE, message_class)
    return socket


# --- Publishing -----------------------------------------------------------------------------------------------------


def test_it_is_bound_where_it_was_told_to(rig: Rig) -> None:
    """The endpoint is the one that was given."""
    assert rig.publisher().endpoint == rig.directory.endpoint("publish")


def test_step_class_messages_are_numbered_from_one(rig: Rig) -> None:
    """Every step-class message takes the next number, whatever its kind."""
    publisher = rig.publisher()
    assert publisher.sequence == 0
    assert [publish(publisher, kind=kind) for kind in STEP_KINDS] == [1, 2, 3, 4, 5]
    assert publisher.sequence == 5


def test_control_messages_take_no_number(rig: Rig) -> None:
    """Control and probe messages carry the highest number published, and leave it as it is."""
    publisher, control = rig.publisher(), rig.control()
    greet(publisher, control)
    for count in range(3):
        for kind in (Kind.HEARTBEAT, Kind.ABORT, Kind.DUMP, Kind.STOP_NOW):
            assert publisher.control(kind, step=kind + 100)
            assert control.socket.poll(LIMIT_MS)
            message = control.receive()
            while message is not None and message.header.kind == Kind.PROBE:
                message = control.receive()
            assert message is not None
            assert message.header[:4] == (kind, 0, count, kind + 100)
        publish(publisher)
    assert publisher.sequence == 3


def test_each_field_and_frame_arrives_at_every_rank(rig: Rig) -> None:
    """Kind, step, flags, payload and buffers arrive at each rank as they were given."""
    publisher = rig.publisher(world_size=3)
    ranks = [rig.steps() for _ in range(3)]
    greet(publisher, *ranks)
    publisher.publish(Kind.CALL, 77, [b"payload", b"one", memoryview(b"two")], 13, Flag.GATHER)
    publisher.publish(Kind.STEP, 78, [b"alone"], 5)
    publisher.publish(Kind.STOP, 0, (), 0)
    for rank in ranks:
        first, second, third = (take_message(rank) for _ in range(3))
        assert first.header == (Kind.CALL, Flag.GATHER | Flag.BUFFERS, 1, 77, -1)
        assert [bytes(frame) for frame in first.frames] == [b"payload", b"one", b"two"]
        assert second.header == (Kind.STEP, 0, 2, 78, -1)
        assert [bytes(frame) for frame in second.frames] == [b"alone"]
        assert third.header == (Kind.STOP, 0, 3, 0, -1)
        assert [bytes(frame) for frame in third.frames] == [b""]


def test_empty_frames_arrive_as_empty(rig: Rig) -> None:
    """A payload and buffers of no bytes are frames all the same."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    publish(publisher, b"", b"", b"")
    assert [bytes(frame) for frame in take_message(rank).frames] == [b"", b"", b""]


def test_without_a_subscriber_a_message_is_stored_all_the_same(rig: Rig) -> None:
    """A message that nobody receives counts as in flight, and can be published again."""
    publisher = rig.publisher()
    assert publish(publisher, b"12345") == 1
    assert (publisher.in_flight, publisher.in_flight_bytes) == (1, 5)
    rank = rig.steps()
    greet(publisher, rank)
    assert publisher.replay(1) == 1
    assert bytes(take_message(rank).frames[0]) == b"12345"


def test_subscriptions_are_drained(rig: Rig) -> None:
    """What subscribers tell the publisher is read and counted, and does not pile up."""
    publisher = rig.publisher()
    assert publisher.drain_subscriptions() == 0
    greet(publisher, rig.steps())
    came = 0

    def all_came() -> bool:
        nonlocal came
        came += publisher.drain_subscriptions()
        return came >= 3  # to the step class, to the probe class, and from it

    wait_until(all_came, LIMIT_S)
    assert came == 3
    assert publisher.drain_subscriptions() == 0


# --- Credit ---------------------------------------------------------------------------------------------------------


def test_the_window_in_messages_closes_and_opens(rig: Rig) -> None:
    """There is credit for as many messages as the window has, and for one more with each that is answered."""
    publisher = rig.publisher(window=3)
    for count in range(3):
        assert publisher.has_credit(0)
        assert publisher.in_flight == count
        publish(publisher)
    assert not publisher.has_credit(0)
    publisher.acknowledge(0, 1)
    assert publisher.has_credit(0)
    publish(publisher)
    assert not publisher.has_credit(0)
    publisher.acknowledge(0, 4)
    assert publisher.in_flight == 0


def test_the_window_in_bytes_closes_and_opens(rig: Rig) -> None:
    """There is credit for what still fits in the window, to the byte."""
    publisher = rig.publisher(window=100, window_bytes=10)
    assert publisher.has_credit(10)
    assert not publisher.has_credit(11)
    publish(publisher, b"1234", b"56")
    assert publisher.in_flight_bytes == 6
    assert publisher.has_credit(4)
    assert not publisher.has_credit(5)
    publish(publisher, b"7890")
    assert publisher.has_credit(0)
    assert not publisher.has_credit(1)
    publisher.acknowledge(0, 1)
    assert publisher.in_flight_bytes == 4
    assert publisher.has_credit(6)
    assert not publisher.has_credit(7)
    publisher.acknowledge(0, 2)
    assert (publisher.in_flight, publisher.in_flight_bytes) == (0, 0)


def test_a_message_is_in_flight_until_the_last_rank_has_answered(rig: Rig) -> None:
    """The slowest rank holds the window, in whatever order the ranks answer."""
    publisher = rig.publisher(world_size=3)
    for _ in range(4):
        publish(publisher, b"x")
    publisher.acknowledge(2, 4)
    publisher.acknowledge(0, 1)
    assert (publisher.in_flight, publisher.slow_ranks()) == (4, [1])
    publisher.acknowledge(1, 1)
    assert (publisher.in_flight, publisher.slow_ranks()) == (3, [0, 1])
    publisher.acknowledge(1, 3)
    publisher.acknowledge(0, 2)
    assert (publisher.in_flight, publisher.slow_ranks()) == (2, [0])
    assert [publisher.unanswered(rank) for rank in range(3)] == [2, 1, 0]
    assert [publisher.acknowledged(rank) for rank in range(3)] == [2, 3, 4]
    publisher.acknowledge(0, 4)
    publisher.acknowledge(1, 4)
    assert (publisher.in_flight, publisher.in_flight_bytes, publisher.slow_ranks()) == (0, 0, [])


def test_an_answer_to_an_older_message_changes_nothing(rig: Rig) -> None:
    """An answer that was overtaken, or that comes twice, gives no credit."""
    publisher = rig.publisher()
    for _ in range(3):
        publish(publisher, b"x")
    publisher.acknowledge(0, 2)
    for sequence in (0, 1, 2):
        publisher.acknowledge(0, sequence)
        assert (publisher.in_flight, publisher.in_flight_bytes, publisher.unanswered(0)) == (1, 1, 1)


def test_nobody_is_slow_where_nothing_is_in_flight(rig: Rig) -> None:
    """Before the first message and after the last answer no rank holds anything up."""
    publisher = rig.publisher(world_size=2)
    assert publisher.slow_ranks() == []
    publish(publisher)
    assert publisher.slow_ranks() == [0, 1]
    publisher.acknowledge(0, 1)
    assert publisher.slow_ranks() == [1]
    publisher.acknowledge(1, 1)
    assert publisher.slow_ranks() == []


def test_what_a_rank_works_on_is_the_oldest_message_it_has_not_answered(rig: Rig) -> None:
    """A rank answers in order, so what it is at can be told from its answers."""
    publisher = rig.publisher(world_size=2)
    assert publisher.working_on(0) is None
    publish(publisher, kind=Kind.STEP, step=11)
    publish(publisher, kind=Kind.CALL, step=12)
    assert [publisher.working_on(rank) for rank in range(2)] == [(Kind.STEP, 11), (Kind.STEP, 11)]
    publisher.acknowledge(0, 1)
    assert [publisher.working_on(rank) for rank in range(2)] == [(Kind.CALL, 12), (Kind.STEP, 11)]
    publisher.acknowledge(0, 2)
    assert [publisher.working_on(rank) for rank in range(2)] == [None, (Kind.STEP, 11)]
    publisher.acknowledge(1, 2)
    assert publisher.working_on(1) is None


@settings(max_examples=50)
@given(st.data())
def test_any_order_of_answers_ends_with_empty_windows(data: st.DataObject) -> None:
    """Whatever the ranks' order, what is in flight is what the slowest has not answered, and at last it is nothing."""
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    order = data.draw(st.permutations([rank for rank in range(3) for _ in sizes]))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        publisher = Publisher(
            context,
            "inproc://publish",
            run_id=RUN_ID,
            epoch=EPOCH,
            world_size=3,
            max_in_flight=9,
            max_in_flight_bytes=999,
        )
        for size in sizes:
            publish(publisher, bytes(size))
        answered = [0, 0, 0]
        for rank in order:
            answered[rank] += 1
            publisher.acknowledge(rank, answered[rank])
            lowest = min(answered)
            assert publisher.in_flight_bytes == sum(sizes[lowest:])
            assert publisher.in_flight == len(sizes) - lowest
            holds = [] if lowest == len(sizes) else [each for each in range(3) if answered[each] == lowest]
            assert publisher.slow_ranks() == holds
        assert publisher.has_credit(999)
        publisher.close()
    finally:
        context.destroy(linger=0)


# --- A full pipe ----------------------------------------------------------------------------------------------------


def test_a_full_pipe_refuses_a_message_whole(rig: Rig) -> None:
    """A refused message takes no number, is not stored, and no rank receives any part of it."""
    publisher, rank = rig.publisher(window=8), rig.steps()
    stuck = stuck_subscriber(rig, STEP_CLASS)
    wait_for_subscription(publisher, STEP_CLASS)
    wait_for_subscription(publisher, STEP_CLASS)
    greet(publisher, rank)
    buffer = bytes(100_000)
    count = fill(publisher, b"payload", buffer, b"tail")
    before = (publisher.sequence, publisher.in_flight, publisher.in_flight_bytes)
    assert before == (count, count, count * 100_011)
    for refused in range(2, 5):
        assert publish(publisher, b"refused", b"never", b"sent") is None
        assert publisher.refused == refused
    assert (publisher.sequence, publisher.in_flight, publisher.in_flight_bytes) == before

    stuck.close()
    with meanwhile(lambda: [take_message(rank) for _ in range(count + 1)]) as taking:
        wait_until(lambda: publish(publisher, b"retried", b"with", b"success") is not None, LIMIT_S)
    assert publisher.sequence == count + 1
    *messages, last = taking.result()
    assert [message.header.sequence for message in messages] == [*range(1, count + 1)]
    assert {tuple(map(len, message.frames)) for message in messages} == {(7, 100_000, 4)}
    assert [bytes(frame) for frame in last.frames] == [b"retried", b"with", b"success"]


def test_the_pipes_hold_more_than_the_window(rig: Rig) -> None:
    """A pipe is never full while the windows have room: the high-water mark is only a backstop."""
    window = 200
    publisher = rig.publisher(window=window)
    stuck_subscriber(rig, STEP_CLASS)
    wait_for_subscription(publisher, STEP_CLASS)
    while publisher.has_credit(0):
        assert publish(publisher, bytes(70_000)) is not None
    assert publisher.in_flight == window
    assert publisher.refused == 0


def test_a_rank_that_reads_no_steps_holds_up_no_control_message(rig: Rig) -> None:
    """Refusal is by class: HEARTBEAT, ABORT and STOP-NOW reach a frozen rank's responder, and every other rank's."""
    publisher = rig.publisher(world_size=2, window=8)
    link = rig.link("frozen")
    frozen, healthy = rig.steps(link.endpoint), rig.steps()
    controls = [rig.control(), rig.control()]
    greet(publisher, frozen, healthy, *controls)
    link.stall()
    count = fill(publisher, b"", bytes(100_000))
    assert count > 8
    for kind in (Kind.HEARTBEAT, Kind.ABORT, Kind.STOP_NOW):
        assert publisher.control(kind)
        assert [take_control(control) for control in controls] == [kind, kind]
    assert publish(publisher) is None

    link.resume()
    with (
        meanwhile(lambda: take_sequences(frozen, count + 1)) as frozens,
        meanwhile(lambda: take_sequences(healthy, count + 1)) as healthys,
    ):
        wait_until(lambda: publish(publisher, b"last") is not None, LIMIT_S)
    assert frozens.result() == healthys.result() == [*range(1, count + 2)]


def test_a_full_control_pipe_refuses_a_control_message_only(rig: Rig) -> None:
    """A responder that reads nothing is told by the answer False; steps go on."""
    publisher, rank = rig.publisher(window=8), rig.steps()
    greet(publisher, rank)
    stuck_subscriber(rig, CONTROL_CLASS)
    wait_for_subscription(publisher, CONTROL_CLASS)
    for _ in range(100_000):
        if not publisher.control(Kind.HEARTBEAT):
            break
    assert not publisher.control(Kind.HEARTBEAT)
    assert publish(publisher) == 1
    assert take_sequences(rank, 1) == [1]


# --- Replay ---------------------------------------------------------------------------------------------------------


def test_replayed_messages_are_the_same_but_for_a_flag(rig: Rig) -> None:
    """A message that is published again has its number, kind, step, flags and frames, and says that it is a replay."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    publisher.publish(Kind.CALL, 5, [b"payload", b"buffer"], 13, Flag.GATHER)
    lose(rank)
    assert publisher.replay(1) == 1
    message = take_message(rank)
    assert message.header == (Kind.CALL, Flag.GATHER | Flag.BUFFERS | Flag.REPLAY, 1, 5, -1)
    assert [bytes(frame) for frame in message.frames] == [b"payload", b"buffer"]


def test_a_replay_begins_where_it_is_asked_to(rig: Rig) -> None:
    """All that is stored from a number on is published again, in order, and what lies before it is not."""
    publisher, rank = rig.publisher(), rig.steps()
    greet(publisher, rank)
    for _ in range(5):
        publish(publisher)
    assert take_sequences(rank, 2) == [1, 2]
    for _ in range(3):
        lose(rank)
    assert publisher.replay(3) == 3
    assert publisher.replayed == 3
    assert take_sequences(rank, 3) == [3, 4, 5]
    assert rank.duplicates == 0
    assert publisher.in_flight == 5  # a replay is no publication


def test_a_replay_of_what_is_yet_to_come_does_nothing(rig: Rig) -> None:
    """A rank that has everything misses nothing."""
    publisher = rig.publisher()
    assert publisher.replay(1) == 0
    publish(publisher)
    assert publisher.replay(2) == 0
    assert publisher.replayed == 0


def test_what_is_no_longer_stored_cannot_be_replayed(rig: Rig) -> None:
    """A message that every rank has answered is gone: the error tells what is asked for and where the store begins."""
    publisher = rig.publisher()
    for _ in range(3):
        publish(publisher)
    publisher.acknowledge(0, 2)
    assert publisher.replay(3) == 1
    with pytest.raises(ProtocolError, match="message 2 can't be replayed: the store begins at 3") as caught:
        publisher.replay(2)
    assert (caught.value.expected, caught.value.got) == ("at least 3", "2")
    publisher.acknowledge(0, 3)
    with pytest.raises(ProtocolError, match="message 1 can't be replayed: the store begins at 4"):
        publisher.replay(1)


def test_a_replay_stops_at_a_full_pipe_and_can_be_asked_for_again(rig: Rig) -> None:
    """A replay is cut short where a pipe is full, without a hole in it, and the rest comes with a later one."""
    publisher = rig.publisher(window=8)
    link = rig.link("slow")
    rank = rig.steps(link.endpoint)
    greet(publisher, rank)
    assert publish(publisher, b"first") == 1
    lose(rank)
    link.stall()
    count = fill(publisher, b"", bytes(100_000))
    assert publisher.replay(1) == 0
    link.resume()
    assert take(rank) == Gap(1, 2)
    with meanwhile(lambda: take_past_gaps(rank, count + 1)) as taking:
        wait_until(lambda: publisher.replay(1) == count + 1, LIMIT_S)
    assert taking.result() == [*range(1, count + 2)]


def test_a_replay_that_is_refused_in_the_middle_leaves_no_hole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a message that a pipe has refused none is published, though the pipe may have room again by then."""
    publisher = rig.publisher()
    for _ in range(3):
        publish(publisher)
    refusals = iter([True, False, True])
    monkeypatch.setattr(publisher, "_send", lambda header, frames: next(refusals))
    assert publisher.replay(1) == 1
    assert publisher.replayed == 1
    assert next(refusals)


def test_frames_are_let_go_of_once_every_rank_has_answered(rig: Rig) -> None:
    """The store keeps a message's frames for a replay, and no longer."""
    publisher = rig.publisher(world_size=2)
    frame = bytearray(100)
    publish(publisher, memoryview(frame))
    publisher.acknowledge(0, 1)
    with pytest.raises(BufferError):
        frame.append(0)
    publisher.acknowledge(1, 1)
    frame.append(0)


def test_a_closed_publisher_holds_no_frames(rig: Rig) -> None:
    """What was never answered is let go of at the end."""
    publisher = rig.publisher()
    frame = bytearray(100)
    publish(publisher, memoryview(frame))
    publisher.close()
    frame.append(0)
    assert publisher.in_flight == 0


def test_a_header_of_the_publisher_is_its_runs(rig: Rig) -> None:
    """What goes over the socket opens with the class, and the header is judged to be of this run and epoch."""
    publisher = rig.publisher()
    raw = rig.raw(zmq.SUB)
    raw.connect(publisher.endpoint)
    for message_class in (STEP_CLASS, CONTROL_CLASS, PROBE_CLASS):
        raw.setsockopt(zmq.SUBSCRIBE, message_class)
    for message_class in (STEP_CLASS, CONTROL_CLASS, PROBE_CLASS):
        wait_for_subscription(publisher, message_class)
    publish(publisher, b"payload", b"buffer", step=4)
    assert raw.recv_multipart() == [WIRE.pack(Kind.STEP, 1, 4, -1, Flag.BUFFERS) + b"payload", b"buffer"]
    publisher.control(Kind.ABORT, 4)
    assert raw.recv_multipart() == [WIRE.pack(Kind.ABORT, 1, 4)]
    publisher.control(Kind.PROBE)
    assert raw.recv_multipart() == [WIRE.pack(Kind.PROBE, 1)]
