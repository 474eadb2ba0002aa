"""A rank's sockets over tcp: they do what those over ipc do, and outlive a link that is cut and healed."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
import zmq

from stepcast.bus import curve_socket, sockets
from stepcast.bus.curve_socket import CurveSocket
from stepcast.bus.errors import ConfigError
from stepcast.bus.frames import HEAD_ROOM_BYTES, NO_TIMES, STEP_CLASS, Kind
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.links import connect
from stepcast.bus.subscriber import Gap, Message
from stepcast.bus.zmtp import LinkLost
from tests.bus.rig import (
    LIMIT_MS,
    LIMIT_S,
    Rig,
    admitted,
    greet,
    meanwhile,
    publish,
    read,
    take,
    take_past_gaps,
    take_sequences,
    wait_for_subscription,
)
from tests.bus.test_gate import Driver
from tests.harness import wait_until

MIB = 1 << 20
LARGE = 16 * MIB


@pytest.fixture
def driver(rig: Rig) -> Driver:
    return Driver(rig)


@pytest.fixture
def keys(driver: Driver) -> RankKeys:
    return admitted(driver.gate, 1)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is blocked looks for the connection's end every few milliseconds."""
    monkeypatch.setattr(curve_socket, "LOOK_INTERVAL_S", 0.05)


# --- As over ipc ----------------------------------------------------------------------------------------------------


