"""A rank's own end of a ZeroMQ connection, against libzmq's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import ProtocolError
from stepcast.bus.zmtp import ZmtpSocket
from tests.bus.rig import LIMIT_MS, LIMIT_S, Rig, meanwhile

#: Around every place where the framing changes, and around the size of one read.
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([1 << 14, (1 << 16) - 10, (1 << 16) - 9, 1 << 16, 200_000]))
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=8)
ROOMY = 1 << 20


@contextmanager
def connected(kind: int, socket_type: str) -> Iterator[tuple[zmq.Socket[bytes], ZmtpSocket]]:
    """A socket of libzmq's and ours, connected, in a directory of their own."""
    directory = RunDirectory()
    endpoint = directory.endpoint("publish")
    try:
        with zmq.Context() as context, context.socket(kind) as driver:
            driver.setsockopt(zmq.LINGER, 0)
            driver.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
            driver.bind(endpoint)
            with closing(ZmtpSocket(endpoint, socket_type, max_frame_bytes=ROOMY, send_timeout_s=LIMIT_S)) as rank:
                yield driver, rank
    finally:
        directory.remove()


def content(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size


def whole(rank: ZmtpSocket) -> list[bytes]:
    """Receive one message."""
    return [bytes(rank.recv()), *map(bytes, rank.recv_rest())]


@settings(max_examples=30, deadline=None)
@given(messages=MESSAGES)
def test_messages_from_libzmq_arrive_whole(messages: list[list[int]]) -> None:
    """Of any size and number of frames, several in one read or one in several."""
    wanted = [[content(number, size) for number, size in enumerate(sizes)] for sizes in messages]
    with connected(zmq.XPUB, "SUB") as (driver, rank):
        rank.subscribe(b"")
        assert driver.recv() == b"\1"
        with meanwhile(lambda: [whole(rank) for _ in wanted]) as got:
            for message in wanted:
                driver.send_multipart(message)
        assert got.result() == wanted
        assert not rank.has_unread


@settings(max_examples=30, deadline=None)
@given(messages=MESSAGES)
def test_messages_to_libzmq_arrive_whole(messages: list[list[int]]) -> None:
    """Of any size and number of frames."""
    wanted = [[content(number, size) for number, size in enumerate(sizes)] for sizes in messages]
    with connected(zmq.PULL, "PUSH") as (driver, rank):

        def send() -> None:
            for message in wanted:
                rank.send((message[0][:1], message[0][1:]), message[1:])

        with meanwhile(send):
            assert [driver.recv_multipart() for _ in wanted] == wanted


def test_what_was_subscribed_to_comes_and_nothing_else() -> None:
    """The publisher filters by the first bytes, until the subscription ends."""
    with connected(zmq.XPUB, "SUB") as (driver, rank):
        for topic in (b"a", b"b"):
            rank.subscribe(topic)
            assert driver.recv() == b"\1" + topic
        rank.unsubscribe(b"b")
        rank.unsubscribe(b"b")
        assert driver.recv() == b"\0b"
        for message in (b"b1", b"c1", b"a1"):
            driver.send(message)
        assert rank.poll(LIMIT_S)
        assert rank.recv() == b"a1"
        assert not rank.poll(0)


def test_what_was_read_ahead_is_no_secret_to_poll() -> None:
    """The kernel's poll can't see it; `poll` and `has_unread` can."""
    with connected(zmq.XPUB, "SUB") as (driver, rank):
        rank.subscribe(b"")
        assert driver.recv() == b"\1"
        for _ in range(3):
            driver.send(b"message")
        assert rank.recv() == b"message"
        while not rank.has_unread:  # all three may take their time
            assert rank.poll(LIMIT_S)
            assert rank.recv() == b"message"
            driver.send(b"message")
            driver.send(b"message")
        assert rank.poll(0)


def test_a_frame_over_the_limit_is_refused_before_it_is_allocated(rig: Rig) -> None:
    """However much its length claims."""
    with fake_driver(rig) as (endpoint, driver):
        driver.send_after_handshake(b"\2" + (1 << 62).to_bytes(8, "big"))
        with (
            closing(ZmtpSocket(endpoint, "SUB", max_frame_bytes=1000)) as rank,
            pytest.raises(ProtocolError, match=rf"a frame of {1 << 62} bytes"),
        ):
            rank.recv()


def test_a_command_is_passed_over(rig: Rig) -> None:
    """Without a security mechanism none is needed."""
    with fake_driver(rig) as (endpoint, driver):
        driver.send_after_handshake(b"\4\5\4PING" + b"\0\4head")
        with closing(ZmtpSocket(endpoint, "SUB", max_frame_bytes=1000)) as rank:
            assert rank.recv() == b"head"


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n".ljust(64), id="another protocol"),
        pytest.param(b"\xff" + bytes(8) + b"\x7f\3\0" + b"CURVE".ljust(52, b"\0"), id="another mechanism"),
        pytest.param(b"\xff" + bytes(8) + b"\x7f\1\0" + b"NULL".ljust(52, b"\0"), id="an old version"),
    ],
)
def test_what_does_not_greet_as_a_driver_is_refused(rig: Rig, greeting: bytes) -> None:
    """The error names the socket."""
    with fake_driver(rig, greeting) as (endpoint, _), pytest.raises(ConnectionError, match=endpoint[len("ipc://") :]):
        ZmtpSocket(endpoint, "SUB")


def test_a_refused_handshake_says_why(rig: Rig) -> None:
    """The other side's own words are in the error."""
    with fake_driver(rig, ready=b"\4\x0b\5ERROR\4nope") as (endpoint, _), pytest.raises(ConnectionError, match="nope"):
        ZmtpSocket(endpoint, "SUB")


def test_a_connection_that_ends_says_so(rig: Rig) -> None:
    """To who receives, at once, in the middle of a message too."""
    for sent in (b"", b"\2", b"\2" + (100).to_bytes(8, "big") + bytes(50)):
        with fake_driver(rig) as (endpoint, driver):
            driver.send_after_handshake(sent)
            with closing(ZmtpSocket(endpoint, "SUB", max_frame_bytes=1000)) as rank:
                driver.hang_up()
                with pytest.raises(ConnectionError):
                    rank.recv()


# --- A driver of bytes ----------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULL".ljust(52, b"\0")
READY = b"\4\x19" + b"\5READY\x0bSocket-Type\0\0\0\3PUB"


class FakeDriver:
    """Greets one connection, and says what it is told to."""

    def __init__(self, listener: socket.socket, greeting: bytes, ready: bytes) -> None:
        self._listener = listener
        self._hello = greeting + ready
        self._after = b""
        self._hang_up = threading.Event()

    def send_after_handshake(self, data: bytes) -> None:
        self._after = data

    def hang_up(self) -> None:
        self._hang_up.set()

    def serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            connection.sendall(self._hello + self._after)
            connection.recv(1 << 12)
            assert self._hang_up.wait(LIMIT_S)


@contextmanager
def fake_driver(rig: Rig, greeting: bytes = GREETING, ready: bytes = READY) -> Iterator[tuple[str, FakeDriver]]:
    """A Unix socket that is not libzmq's."""
    path = rig.directory.path / "fake"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(LIMIT_S)
        listener.bind(str(path))
        listener.listen()
        driver = FakeDriver(listener, greeting, ready)
        with meanwhile(driver.serve):
            try:
                yield f"ipc://{path}", driver
            finally:
                driver.hang_up()
