"""Peers that don't belong to the group, on its sockets: it counts what they say, executes none of it, and goes on."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from stepcast.bus.frames import NO_TIMES, Kind, Wire, pack_times
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.testing.chaos import HANG_S, NO_ERROR
from stepcast.runtime.testing.stage import RankScenario, Stage

_STEPS = 50


class _Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self._crater = crater

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._crater),)


@contextlib.contextmanager
def _stray(stage: Stage, kind: int, name: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket of a stray, connected to one of the group's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(kind) as stray:
            stray.connect(f"ipc://{_directory(stage) / name}")
            yield stray
    finally:
        context.destroy(linger=0)


def _directory(stage: Stage) -> Path:
    (directory,) = Path(str(stage.group.config.run_dir)).glob("stepcast-*")
    return directory


def _foreign(messages: Callable[[Path], list[list[bytes]]]) -> Callable[[Stage], None]:
    """Messages on the endpoint of the replies, between the ranks' own."""

    def run(stage: Stage) -> None:
        crater = _directory(stage).parent / "crater"
        told = messages(crater)
        with _stray(stage, zmq.PUSH, "replies") as stray:
            stage.fault(lambda: None)
            for message in told:
                stray.send_multipart(message)
                stage.run(1)
            _await_dropped(stage, len(told))
        stage.run()
        if crater.exists():
            raise AssertionError("what a stray has sent was executed")

    return run


def _await_dropped(stage: Stage, count: int) -> None:
    deadline = time.monotonic() + HANG_S
    while (dropped := dict(stage.group.executor.health().dropped)).get("foreign", 0) != count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} messages of a stray were not counted: {dropped}")
        stage.run(1)


def _garbage(_: Path) -> list[list[bytes]]:
    return [[b"garbage"], [b"\x80" * 500], [os.urandom(64), b"", b"more"]]


def _bombs(crater: Path) -> list[list[bytes]]:
    bomb = pickle.dumps(_Bomb(crater))
    return [[bomb], [bomb, bomb], [Wire(bytes(16), 1).pack(Kind.RESULT, 1, 1, 0) + bomb]]


def _answers_of_another_run(_: Path) -> list[list[bytes]]:
    return [[Wire(bytes(16), 1).pack(Kind.RESULT, number, number, 0) + pack_times(NO_TIMES)] for number in range(1, 9)]


def _subscribe_and_never_read(stage: Stage) -> None:
    with _stray(stage, zmq.SUB, "publish") as stray:
        stray.setsockopt(zmq.RCVHWM, 1)
        stray.setsockopt(zmq.SUBSCRIBE, b"")
        stage.fault(lambda: None)
        for _ in range(_STEPS):
            stage.run(4)


def _speak_no_zeromq(stage: Stage) -> None:
    """Noise, half a greeting, and connections that are only held."""
    with contextlib.ExitStack() as peers:
        stage.fault(lambda: None)
        for name in ("publish", "replies"):
            for greeting in (b"", b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
                peer = peers.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(str(_directory(stage) / name))
                peer.sendall(greeting)
                stage.run()


SCENARIOS = tuple(
    RankScenario(name, NO_ERROR, act, verdict=Verdict.IDLE)
    for name, act in (
        ("stray-garbage", _foreign(_garbage)),
        ("stray-pickle-bomb", _foreign(_bombs)),
        ("stray-of-another-run", _foreign(_answers_of_another_run)),
        ("stray-subscriber", _subscribe_and_never_read),
        ("stray-that-speaks-no-zeromq", _speak_no_zeromq),
    )
)