def test_what_is_large_passes_in_both_directions(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """Whole, up to the limit, as a step's buffer and as an answer's."""
    steps = rig.steps(driver.publish_endpoint, max_message_bytes=LARGE, keys=keys)
    sender = rig.sender(1, endpoint=driver.reply_endpoint, keys=keys)
    greet(driver.publisher, steps)
    content = bytes(range(256)) * (LARGE >> 8)
    publish(driver.publisher, b"head", content)
    message = take(steps)
    assert isinstance(message, Message)
    assert message.frames[1] == content
    sender.send(Kind.RESULT, 1, 1, (b"head", content), times=NO_TIMES)
    assert read(driver.reader).frames[1] == content


def test_a_frame_over_the_limit_never_arrives(
    driver: Driver, rig: Rig, keys: RankKeys, often: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose driver sends one loses its link, and is told of the limit; one who sends one is cut off."""
    steps = rig.steps(driver.publish_endpoint, max_message_bytes=LARGE, keys=keys)
    greet(driver.publisher, steps)
    publish(driver.publisher, bytes(4 * LARGE))
    with pytest.raises(ConnectionError):
        steps.socket.recv()
    with pytest.raises(LinkLost, match=f"over the limit of {LARGE + HEAD_ROOM_BYTES} bytes"):
        steps.socket.reconnect(0.2)
    sender = rig.sender(1, endpoint=driver.reply_endpoint, keys=keys)
    sender.send(Kind.RESULT, 1, 1, (bytes(4 * LARGE + 2 * HEAD_ROOM_BYTES),), times=NO_TIMES)
    sender.send(Kind.ALIVE)
    assert read(driver.reader).header.kind == Kind.ALIVE


def test_what_was_subscribed_to_comes_and_nothing_else(driver: Driver, keys: RankKeys) -> None:
    """The publisher filters by the first bytes, until the subscription ends."""
    xpub = driver.publisher._socket
    with closing(connect(driver.publish_endpoint, "SUB", keys, max_frame_bytes=1000)) as rank:
        for topic in (b"a", b"b"):
            rank.subscribe(topic)
            assert xpub.recv() == b"\1" + topic
        rank.unsubscribe(b"b")
        rank.unsubscribe(b"b")
        assert xpub.recv() == b"\0b"
        for message in (b"b1", b"c1", b"a1"):
            xpub.send(message)
        assert rank.poll(LIMIT_S)
        assert rank.has_unread
        assert rank.recv() == b"a1"
        assert not rank.has_unread
        assert not rank.poll(0)


def test_the_descriptor_calls_for_whatever_comes(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """Once read empty, it calls again; what it has called for once lies there until it is read."""
    control = rig.control(driver.publish_endpoint, keys=keys)
    greet(driver.publisher, control)
    poller = select.poll()
    poller.register(control.socket, select.POLLIN)

    def hear() -> int:
        """As the responder does."""
        heard = 0
        while control.socket.poll(0):
            message = control.receive()
            heard += message is not None and message.header.kind == Kind.HEARTBEAT
        return heard

    hear()  # PROBEs that had come
    while poller.poll(100):
        hear()
    for _ in range(20):
        for _ in range(3):
            driver.publisher.control(Kind.HEARTBEAT)
        heard = 0
        while heard < 3:
            assert poller.poll(LIMIT_MS), "no call, and something lies there"
            heard += hear()


def test_tcp_without_keys_is_refused() -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigError, match="tcp is never used without CURVE"):
        connect("tcp://127.0.0.1:1", "SUB")


def test_a_rank_on_its_drivers_host_never_imports_libzmq() -> None:
    """It would have a thread for nothing, and start later."""
    code = "import sys, stepcast.workers.boot, stepcast.workers.echo; print('zmq' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "False"


# --- What is sent ---------------------------------------------------------------------------------------------------


def test_the_last_word_gets_out(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """What was sent arrives though the socket is closed at once, before it was ever connected."""
    for _ in range(20):
        sender = rig.sender(1, endpoint=driver.reply_endpoint, keys=keys)
        sender.send(Kind.RESULT, 1, 1, (bytes(MIB),), times=NO_TIMES)
        sender.send(Kind.BYE)
        sender.close()
        assert [read(driver.reader).header.kind for _ in range(2)] == [Kind.RESULT, Kind.BYE]


def test_a_last_word_to_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the limit."""
    monkeypatch.setattr(curve_socket, "LINGER_S", 0.1)
    keys = RankKeys.of(KeyPair.make().public, KeyPair.make())
    sender = CurveSocket("tcp://127.0.0.1:1", "PUSH", keys)
    sender.send((b"bye",))
    sender.close()


def test_a_send_to_nobody_ends_at_its_limit() -> None:
    """Once the queue is full."""
    keys = RankKeys.of(KeyPair.make().public, KeyPair.make())
    sender = CurveSocket("tcp://127.0.0.1:1", "PUSH", keys, send_timeout_s=0.1)
    sender._socket.setsockopt(zmq.LINGER, 0)

    def send_all() -> None:
        for _ in range(1000):
            sender.send((b"head",), (b"buffer",))

    with closing(sender), pytest.raises(TimeoutError, match=r"has not read for 0\.1 s, or the link to it is cut"):
        send_all()


# --- A link that is cut ---------------------------------------------------------------------------------------------


def test_a_cut_link_comes_back_and_what_was_lost_shows(driver: Driver, rig: Rig, keys: RankKeys, often: None) -> None:
    """As a gap; the subscriptions are there again, without the rank's doing."""
    link = rig.tcp_link(driver.publish_endpoint)
    steps = rig.steps(link.endpoint, keys=keys)
    greet(driver.publisher, steps)
    publish(driver.publisher)
    assert take_sequences(steps, 1) == [1]
    link.cut()
    wait_for_the_end_of_a_subscription(driver, STEP_CLASS)
    publish(driver.publisher)
    with meanwhile(steps.next) as waiting:  # in the loop thread: it finds out, and waits for the connection
        link.mend()
    assert waiting.result() is None
    wait_for_subscription(driver.publisher, STEP_CLASS)
    publish(driver.publisher)
    assert take(steps) == Gap(2, 3)
    driver.publisher.replay(2)
    assert take_past_gaps(steps, 2) == [2, 3]


def wait_for_the_end_of_a_subscription(driver: Driver, message_class: bytes) -> None:
    """Wait until the driver knows that the connection has ended."""
    socket = driver.publisher._socket
    wait_until(lambda: socket.poll(0) and socket.recv() == b"\0" + message_class, LIMIT_S)


def test_who_was_cut_off_is_missed_and_present_again(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """As soon as its thread asks for messages."""
    link = rig.tcp_link(driver.publish_endpoint)
    control = rig.control(link.endpoint, presence_of=1, keys=keys)

    def is_present() -> bool:
        control.socket.poll(0)
        driver.publisher.drain_subscriptions()
        return driver.publisher.present == {1}

    wait_until(is_present, LIMIT_S)
    link.cut()
    wait_until(lambda: not is_present(), LIMIT_S)
    link.mend()
    wait_until(is_present, LIMIT_S)
    greet(driver.publisher, control)


def test_a_link_that_stays_cut_ends_the_rank(driver: Driver, rig: Rig, keys: RankKeys, often: None) -> None:
    """The loop thread is told at once, and gives up after the limit; the responder asks without waiting."""
    link = rig.tcp_link(driver.publish_endpoint)
    steps, control = rig.steps(link.endpoint, keys=keys), rig.control(link.endpoint, keys=keys)
    greet(driver.publisher, steps, control)
    link.cut()
    for socket in (steps.socket, control.socket):
        assert wait_until(lambda socket=socket: socket.poll(LIMIT_S), LIMIT_S)
        while True:
            try:
                socket.recv()  # PROBEs that had come
            except ConnectionError:
                break
        with pytest.raises(LinkLost, match=f"{link.endpoint} has ended, and did not come back within 0 s"):
            socket.reconnect(0.0)
    with pytest.raises(LinkLost):
        steps.socket.reconnect(0.2)


def test_replies_that_were_queued_outlive_a_cut(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """What had not left libzmq goes over the next connection."""
    link = rig.tcp_link(driver.reply_endpoint)
    sender = rig.sender(1, endpoint=link.endpoint, keys=keys)
    sender.send(Kind.HELLO)
    assert read(driver.reader).header.kind == Kind.HELLO
    link.cut()
    deadline = time.monotonic() + LIMIT_S
    link.mend()
    # The first may fall into the connection that has ended without its knowing.
    wait_until(lambda: sender.send(Kind.ALIVE) or driver.reader.read(), deadline - time.monotonic())


def test_a_stalled_link_loses_nothing(driver: Driver, rig: Rig, keys: RankKeys) -> None:
    """Bytes that wait are all that a short cut in the network is to TCP."""
    link = rig.tcp_link(driver.publish_endpoint)
    steps = rig.steps(link.endpoint, keys=keys)
    greet(driver.publisher, steps)
    link.stall()
    wait_until(lambda: link.stalled, LIMIT_S)
    for step in range(1, 9):
        publish(driver.publisher, bytes(MIB), step=step)
    assert not steps.socket.poll(0.2)
    link.resume()
    assert take_sequences(steps, 8) == list(range(1, 9))


def test_a_socket_that_fails_to_open_leaves_nothing() -> None:
    """No context, no thread."""
    before = threading.active_count()
    keys = RankKeys.of(KeyPair.make().public, KeyPair.make())
    with pytest.raises(zmq.ZMQError):
        CurveSocket("tcp://nonsense", "SUB", keys)
    assert threading.active_count() == before


def test_the_kernel_is_asked_to_give_a_dead_link_up(driver: Driver) -> None:
    """On both sides: unsent data and an idle connection have a limit."""
    socket = driver.publisher._socket
    assert socket.getsockopt(zmq.TCP_MAXRT) == sockets.LINK_TIMEOUT_S * 1000
    idle, interval, count = (
        socket.getsockopt(each) for each in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
    )
    assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    assert idle + interval * count <= 2 * sockets.LINK_TIMEOUT_S
