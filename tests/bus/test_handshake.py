"""The handshake: whoever has received PROBE receives all that is published from then on; nobody sleeps."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from stepcast.bus.frames import CONTROL_CLASS, PROBE_CLASS, STEP_CLASS, Flag, Kind, Wire
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from stepcast.bus.subscriber import Gap
from tests.bus.rig import (
    LIMIT_MS,
    LIMIT_S,
    RUN_ID,
    WIRE,
    Rig,
    greet,
    publish,
    read,
    take,
    take_control,
    take_message,
    take_sequences,
    wait_for_subscription,
)
from tests.harness import wait_until

TRIES = 50


def greet_by_hello(publisher: Publisher, reader: ReplyReader, wanted: set[tuple[int, int]]) -> None:
    """Publish PROBE until each rank has answered HELLO, each with its flags, as the monitor does."""
    greeted: set[tuple[int, int]] = set()

    def all_greeted() -> bool:
        publisher.control(Kind.PROBE)
        while (reply := reader.read()) is not None:
            assert reply.header.kind == Kind.HELLO
            greeted.add((reply.header.rank, reply.header.flags))
        return greeted == wanted

    wait_until(all_greeted, LIMIT_S, lambda: f"HELLO of {wanted - greeted}")


def test_the_first_step_after_the_handshake_is_always_delivered(rig: Rig) -> None:
    """A rank that connects late has its first step and its first heartbeat, published the moment it has greeted."""
    reader = rig.reader(world_size=1)
    for number in range(TRIES):
        publisher = rig.publisher(name=f"p{number}")
        replies = rig.sender()
        took: list[object] = []

        def live(endpoint: str = publisher.endpoint, replies: object = replies, took: list[object] = took) -> None:
            steps, control = rig.steps(endpoint), rig.control(endpoint)
            assert control.wait_for_probe(LIMIT_S)
            replies.send(Kind.HELLO)
            assert steps.wait_for_probe(LIMIT_S)
            replies.send(Kind.HELLO, flags=Flag.STEP_SOCKET)
            took.append(take_message(steps).header.sequence)
            took.append(take_control(control))

        thread = threading.Thread(target=live)
        thread.start()
        try:
            greet_by_hello(publisher, reader, {(0, 0), (0, Flag.STEP_SOCKET)})
            assert publish(publisher) == 1
            assert publisher.control(Kind.HEARTBEAT)
        finally:
            thread.join(LIMIT_S)
        assert took == [1, Kind.HEARTBEAT]
        publisher.close()


def test_a_rank_finds_no_driver_where_none_is_bound(rig: Rig) -> None:
    """The driver binds before it starts its ranks: one that finds nobody says so at once."""
    with pytest.raises(FileNotFoundError):
        rig.steps()


def test_a_rank_that_comes_later_is_greeted_while_others_run(rig: Rig) -> None:
    """PROBE disturbs nobody who has left its class."""
    publisher = rig.publisher(world_size=2)
    early = rig.steps()
    greet(publisher, early)
    publish(publisher)
    late = rig.steps()
    greet(publisher, late)
    publish(publisher)
    assert take_sequences(early, 2) == [1, 2]
    assert take(late) == Gap(1, 2)
    publisher.replay(1)
    assert take_sequences(late, 2) == [1, 2]


def test_probe_is_the_last_that_a_socket_subscribes_to(rig: Rig) -> None:
    """Subscriptions travel in order: a PROBE that arrives proves that the other one has."""
    for connect, message_class in ((rig.steps, STEP_CLASS), (rig.control, CONTROL_CLASS)):
        publisher = rig.publisher()
        connect()
        came = [publisher._socket.recv() for _ in range(2) if publisher._socket.poll(LIMIT_MS)]
        assert came == [b"\1" + message_class, b"\1" + PROBE_CLASS]
        publisher.close()


def test_the_probe_class_is_left_once_it_has_come(rig: Rig) -> None:
    """After the handshake a PROBE goes to no socket: what comes next is what was published after it."""
    publisher, steps, control = rig.publisher(), rig.steps(), rig.control()
    greet(publisher, steps, control)
    left = 0

    def both_have_left() -> bool:
        nonlocal left
        left += publisher.drain_subscriptions()
        return left >= 5  # step, control and probe class twice; the last one that leaves is told

    wait_until(both_have_left, LIMIT_S)
    while steps.socket.poll(0):  # PROBEs that were on their way
        assert steps.next() is None
    for _ in range(3):
        assert publisher.control(Kind.PROBE)
    publish(publisher)
    assert steps.socket.recv() == WIRE.pack(Kind.STEP, 1, 1)
    publisher.control(Kind.HEARTBEAT)
    while (head := control.socket.recv()) == WIRE.pack(Kind.PROBE):  # one from before
        pass
    assert head == WIRE.pack(Kind.HEARTBEAT, 1)


def test_a_further_probe_is_not_part_of_the_stream(rig: Rig) -> None:
    """PROBEs that were on their way when the socket left their class are passed over."""
    publisher, rank = rig.publisher(), rig.steps()
    wait_for_subscription(publisher, PROBE_CLASS)
    for _ in range(3):
        publisher.control(Kind.PROBE)
    publish(publisher)
    assert rank.wait_for_probe(LIMIT_S)
    assert take_message(rank).header.kind == Kind.STEP
    assert (rank.foreign, rank.duplicates) == (0, 0)


def test_a_probe_is_never_taken_for_the_step_it_tells_of(rig: Rig) -> None:
    """PROBE carries the highest sequence number as HEARTBEAT does, and is no part of the stream even so."""
    publisher = rig.publisher()
    publish(publisher)
    rank = rig.steps()
    wait_for_subscription(publisher, PROBE_CLASS)
    publisher.control(Kind.PROBE)
    assert take(rank) is None
    assert rank.sequence == 0


def test_without_a_probe_the_wait_ends_at_its_limit(rig: Rig) -> None:
    """A rank whose driver never greets it says so after the limit, not before."""
    rig.publisher()
    started = time.monotonic()
    assert not rig.steps().wait_for_probe(0.2)
    assert 0.15 < time.monotonic() - started < LIMIT_S


def test_the_wait_for_probe_outlasts_what_is_foreign(rig: Rig) -> None:
    """A message of another run or epoch that comes first does not end the wait."""
    socket = rig.raw(zmq.XPUB)
    socket.bind(rig.directory.endpoint("publish"))
    rank = rig.steps()
    while socket.recv() != b"\1" + PROBE_CLASS:
        pass
    for head in (Wire(bytes(16), 1).pack(Kind.PROBE), Wire(RUN_ID, 2).pack(Kind.PROBE), PROBE_CLASS):
        socket.send(head)
    socket.send(WIRE.pack(Kind.PROBE))
    assert rank.wait_for_probe(LIMIT_S)
    assert rank.foreign == 3


def test_foreign_messages_do_not_prolong_the_wait(rig: Rig) -> None:
    """However much comes that is not PROBE, the wait ends at its limit."""
    socket = rig.raw(zmq.XPUB)
    socket.bind(rig.directory.endpoint("publish"))
    rank = rig.steps()
    while socket.recv() != b"\1" + PROBE_CLASS:
        pass
    over = threading.Event()

    def disturb() -> None:
        for _ in range(100):
            socket.send(PROBE_CLASS)
            if over.wait(0.03):
                return

    thread = threading.Thread(target=disturb)
    thread.start()
    started = time.monotonic()
    assert not rank.wait_for_probe(0.2)
    elapsed_s = time.monotonic() - started
    over.set()
    thread.join(LIMIT_S)
    assert rank.foreign > 0
    assert 0.15 < elapsed_s < 2.0


def test_a_step_before_the_probe_is_found_missing(rig: Rig) -> None:
    """What comes before the handshake is over is not taken, and shows as a gap."""
    publisher, rank = rig.publisher(), rig.steps()
    wait_for_subscription(publisher, PROBE_CLASS)
    publish(publisher)
    publisher.control(Kind.PROBE)
    publish(publisher)
    assert rank.wait_for_probe(LIMIT_S)
    assert take(rank) == Gap(1, 2)
    publisher.replay(1)
    assert take_sequences(rank, 2) == [1, 2]


def test_each_rank_says_over_which_socket_probe_came(rig: Rig) -> None:
    """HELLO tells rank and socket, so that the driver knows what is still missing."""
    publisher, reader = rig.publisher(world_size=2), rig.reader(world_size=2)
    senders = [rig.sender(rank) for rank in range(2)]
    sockets = [rig.steps(), rig.steps()]
    controls = [rig.control(), rig.control()]
    greet(publisher, *sockets, *controls)
    for sender in senders:
        sender.send(Kind.HELLO, flags=Flag.STEP_SOCKET)
        sender.send(Kind.HELLO)
    got = {(reply.header.rank, reply.header.flags) for reply in (read(reader) for _ in range(4))}
    assert got == {(0, 0), (0, Flag.STEP_SOCKET), (1, 0), (1, Flag.STEP_SOCKET)}
