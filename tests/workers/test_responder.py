"""The responder thread: answers for its rank, and ends the process when it must."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import zmq

from stepcast.bus.curve_socket import CurveSocket
from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.frames import Kind
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.liveness import Phase
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import Reply, ReplyReader
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.subscriber import ControlSubscriber
from stepcast.workers import responder as responder_module
from stepcast.workers.board import Board
from stepcast.workers.death_watch import DriverWatch, process_start_time
from stepcast.workers.responder import (
    DUMP_SIGNAL,
    EXIT_DRIVER_GONE,
    EXIT_LINK_LOST,
    EXIT_RESPONDER_FAILED,
    EXIT_STOPPED_NOW,
    Responder,
)
from tests.harness import wait_until

RUN_ID = bytes(range(16))
LIMIT_S = 10.0


class Exited(BaseException):
    """Stands for the end of the process."""


class Rank:
    """A responder, and the driver's end of its sockets."""

    def __init__(self, directory: RunDirectory, watch: DriverWatch | None = None, *, far: bool = False) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        run: dict[str, Any] = {"run_id": RUN_ID, "epoch": 1}
        publish, replies = directory.endpoint("publish"), directory.endpoint("replies")
        self.gate = Gate(self.context) if far else None
        self.publisher = Publisher(
            self.context, publish, world_size=1, max_in_flight=8, max_in_flight_bytes=1 << 20, gate=self.gate, **run
        )
        self.reader = ReplyReader(self.context, replies, world_size=1, max_message_bytes=1 << 20, gate=self.gate, **run)
        self.board = Board()
        if self.gate is not None:
            run["keys"] = keys = RankKeys.of(self.gate.public_key, KeyPair.make())
            self.gate.admit(0, keys.public)
            publish, replies = str(self.publisher.tcp_endpoint), str(self.reader.tcp_endpoint)
        control = ControlSubscriber(publish, **run)
        sender = ReplySender(replies, rank=0, timeout_s=LIMIT_S, reconnect_timeout_s=0.0, **run)
        start_time = process_start_time(os.getpid())
        assert start_time is not None
        self.responder = Responder(control, sender, self.board, watch or DriverWatch(os.getpid(), start_time))

    def start(self) -> None:
        """Start it, and greet it until it has answered."""
        self.responder.start()

        def greeted() -> Reply | None:
            self.publisher.control(Kind.PROBE)
            return self.reader.read()

        hello = wait_until(greeted, LIMIT_S)
        assert (hello.header.kind, hello.header.rank, hello.header.flags) == (Kind.HELLO, 0, 0)

    def hear(self, kind: int) -> Reply:
        """Wait for an answer of a kind; further HELLOs may lie before it."""
        while True:
            reply = wait_until(self.reader.read, LIMIT_S)
            if reply.header.kind == kind:
                return reply
            assert reply.header.kind == Kind.HELLO

    def close(self) -> None:
        if self.responder.is_alive():
            self.responder.stop(LIMIT_S)
        self.publisher.close()
        self.reader.close()
        if self.gate is not None:
            self.gate.close()
        self.context.destroy(linger=0)


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    made = RunDirectory()
    yield made
    made.remove()


