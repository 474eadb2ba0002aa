"""The driver's gate: over tcp come the group's own ranks, each as itself, and nobody else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stepcast.bus import curve_socket, sockets
from stepcast.bus.errors import ConfigError, ProtocolError
from stepcast.bus.frames import NO_TIMES, STEP_CLASS, Flag, Kind, parse_presence, presence_topic
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from tests.bus.rig import LIMIT_MS, LIMIT_S, RUN_ID, WIRE, Rig, admitted, greet, publish, read, take_sequences
from tests.harness import wait_until

#: How long something is waited for that must not come.
MOMENT_MS = 300


class Driver:
    """A driver's sockets on ipc and on tcp."""

    def __init__(self, rig: Rig, *, world_size: int = 2, address: str = "127.0.0.1") -> None:
        self.gate = rig.gate(address)
        self.publisher: Publisher = rig.publisher(world_size=world_size, gate=self.gate)
        self.reader: ReplyReader = rig.reader(world_size=world_size, gate=self.gate)
        assert self.publisher.tcp_endpoint is not None
        assert self.reader.tcp_endpoint is not None
        self.publish_endpoint: str = self.publisher.tcp_endpoint
        self.reply_endpoint: str = self.reader.tcp_endpoint


@pytest.fixture
def driver(rig: Rig) -> Driver:
    return Driver(rig)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused tries again soon."""
    for module in (sockets, curve_socket):
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.5)


def stranger(rig: Rig, driver: Driver, kind: int, keys: RankKeys | None, endpoint: str = "") -> zmq.Socket[bytes]:
    """Connect a plain socket, with keys or without."""
    socket = rig.raw(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint or (driver.publish_endpoint if kind == zmq.SUB else driver.reply_endpoint))
    return socket


# --- Who comes in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_steps_and_replies_pass_in_both_directions(rig: Rig, address: str) -> None:
    """From the handshake on, one rank over ipc and one over tcp, with buffers."""
    if address == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    driver = Driver(rig, address=address)
    keys = admitted(driver.gate, 1)
    near, far = rig.steps(), rig.steps(driver.publish_endpoint, keys=keys)
    control = rig.control(driver.publish_endpoint, presence_of=1, keys=keys)
    senders = [rig.sender(), rig.sender(1, endpoint=driver.reply_endpoint, keys=keys)]
    greet(driver.publisher, near, far, control)
    for rank, sender in enumerate(senders):
        sender.send(Kind.HELLO, flags=Flag.STEP_SOCKET)
        sender.send(Kind.RESULT, 1, 1, (b"payload", bytes([rank]) * 100_000), times=NO_TIMES)
    frames = {}
    for _ in range(4):
        reply = read(driver.reader)
        frames[reply.header.rank, reply.header.kind] = [bytes(frame) for frame in reply.frames]
    for rank in range(2):
        assert frames[rank, Kind.RESULT] == [b"payload", bytes([rank]) * 100_000]
        assert frames[rank, Kind.HELLO] == []
    for step in range(1, 4):
        publish(driver.publisher, b"head", bytes(100_000), step=step)
    assert take_sequences(near, 3) == take_sequences(far, 3) == [1, 2, 3]
    assert not driver.reader.dropped
    assert not driver.gate.refused


def test_several_answers_are_received_together(driver: Driver, rig: Rig) -> None:
    """Also where each is looked at for whose it is."""
    far = rig.sender(1, endpoint=driver.reply_endpoint, keys=admitted(driver.gate, 1))
    for sender in (rig.sender(), far):
        sender.send(Kind.RESULT, 1, 1, (b"x",), times=NO_TIMES)
    replies = driver.reader.receive(LIMIT_S, 2)
    assert {reply.header.rank for reply in replies} == {0, 1}
    driver.reader.wake()
    assert driver.reader.receive(LIMIT_S) == []


def test_a_rank_that_is_there_before_its_key_is_known_comes_in_later(driver: Driver, rig: Rig) -> None:
    """It tries again until then."""
    keys = RankKeys.of(driver.gate.public_key, KeyPair.make())
    sender = rig.sender(1, endpoint=driver.reply_endpoint, keys=keys)
    sender.send(Kind.HELLO)
    wait_until(lambda: driver.gate.refused["stranger"], LIMIT_S)
    assert driver.reader.read() is None
    driver.gate.admit(1, keys.public)
    driver.gate.admit(1, keys.public)
    assert read(driver.reader).header.rank == 1


def test_a_key_is_one_ranks_alone(driver: Driver) -> None:
    """And must be one."""
    keys = admitted(driver.gate, 1)
    with pytest.raises(ProtocolError, match="rank 0 has the public key of rank 1"):
        driver.gate.admit(0, keys.public)
    with pytest.raises(ProtocolError, match="not a public key"):
        driver.gate.admit(0, b"key")


def test_an_address_of_another_host_is_refused(rig: Rig) -> None:
    """Before anybody is told of it."""
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1"):
        rig.publisher(gate=rig.gate("192.0.2.1"))


# --- Who does not ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["no key", "a key of its own", "the wrong driver's key"])
def who(request: pytest.FixtureRequest, driver: Driver) -> Iterator[tuple[RankKeys | None, str]]:
    """Keys of strangers, and why they are refused."""
    if request.param == "no key":
        yield None, "handshake"
    elif request.param == "a key of its own":
        yield RankKeys.of(driver.gate.public_key, KeyPair.make()), "stranger"
    else:
        keys = admitted(driver.gate, 1)
        yield RankKeys(KeyPair.make().public, keys.public, keys.secret), "handshake"


def test_a_stranger_hears_nothing(driver: Driver, rig: Rig, who: tuple[RankKeys | None, str]) -> None:
    """Whatever it lacks; its subscription does not reach the publisher."""
    keys, reason = who
    socket = stranger(rig, driver, zmq.SUB, keys)
    wait_until(lambda: driver.gate.refused[reason], LIMIT_S)
    publish(driver.publisher, b"secret")
    assert not socket.poll(MOMENT_MS)
    assert driver.publisher.drain_subscriptions() == 0


def test_a_stranger_is_not_heard(
    driver: Driver, rig: Rig, who: tuple[RankKeys | None, str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted and logged once, and the ranks are heard as ever."""
    keys, reason = who
    with caplog.at_level(logging.WARNING, "stepcast.bus"):
        socket = stranger(rig, driver, zmq.PUSH, keys)
        socket.send(WIRE.pack(Kind.HELLO, rank=0), zmq.NOBLOCK)
        wait_until(lambda: driver.gate.refused[reason], LIMIT_S)
    rig.sender().send(Kind.ALIVE)
    assert read(driver.reader).header.kind == Kind.ALIVE
    assert driver.reader.read() is None
    [line] = [record.getMessage() for record in caplog.records if record.name == "stepcast.bus"]
    assert line.startswith("refused a connection: ")


