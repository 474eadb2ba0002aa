"""The life of a worker's process, from its first line to its exit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import zmq

from stepcast.bus import codec
from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.frames import Kind
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from stepcast.runtime.launch import mp
from stepcast.runtime.launch.process import WorkerProcess
from stepcast.workers.boot import EXIT_FAILED
from stepcast.workers.boot_config import BootConfig
from stepcast.workers.death_watch import process_start_time
from stepcast.workers.responder import EXIT_DRIVER_GONE
from tests.harness import wait_until

LIMIT_S = 30.0


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    made = RunDirectory()
    yield made
    made.remove()


def boot_config(directory: RunDirectory, **changes: Any) -> BootConfig:
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    settings: dict[str, Any] = {
        "rank": 1,
        "local_rank": 1,
        "local_world_size": 2,
        "own_process": True,
        "world_size": 2,
        "epoch": 1,
        "output_rank": 0,
        "device": "cpu",
        "device_class": "stepcast.workers.devices.cpu:CPU",
        "rendezvous": "file:///nowhere",
        "collective_timeout_s": 10.0,
        "worker": "stepcast.workers.echo:Echo",
        "run_id": bytes(16),
        "publish_endpoint": directory.endpoint("publish"),
        "reply_endpoint": directory.endpoint("replies"),
        "max_message_bytes": 1000,
        "driver_pid": os.getpid(),
        "driver_start_time": start_time,
        "die_with_driver": True,
        "startup_timeout_s": 0.1,
        "reply_timeout_s": 1.0,
        "resume_timeout_s": 1.0,
        "linger_s": 0.1,
        "log_level": "INFO",
        "check_collectives": True,
        "keepalive": "bus",
        "arguments": ["script.py", "--flag"],
    }
    return BootConfig(**{**settings, **changes})


def run_to_its_end(boot: BootConfig) -> tuple[int, str]:
    """Spawn a rank and wait for its end. Returns its exit code and what it wrote to stderr."""
    process: WorkerProcess = mp.spawn(boot, os.environ)
    try:
        code = wait_until(lambda: (process.exit_code(),) if process.exit_code() is not None else None, LIMIT_S)[0]
        return code, process.outputs[1].read().decode()
    finally:
        for output in process.outputs:
            output.close()
        process.close()


def test_a_boot_configuration_survives_its_way(directory: RunDirectory) -> None:
    """Every field, with options of any plain kind, and with paths that are no text."""
    options = {"a": [1, 2.5, None, b"\0", {"b": True}], "numbers": {1: "one", -2: [3]}}
    paths = {"worker": "/tmp/\udcff/script.py:Mine", "arguments": ["\udcfe"], "run_id": bytes(range(16))}
    for curve in (None, RankKeys(b"server", b"public", b"secret")):
        boot = boot_config(directory, options=options, curve=curve, **paths)
        again = BootConfig.from_bytes(boot.to_bytes())
        assert again == boot
    assert {each.name for each in fields(BootConfig)} == set(asdict(again))


def test_a_boot_configuration_shows_no_key(directory: RunDirectory) -> None:
    """Not in its repr, which may end up in a log."""
    assert "hush-hush" not in repr(boot_config(directory, curve=RankKeys(b"server", b"public", b"hush-hush")))


def test_every_field_of_the_boot_configuration_is_documented() -> None:
    """By its name, in the class's docstring."""
    text = BootConfig.__doc__ or ""
    for each in fields(BootConfig):
        assert each.name in text


def test_a_rank_whose_driver_is_dead_already_ends_at_once(directory: RunDirectory) -> None:
    """Its id is somebody else's by now: the start time tells. Nothing of the worker's is imported."""
    code, stderr = run_to_its_end(boot_config(directory, driver_start_time=1, worker="no_such_module:Class"))
    assert (code, stderr) == (EXIT_DRIVER_GONE, "")


