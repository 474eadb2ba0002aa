"""Peers that do not belong to the group, on its sockets: it goes on, counts, and executes nothing."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from stepcast import Executor
from stepcast.bus.frames import MAGIC, NO_TIMES, VERSION, Kind, Wire, pack_times
from tests.faults.rig import Stage, run_directories
from tests.harness import wait_until


@pytest.fixture
def executor(stage: Stage) -> Iterator[Executor]:
    """A group of two; fork, since it is there at once."""
    config = stage.config(world_size=2, start_method="fork", heartbeat_interval_s=0.1, max_message_bytes=1 << 20)
    with Executor(config) as made:
        yield made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """The stray peers' own ZeroMQ."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def path_of(name: str) -> str:
    [directory] = run_directories()
    return f"{os.environ['TMPDIR']}/{directory}/{name}"


def connect(stray: zmq.Socket[bytes], path: str) -> None:
    """Connect, and wait until the other end has agreed."""
    with stray.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
        stray.connect(f"ipc://{path}")
        assert monitor.poll(5000)
        stray.disable_monitor()


def check_serving(executor: Executor, steps: int = 20, size: int = 0) -> None:
    payload = bytes(size)
    for _ in range(steps):
        assert executor.step(payload, gather=True) == [payload] * 2
    assert executor.health().state == "ready"


@pytest.mark.parametrize("topic", [b"", b"S"])
def test_a_subscriber_that_never_reads_holds_nobody_up(
    executor: Executor, context: zmq.Context[zmq.Socket[bytes]], topic: bytes
) -> None:
    """Its pipe fills up, and what does not fit in is lost to it alone."""
    with context.socket(zmq.SUB) as stray:
        stray.setsockopt(zmq.RCVHWM, 1)
        stray.setsockopt(zmq.SUBSCRIBE, topic)
        connect(stray, path_of("publish"))

        began = time.monotonic()
        check_serving(executor, steps=400, size=32_768)
        assert time.monotonic() - began < 15.0
        # The ranks' own pipes are not full: they hear the heartbeats still.
        wait_until(lambda: all(rank.last_heard_s < 0.05 for rank in executor.health().ranks))
        silent_since = time.monotonic()
        wait_until(lambda: time.monotonic() - silent_since > 1.0)
        assert all(rank.last_heard_s < 1.0 for rank in executor.health().ranks)


def test_subscribers_that_come_and_go_leave_no_trace(
    executor: Executor, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """What they subscribe to is read and forgotten."""
    for _ in range(50):
        with context.socket(zmq.SUB) as stray:
            stray.setsockopt(zmq.SUBSCRIBE, b"")
            stray.connect(f"ipc://{path_of('publish')}")
            executor.step("a step")
    check_serving(executor)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_messages_of_strays_are_dropped_counted_and_not_decoded(
    stage: Stage, executor: Executor, context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, pickles, other versions, runs and epochs, ranks that do not exist, with any number of frames."""
    crater = stage.directory / "crater"
    bomb = pickle.dumps(Bomb(crater))
    wire = executor._group._group.replies._wire
    run_id = wire._run_id
    ours = wire.pack(Kind.RESULT, 1, 1, 0)
    foreign = [
        [b"garbage"],
        [b"\x80" * 500],
        [bomb],
        [os.urandom(64), bomb, bomb],
        [ours[:1] + b"xxx" + ours[4:] + bomb],
        [ours[:4] + bytes([VERSION + 1]) + ours[5:], bomb],
        [Wire(bytes(16), 1).pack(Kind.RESULT, 1, 1, 0) + bomb],
        [ours[:5] + b"\xff" + ours[6:]],  # no such kind
        [MAGIC + bytes(60)],
    ]
    old_epoch = [
        [Wire(run_id, 0).pack(Kind.FAILURE, 1, 1, 0) + bomb],
        [Wire(run_id, 2).pack(Kind.RESULT, 1, 1, 0), b""],
    ]
    no_rank = [[wire.pack(Kind.READY, 0, 0, 2)], [wire.pack(Kind.READY, 0, 0, -1) + bomb]]
    malformed = [
        [wire.pack(Kind.READY, 0, 0, 0) + bomb],
        [wire.pack(Kind.ALIVE, 0, 0, 1)],
        [wire.pack(Kind.ALIVE, 0, 0, 1) + b"\x92\xcc\xfa\x00"],  # no such phase
        [wire.pack(Kind.FAILURE, 1, 1, 0) + struct.pack("<QQQ", 0, 0, 0) + bomb],
    ]
    with context.socket(zmq.PUSH) as stray:
        stray.connect(f"ipc://{path_of('replies')}")
        for message in foreign + old_epoch + no_rank + malformed:
            stray.send_multipart(message)
            check_serving(executor, steps=1)

        def dropped(reason: str) -> int:
            return executor.health().dropped.get(reason, 0)

        wait_until(lambda: dropped("malformed") == len(malformed), message=lambda: str(executor.health().dropped))
        assert dropped("foreign") == len(foreign)
        assert dropped("epoch") == len(old_epoch)
        assert dropped("rank") == len(no_rank)
    check_serving(executor)
    assert not crater.exists()
    assert len([record for record in caplog.records if "dropped a message on the reply" in record.getMessage()]) == 3


def test_answers_of_other_runs_take_no_frames_from_the_ranks_answers(
    executor: Executor, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """They look like the answers that are waited for, and come between them."""
    answer = Wire(bytes(16), 1).pack(Kind.RESULT, 1, 1, 0) + pack_times(NO_TIMES)
    array = np.arange(100)
    with context.socket(zmq.PUSH) as stray:
        stray.connect(f"ipc://{path_of('replies')}")
        for number in range(200):
            stray.send_multipart([answer] * (1 + number % 2))
            for each in executor.step(array, gather=True):
                assert np.array_equal(each, array)
    wait_until(lambda: executor.health().dropped.get("foreign", 0) == 200, message=lambda: str(executor.health()))


def test_a_message_over_the_limit_cuts_the_strays_connection_alone(
    executor: Executor, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """ZeroMQ refuses it before it allocates."""
    with context.socket(zmq.PUSH) as stray:
        stray.connect(f"ipc://{path_of('replies')}")
        stray.send(bytes(executor.config.max_message_bytes + 4096))
        check_serving(executor, steps=200)
    assert executor.health().dropped.get("foreign", 0) == 0


@pytest.mark.parametrize("name", ["publish", "replies"])
def test_a_peer_that_speaks_no_zeromq_disturbs_nobody(executor: Executor, name: str) -> None:
    """Half a greeting, noise, and a connection that is only held."""
    greetings = [b"", b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)]
    peers = []
    try:
        for greeting in greetings:
            peer = socket.socket(socket.AF_UNIX)
            peers.append(peer)
            peer.connect(path_of(name))
            peer.sendall(greeting)
            check_serving(executor)
    finally:
        for peer in peers:
            peer.close()
    check_serving(executor)


def test_a_stray_that_floods_the_replies_does_not_drown_the_ranks(
    executor: Executor, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """ZeroMQ takes from each peer in turn."""
    with context.socket(zmq.PUSH) as stray:
        stray.setsockopt(zmq.SNDHWM, 0)
        stray.connect(f"ipc://{path_of('replies')}")
        for _ in range(20_000):
            stray.send(b"noise")
        check_serving(executor, steps=100)
        wait_until(lambda: executor.health().dropped.get("foreign", 0) == 20_000)