def test_nobody_comes_in_when_the_gate_has_closed(driver: Driver, rig: Rig) -> None:
    """Though its key was known: nobody answers for it any more."""
    keys = admitted(driver.gate, 1)
    driver.gate.close()
    driver.gate.close()
    socket = stranger(rig, driver, zmq.PUSH, keys)
    socket.send(WIRE.pack(Kind.HELLO, rank=1))
    assert not driver.reader._socket.poll(MOMENT_MS)


def test_a_rank_of_another_name_is_dropped(driver: Driver, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection is rank 1's: what it says for rank 0 counts for nothing, whole messages long."""
    keys = admitted(driver.gate, 1)
    impostor = rig.sender(0, endpoint=driver.reply_endpoint, keys=keys)
    with caplog.at_level(logging.WARNING, "stepcast.bus"):
        for sequence in (1, 2):
            impostor.send(Kind.RESULT, sequence, 1, (b"false", b"buffer"), times=NO_TIMES)
        impostor.send(Kind.RESULT, 3, 1, (b"false",), times=NO_TIMES)
        wait_until(lambda: driver.reader.read() or driver.reader.dropped["impostor"] == 3, LIMIT_S)
    rig.sender(1, endpoint=driver.reply_endpoint, keys=keys).send(Kind.ALIVE)
    assert read(driver.reader).header.rank == 1
    assert driver.reader.dropped == {"impostor": 3}
    [line] = [record.getMessage() for record in caplog.records]
    assert "rank 1's connection brought one that claims to be rank 0's (later ones are only counted)" in line


def test_an_impostor_does_not_prolong_a_wait(driver: Driver, rig: Rig) -> None:
    """Who waits for an answer gets to ask whether to go on."""
    rig.sender(0, endpoint=driver.reply_endpoint, keys=admitted(driver.gate, 1)).send(Kind.ALIVE)
    assert driver.reader.receive(LIMIT_S) == []
    assert driver.reader.dropped == {"impostor": 1}


def test_bytes_of_a_rank_that_are_no_message_are_dropped_as_foreign(driver: Driver, rig: Rig) -> None:
    """As they are on ipc."""
    socket = stranger(rig, driver, zmq.PUSH, admitted(driver.gate, 1))
    socket.send(b"nonsense")
    wait_until(lambda: driver.reader.read() or driver.reader.dropped["foreign"], LIMIT_S)
    assert driver.reader.dropped == {"foreign": 1}


# --- ipc beside it --------------------------------------------------------------------------------------------------


def test_ipc_stays_without_keys(driver: Driver, rig: Rig) -> None:
    """Each endpoint has the options of the moment of its binding; the gate is asked for none on ipc."""
    near = rig.steps()
    greet(driver.publisher, near)
    rig.sender().send(Kind.HELLO)
    assert read(driver.reader).header.rank == 0
    assert driver.publisher.endpoint == rig.directory.endpoint("publish")
    assert driver.reader.endpoint == rig.directory.endpoint("replies")
    driver.gate.close()
    late = rig.steps()
    greet(driver.publisher, late)
    assert not driver.gate.refused


def test_without_a_gate_there_is_no_tcp(rig: Rig) -> None:
    """Nor a thread."""
    before = threading.active_count()
    publisher, reader = rig.publisher(), rig.reader()
    assert publisher.tcp_endpoint is reader.tcp_endpoint is None
    assert threading.active_count() == before


def test_what_fails_on_ipc_is_not_counted_as_refused(driver: Driver, rig: Rig) -> None:
    """The gate is tcp's: a stray on ipc is the bus's own affair."""
    keys = RankKeys.of(driver.gate.public_key, KeyPair.make())
    stranger(rig, driver, zmq.PUSH, keys, endpoint=driver.reader.endpoint)
    assert not driver.reader._socket.poll(MOMENT_MS)
    assert not driver.gate.refused


def test_the_gate_ends_after_its_sockets_too(rig: Rig) -> None:
    """In either order; and the context ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context)
    publisher = Publisher(
        context,
        rig.directory.endpoint("other"),
        run_id=RUN_ID,
        epoch=1,
        world_size=1,
        max_in_flight=1,
        max_in_flight_bytes=1,
        gate=gate,
    )
    publisher.close()
    gate.close()
    context.term()


# --- Presence -------------------------------------------------------------------------------------------------------


def test_a_rank_that_comes_and_goes_is_noticed_at_once(driver: Driver, rig: Rig) -> None:
    """By its control socket, which the kernel closes with its process."""
    keys = admitted(driver.gate, 1)
    control = rig.control(driver.publish_endpoint, presence_of=1, keys=keys)

    def present() -> set[int]:
        driver.publisher.drain_subscriptions()
        return driver.publisher.present

    wait_until(lambda: present() == {1}, LIMIT_S)
    poller = zmq.Poller()
    poller.register(driver.publisher.fd, zmq.POLLIN)
    while poller.poll(MOMENT_MS):  # its other subscriptions
        driver.publisher.drain_subscriptions()
    control.close()
    assert poller.poll(LIMIT_MS)
    wait_until(lambda: not present(), LIMIT_S)


def test_nobody_can_be_present_for_another(driver: Driver, rig: Rig) -> None:
    """Nor over ipc, where no key says who it is."""
    keys = admitted(driver.gate, 1)
    rig.control(driver.publish_endpoint, presence_of=0, keys=keys)
    rig.control(presence_of=0)
    came = 0

    def all_came() -> bool:
        nonlocal came
        came += driver.publisher.drain_subscriptions()
        return came == 6

    wait_until(all_came, LIMIT_S)
    assert not driver.publisher.present


def test_the_topic_of_presence_is_a_ranks_own() -> None:
    """And no other class's."""
    assert [parse_presence(presence_topic(rank)) for rank in (0, 1, 70_000)] == [0, 1, 70_000]
    for topic in (b"", STEP_CLASS, presence_topic(1)[:-1], presence_topic(1) + b"x"):
        assert parse_presence(topic) is None


# --- Keys -----------------------------------------------------------------------------------------------------------


def test_a_secret_key_is_never_shown() -> None:
    """In no repr."""
    pair = KeyPair.make()
    keys = RankKeys.of(KeyPair.make().public, pair)
    for each in (pair, keys):
        assert pair.secret.decode() not in repr(each)
        assert pair.public.decode() in repr(each)


def test_a_server_key_that_is_none_is_refused() -> None:
    """Before a socket takes it."""
    for key in (b"", bytes(40), "x" * 40, None):
        with pytest.raises(ProtocolError, match="not a public key"):
            RankKeys.of(key, KeyPair.make())  # type: ignore[arg-type]


def test_without_curve_in_libzmq_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="install pyzmq from its wheel"):
        KeyPair.make()