@pytest.fixture
def silent_driver(directory: RunDirectory) -> Iterator[None]:
    """Sockets of a driver that says nothing."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as steps, context.socket(zmq.PULL) as replies:
        steps.bind(directory.endpoint("publish"))
        replies.bind(directory.endpoint("replies"))
        yield


def logged(stderr: str) -> dict[str, Any]:
    """The one record that a rank has logged."""
    line, rest = stderr.split("\n")  # not splitlines, which takes the separator for an end
    assert (line[0], rest) == ("\x1e", "")
    record: dict[str, Any] = json.loads(line[1:])
    assert (record["level"], record["logger"]) == ("error", "stepcast.worker")
    assert (record["rank"], record["epoch"], record["step"]) == (1, 1, 0)
    return record


@pytest.mark.usefixtures("silent_driver")
def test_a_rank_that_hears_no_driver_says_so_and_ends(directory: RunDirectory) -> None:
    """Its line is a log record, with its place."""
    code, stderr = run_to_its_end(boot_config(directory))
    assert code == EXIT_FAILED
    assert logged(stderr)["event"] == "no handshake from the driver within startup_timeout_s=0.1"


def test_a_rank_that_reaches_no_driver_says_so_and_ends(directory: RunDirectory) -> None:
    """Its line names the endpoint."""
    code, stderr = run_to_its_end(boot_config(directory))
    assert code == EXIT_FAILED
    event = logged(stderr)["event"]
    assert event.startswith(f"rank 1 can't reach the driver at {directory.endpoint('replies')}: ")


def test_a_rank_of_another_host_lives_over_tcp(directory: RunDirectory) -> None:
    """From its handshake to its last word, with a key of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run: dict[str, Any] = {"run_id": bytes(16), "epoch": 1, "world_size": 1}
    gate = Gate(context)
    publisher = Publisher(
        context, directory.endpoint("publish"), max_in_flight=4, max_in_flight_bytes=1000, gate=gate, **run
    )
    reader = ReplyReader(context, directory.endpoint("replies"), max_message_bytes=1000, gate=gate, **run)
    curve = RankKeys.of(gate.public_key, KeyPair.make())
    gate.admit(0, curve.public)
    said: list[int] = []

    def has_said(kind: Kind, count: int = 1) -> bool:
        said.extend(reply.header.kind for reply in reader.receive(0.02))
        if kind is Kind.HELLO:
            publisher.control(Kind.PROBE)
        publisher.drain_subscriptions()
        return said.count(kind) >= count

    process = mp.spawn(
        boot_config(
            directory,
            rank=0,
            world_size=1,
            publish_endpoint=publisher.tcp_endpoint,
            reply_endpoint=reader.tcp_endpoint,
            startup_timeout_s=LIMIT_S,
            linger_s=LIMIT_S,
            curve=curve,
        ),
        os.environ,
    )
    try:
        wait_until(lambda: has_said(Kind.HELLO, 2) and has_said(Kind.READY, 3), LIMIT_S, lambda: str(said))
        assert publisher.present == {0}
        for step in range(1, 4):
            frames = codec.encode({"number": step})
            publisher.publish(Kind.STEP, step, frames, sum(map(len, frames)))
            wait_until(lambda step=step: has_said(Kind.RESULT, step), LIMIT_S)
        publisher.publish(Kind.STOP, 0, (), 0)
        wait_until(lambda: has_said(Kind.BYE), LIMIT_S)
        wait_until(lambda: process.exit_code() is not None, LIMIT_S)
        assert process.exit_code() == 0, process.outputs[1].read()
        wait_until(lambda: has_said(Kind.BYE) and not publisher.present, LIMIT_S)
        assert not reader.dropped
        assert not gate.refused
    finally:
        process.send_signal(9)  # type: ignore[arg-type]
        for output in process.outputs:
            output.close()
        process.close()
        publisher.close()
        reader.close()
        gate.close()
        context.term()


def test_nothing_of_the_boot_configuration_shows_in_the_process_list(directory: RunDirectory) -> None:
    """Options may be secret; the command line is for everybody to read."""
    boot = boot_config(directory, options={"password": "hush-hush"}, startup_timeout_s=LIMIT_S)
    process = mp.spawn(boot, {**os.environ, "EXTRA": "1"})
    try:
        shown = wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        assert b"stepcast.workers.boot" in shown
        assert b"hush-hush" not in shown
        assert directory.endpoint("publish").encode() not in shown
    finally:
        process.send_signal(9)  # type: ignore[arg-type]
        process.wait()
        for output in process.outputs:
            output.close()
        process.close()
