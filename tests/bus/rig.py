"""What the bus's tests share: the sockets of one run, and a link between two of them that can be cut and stalled."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import zmq

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.frames import STEP_CLASS, Kind, Wire
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import Reply, ReplyReader
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.subscriber import ControlSubscriber, Gap, Message, StepSubscriber
from tests.harness import wait_until

RUN_ID = bytes(range(100, 116))
EPOCH = 1
WIRE = Wire(RUN_ID, EPOCH)
#: The longest that anything here may take.
LIMIT_S = 4.0
LIMIT_MS = int(LIMIT_S * 1000)

_CHUNK_BYTES = 1 << 16

Made = TypeVar("Made")


class Rig:
    """Makes the sockets of one run, and closes them.

    Args:
        context: the ZeroMQ context.
        directory: the run directory.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: RunDirectory) -> None:
        self.context = context
        self.directory = directory
        self._made: list[Any] = []

    def gate(self, address: str = "127.0.0.1") -> Gate:
        """Make a gate for the driver's sockets."""
        return self._keep(Gate(self.context, address))

    def publisher(
        self,
        *,
        world_size: int = 1,
        window: int = 8,
        window_bytes: int = 1 << 30,
        name: str = "publish",
        gate: Gate | None = None,
    ) -> Publisher:
        """Bind a driver's publisher."""
        return self._keep(
            Publisher(
                self.context,
                self.directory.endpoint(name),
                run_id=RUN_ID,
                epoch=EPOCH,
                world_size=world_size,
                max_in_flight=window,
                max_in_flight_bytes=window_bytes,
                gate=gate,
            )
        )

    def steps(
        self, endpoint: str | None = None, *, max_message_bytes: int = 1 << 26, keys: RankKeys | None = None
    ) -> StepSubscriber:
        """Connect a rank's step socket."""
        return self._keep(
            StepSubscriber(
                endpoint or self.directory.endpoint("publish"),
                run_id=RUN_ID,
                epoch=EPOCH,
                max_message_bytes=max_message_bytes,
                keys=keys,
            )
        )

    def control(
        self, endpoint: str | None = None, *, presence_of: int | None = None, keys: RankKeys | None = None
    ) -> ControlSubscriber:
        """Connect a rank's control socket."""
        endpoint = endpoint or self.directory.endpoint("publish")
        return self._keep(ControlSubscriber(endpoint, run_id=RUN_ID, epoch=EPOCH, presence_of=presence_of, keys=keys))

    def reader(self, *, world_size: int = 2, max_message_bytes: int = 1 << 26, gate: Gate | None = None) -> ReplyReader:
        """Bind a driver's reply socket."""
        return self._keep(
            ReplyReader(
                self.context,
                self.directory.endpoint("replies"),
                run_id=RUN_ID,
                epoch=EPOCH,
                world_size=world_size,
                max_message_bytes=max_message_bytes,
                gate=gate,
            )
        )

    def sender(
        self,
        rank: int = 0,
        *,
        endpoint: str | None = None,
        timeout_s: float = LIMIT_S,
        reconnect_timeout_s: float = LIMIT_S,
        keys: RankKeys | None = None,
    ) -> ReplySender:
        """Connect a rank's reply socket."""
        return self._keep(
            ReplySender(
                endpoint or self.directory.endpoint("replies"),
                run_id=RUN_ID,
                epoch=EPOCH,
                rank=rank,
                timeout_s=timeout_s,
                reconnect_timeout_s=reconnect_timeout_s,
                keys=keys,
            )
        )

    def raw(self, kind: int) -> zmq.Socket[bytes]:
        """Make a plain ZeroMQ socket, which gives up after a while."""
        socket = self._keep(self.context.socket(kind))
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            socket.setsockopt(option, LIMIT_MS)
        return socket

    def link(self, name: str, *, to: str = "publish") -> Link:
        """Make a link to the publisher, or to another socket."""
        path = self.directory.path
        return self._keep(Link(path / name, path / to))

    def tcp_link(self, target: str | None) -> TcpLink:
        """Make a link to a socket that is bound on tcp."""
        assert target is not None
        return self._keep(TcpLink(target))

    def close(self) -> None:
        """Close all that was made."""
        for each in self._made:
            each.close()

    def _keep(self, made: Made) -> Made:
        self._made.append(made)
        return made