@pytest.fixture(params=[False, True], ids=["ipc", "tcp"])
def rank(directory: RunDirectory, request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(directory, far=request.param)
    made.start()
    yield made
    made.close()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have ended; the thread ends instead."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(responder_module.os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    return codes


def test_a_heartbeat_is_answered_with_phase_and_place(rank: Rank) -> None:
    """What the loop does, for how long, on which message and step; whatever that is."""
    for phase in (Phase.LOADING, Phase.STEP, Phase.CALL):
        rank.board.moment = (phase, time.monotonic_ns(), 3, 2)
        rank.publisher.control(Kind.HEARTBEAT)
        alive = rank.hear(Kind.ALIVE)
        told, age_s, collectives = msgpack.unpackb(alive.frames[0])
        assert collectives == []
        assert (told, alive.header.sequence, alive.header.step) == (phase, 3, 2)
        assert 0 <= age_s < LIMIT_S


def test_a_heartbeat_is_answered_with_the_last_collectives_of_the_message(rank: Rank) -> None:
    rank.board.moment = (Phase.COLLECTIVE, time.monotonic_ns(), 3, 2)
    rank.board.trail.extend([(2, 4, 99, "barrier"), (3, 1, 11, "barrier"), (3, 2, 22, "broadcast int64[1] from 0")])
    rank.publisher.control(Kind.HEARTBEAT)
    _, _, collectives = msgpack.unpackb(rank.hear(Kind.ALIVE).frames[0])
    assert collectives == [[2, 22, "broadcast int64[1] from 0"], [1, 11, "barrier"]]


def test_an_abort_is_put_on_the_board(rank: Rank) -> None:
    """Where the loop's worker can ask for it, in the middle of a step."""
    rank.publisher.control(Kind.ABORT, 7)
    wait_until(lambda: rank.board.is_aborted(7), LIMIT_S)
    assert not rank.board.is_aborted(8)


def test_a_lost_tail_is_asked_for_at_the_second_heartbeat(rank: Rank) -> None:
    """An idle loop that has received less than was published, twice in a row."""
    for sequence in (1, 2):
        assert rank.publisher.publish(Kind.STEP, sequence, [b"x"], 1) == sequence
    rank.board.moment = (Phase.IDLE, time.monotonic_ns(), 1, 1)
    rank.publisher.control(Kind.HEARTBEAT)
    rank.hear(Kind.ALIVE)
    rank.publisher.control(Kind.HEARTBEAT)
    rank.hear(Kind.ALIVE)
    assert rank.hear(Kind.GAP).header.sequence == 2


def test_a_dump_is_a_signal_to_the_own_process(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler that writes the stacks needs no GIL."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(responder_module.os, "kill", lambda pid, number: sent.append((pid, number)))
    rank.publisher.control(Kind.DUMP)
    wait_until(lambda: sent, LIMIT_S)
    assert sent == [(os.getpid(), DUMP_SIGNAL)]


def test_what_is_not_of_this_run_is_dropped(rank: Rank, directory: RunDirectory) -> None:
    """And the thread goes on."""
    rank.publisher._socket.send(b"C not a header")
    rank.publisher.control(Kind.HEARTBEAT)
    rank.hear(Kind.ALIVE)


def test_stop_ends_the_thread_and_closes_its_sockets(directory: RunDirectory) -> None:
    """The context can be ended then: no socket of it is left."""
    rank = Rank(directory)
    rank.start()
    rank.responder.stop(LIMIT_S)
    assert not rank.responder.is_alive()
    rank.publisher.close()
    rank.reader.close()
    rank.context.term()


def test_stop_now_ends_the_process(directory: RunDirectory, exits: list[int]) -> None:
    """At once, whatever the loop does."""
    rank = Rank(directory)
    rank.start()
    rank.publisher.control(Kind.STOP_NOW)
    rank.responder.join(LIMIT_S)
    assert exits[0] == EXIT_STOPPED_NOW
    os.close(rank.responder._wake)
    rank.close()


def test_an_error_of_the_thread_ends_the_process(
    directory: RunDirectory, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without its responder would look alive."""
    rank = Rank(directory)
    rank.start()

    def fail() -> None:
        raise LookupError

    monkeypatch.setattr(rank.responder, "_answer", fail)
    rank.publisher.control(Kind.HEARTBEAT)
    rank.responder.join(LIMIT_S)
    assert exits == [EXIT_RESPONDER_FAILED]
    os.close(rank.responder._wake)
    rank.close()


def test_no_call_of_a_driver_on_another_host_is_missed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor calls once: what comes while the thread reads, or after a call for nothing, is read as well."""
    monkeypatch.setattr(CurveSocket, "look_interval_s", LIMIT_S * 10)  # else a missed call would be made good
    rank = Rank(directory, far=True)
    rank.start()
    for count in (1, 2, 3) * 20:
        for _ in range(count):
            rank.publisher.control(Kind.HEARTBEAT)
        for _ in range(count):
            rank.hear(Kind.ALIVE)
    rank.close()


def test_a_driver_on_another_host_that_stays_away_ends_the_process(
    directory: RunDirectory, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death watch is over this host: that the link is gone for long is all that a rank can know."""
    monkeypatch.setattr(CurveSocket, "look_interval_s", 0.05)
    monkeypatch.setattr(responder_module, "RECONNECT_TIMEOUT_S", 0.2)
    rank = Rank(directory, far=True)
    rank.start()
    rank.publisher.close()
    rank.responder.join(LIMIT_S)
    assert exits[0] == EXIT_LINK_LOST
    os.close(rank.responder._wake)
    rank.close()


@pytest.fixture
def new_driver() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that wait for the end of their stdin."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "no pidfd"])
def test_the_death_of_the_driver_ends_the_process(
    directory: RunDirectory,
    exits: list[int],
    new_driver: Callable[[], subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    pidfd: bool,
) -> None:
    """Through its pidfd, or by looking again and again where the kernel has none."""
    driver = new_driver()
    start_time = process_start_time(driver.pid)
    assert start_time is not None
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", lambda _: (_ for _ in ()).throw(OSError()))
    rank = Rank(directory, DriverWatch(driver.pid, start_time))
    rank.start()
    assert rank.responder.is_alive()
    driver.kill()
    if not pidfd:
        driver.wait()
    rank.responder.join(LIMIT_S)
    assert exits[0] == EXIT_DRIVER_GONE
    os.close(rank.responder._wake)
    rank.close()