class Link:
    """A unix socket between a rank's socket and a driver's.

    Args:
        path: where the rank connects.
        target: where the driver is bound.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._allowed = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()
        self.resume()
        self.mend()

    def cut(self) -> None:
        """Drop the connection, with all that is on its way, and accept no other."""
        self._run(self._cut())

    def mend(self) -> None:
        """Accept connections again."""
        self._run(self._mend())

    @property
    def stalled(self) -> bool:
        """Whether it carries nothing now."""
        return not self._flowing.is_set()

    def stall(self, after_bytes: int = 0) -> None:
        """Stop carrying what the publisher sends, as a frozen process stops reading it.

        Args:
            after_bytes: what it still carries.
        """
        self._loop.call_soon_threadsafe(self._allow, after_bytes)

    def resume(self) -> None:
        """Carry on."""
        self._loop.call_soon_threadsafe(self._allow, sys.maxsize)

    def close(self) -> None:
        """End the thread."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def _allow(self, count: int) -> None:
        self._allowed = count
        if count:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _mend(self) -> None:
        self._server = await self._listen()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, self._path)

    def _forget(self) -> None:
        self._path.unlink(missing_ok=True)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._target)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._forget()
        pumps = tuple(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the loop's next turn

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            target_reader, target_writer = await self._dial()
            try:
                await asyncio.gather(self._up(reader, target_writer), self._down(target_reader, writer))
            finally:
                target_writer.transport.abort()
        writer.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            while data:
                await self._flowing.wait()
                part, data = data[: self._allowed], data[self._allowed :]
                writer.write(part)
                await writer.drain()
                self._allow(self._allowed - len(part))
        raise ConnectionResetError


class TcpLink(Link):
    """The same, over tcp.

    Args:
        target: where the driver is bound.
    """

    def __init__(self, target: str) -> None:
        self._port = 0
        self._target_port = int(target.rpartition(":")[2])
        super().__init__(Path(), Path())
        self.endpoint = f"tcp://127.0.0.1:{self._port}"

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        return server

    def _forget(self) -> None:
        """Nothing is left of a port."""

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._target_port)


def admitted(gate: Gate, rank: int) -> RankKeys:
    """Make a rank's keys, and have the driver's gate let them in."""
    keys = RankKeys.of(gate.public_key, KeyPair.make())
    gate.admit(rank, keys.public)
    return keys


def greet(publisher: Publisher, *subscribers: StepSubscriber | ControlSubscriber) -> None:
    """Publish PROBE until each subscriber has received it, as the monitor does until it has each HELLO."""
    waiting = list(subscribers)

    def all_greeted() -> bool:
        publisher.control(Kind.PROBE)
        waiting[:] = [each for each in waiting if not each.wait_for_probe(0.01)]
        return not waiting

    wait_until(all_greeted, LIMIT_S, lambda: f"PROBE to reach {len(waiting)} subscribers")


def reconnected(publisher: Publisher, subscriber: StepSubscriber) -> None:
    """Have a subscriber find out that its connection has ended, and wait until it has subscribed again."""
    assert take(subscriber) is None
    wait_for_subscription(publisher, STEP_CLASS)


def wait_for_subscription(publisher: Publisher, message_class: bytes) -> None:
    """Wait until a subscription to a class has come, and forget what came before it."""

    def has_come() -> bool:
        while publisher._socket.poll(0):
            if publisher._socket.recv() == b"\1" + message_class:
                return True
        return False

    wait_until(has_come, LIMIT_S, f"a subscription to {message_class!r}")


def take(subscriber: StepSubscriber) -> Message | Gap | None:
    """Take what comes next, which must come soon."""
    assert subscriber.socket.poll(LIMIT_S), "nothing came"
    return subscriber.next()


def take_message(subscriber: StepSubscriber) -> Message:
    """Take the next message of the stream, past what is dropped; a gap fails."""
    while (item := take(subscriber)) is None:
        pass
    assert isinstance(item, Message), item
    return item


def take_past_gaps(subscriber: StepSubscriber, count: int) -> list[int]:
    """Take messages past any gaps, and return their sequence numbers."""
    sequences: list[int] = []
    while len(sequences) < count:
        item = take(subscriber)
        if isinstance(item, Message):
            sequences.append(item.header.sequence)
    return sequences


def take_sequences(subscriber: StepSubscriber, count: int) -> list[int]:
    """Take messages, and return their sequence numbers."""
    return [take_message(subscriber).header.sequence for _ in range(count)]


def heartbeat(publisher: Publisher, control: ControlSubscriber) -> int:
    """Publish a heartbeat, and return the sequence number that the rank receives with it."""
    assert publisher.control(Kind.HEARTBEAT)
    while True:
        assert control.socket.poll(LIMIT_S), "nothing came"
        message = control.receive()
        if message is not None and message.header.kind == Kind.HEARTBEAT:
            return message.header.sequence


def take_control(subscriber: ControlSubscriber) -> int:
    """Take the next control message past any PROBE, and return its kind."""
    while True:
        assert subscriber.socket.poll(LIMIT_S), "nothing came"
        message = subscriber.receive()
        if message is not None and message.header.kind != Kind.PROBE:
            return message.header.kind


def lose(subscriber: StepSubscriber) -> bytes:
    """Receive a message past the subscriber, which thereby never sees it; return its head."""
    assert subscriber.socket.poll(LIMIT_S), "nothing came"
    head = subscriber.socket.recv()
    subscriber.socket.recv_rest()
    return bytes(head)


def read(reader: ReplyReader) -> Reply:
    """Read the next reply, which must come soon."""
    return wait_until(reader.read, LIMIT_S, "a reply")


@contextlib.contextmanager
def meanwhile(work: Callable[[], Made]) -> Iterator[Future[Made]]:
    """Run something in another thread during the block, as a rank reads while the driver publishes; it must end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        yield running
        running.result(LIMIT_S)


def publish(publisher: Publisher, *frames: bytes | memoryview, kind: int = Kind.STEP, step: int = 1) -> int | None:
    """Publish a step-class message."""
    return publisher.publish(kind, step, frames, sum(map(len, frames)))
