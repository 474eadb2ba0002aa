"""The step stream as a whole, over a transport that loses, repeats, delays and cuts, and past restarts of the group.

No rank skips or repeats a message, and what an earlier epoch has sent is dropped and counted on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepcast.bus import subscriber
from stepcast.bus.frames import NO_TIMES, Kind, Wire, pack_times
from stepcast.bus.liveness import TailGap
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from stepcast.bus.subscriber import Gap, StepSubscriber
from tests.bus.rig import RUN_ID

WORLD_SIZE = 3
WINDOW = 5
WINDOW_BYTES = 60
#: Messages that a rank's connection holds before the publisher is refused: fewer than the window, to have refusals.
PIPE = 4
ENOUGH_ROUNDS = 60

ranks = st.integers(0, WORLD_SIZE - 1)


# --- A transport ----------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """What is on its way to one rank: each message with the epoch that has sent it."""

    messages: deque[tuple[int, list[bytes]]] = field(default_factory=deque)
    up: bool = True

    @property
    def is_full(self) -> bool:
        return len(self.messages) >= PIPE


class LossyPublisher(Publisher):
    """A publisher whose messages go to the connections: to all of them, or to none where one is full."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], connections: Sequence[Connection], epoch: int) -> None:
        super().__init__(
            context,
            "inproc://publish",
            run_id=RUN_ID,
            epoch=epoch,
            world_size=WORLD_SIZE,
            max_in_flight=WINDOW,
            max_in_flight_bytes=WINDOW_BYTES,
        )
        self._connections = connections
        self._epoch = epoch

    def _send(self, header: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        open_connections = [each for each in self._connections if each.up]
        if any(each.is_full for each in open_connections):
            return False
        head, *buffers = frames
        for each in open_connections:
            each.messages.append((self._epoch, [header + head, *map(bytes, buffers)]))
        return True


class FakeSocket:
    """A SUB that receives the message at the head of its connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parts: deque[bytes] = deque()

    def subscribe(self, topic: bytes) -> None:
        pass

    def recv(self) -> bytes:
        self._parts.extend(self._connection.messages.popleft()[1])
        return self._parts.popleft()

    def recv_rest(self) -> list[memoryview]:
        parts, self._parts = self._parts, deque()
        return [memoryview(part) for part in parts]


# --- Driver and ranks -----------------------------------------------------------------------------------------------


class Rank:
    """A rank's loop and responder, as far as the stream goes: take, answer, ask for what is missing."""

    def __init__(self, connection: Connection, epoch: int) -> None:
        self.connection = connection
        self.epoch = epoch
        self.stale = 0
        socket = FakeSocket(self.connection)
        with patch.object(subscriber, "connect", lambda *_, **__: socket):
            self.steps = StepSubscriber("", run_id=RUN_ID, epoch=epoch, max_message_bytes=1000)
        self.taken: list[tuple[int, list[bytes]]] = []
        self.loop_says: deque[tuple[Kind, int]] = deque()
        self.responder_says: deque[tuple[Kind, int]] = deque()
        self._asked_for = 0
        self._tail = TailGap()

    def receive(self) -> None:
        """Take what is at the head of the connection."""
        self.stale += self.connection.messages[0][0] != self.epoch
        item = self.steps.next()
        if isinstance(item, Gap):
            assert item.expected == len(self.taken) + 1
            assert item.got > item.expected
            if item.expected != self._asked_for:
                self._asked_for = item.expected
                self.loop_says.append((Kind.GAP, item.expected))
        elif item is not None:
            self.taken.append((item.header.sequence, [bytes(frame) for frame in item.frames]))
            self.loop_says.append((Kind.RESULT, item.header.sequence))

    def heartbeat(self, highest: int) -> None:
        """Receive a heartbeat; the loop is idle, since it takes a message the moment it receives it."""
        if self._tail.heartbeat(highest, self.steps.sequence, idle=True):
            self.responder_says.append((Kind.GAP, self.steps.sequence + 1))


class StreamMachine(RuleBasedStateMachine):
    """A driver and its ranks. Replies travel safely, steps and heartbeats do not."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        #: What ranks of earlier epochs have said, and is still on its way.
        self.late: list[tuple[Wire, int, Kind, int]] = []
        self.begin([Connection() for _ in range(WORLD_SIZE)])

    def begin(self, connections: Sequence[Connection]) -> None:
        self.epoch += 1
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.wire = Wire(RUN_ID, self.epoch)
        self.ranks = [Rank(connection, self.epoch) for connection in connections]
        self.publisher = LossyPublisher(self.context, connections, self.epoch)
        self.reader = ReplyReader(
            self.context,
            "inproc://replies",
            run_id=RUN_ID,
            epoch=self.epoch,
            world_size=WORLD_SIZE,
            max_message_bytes=1000,
        )
        self.published: list[list[bytes]] = []
        self.acknowledged = [0] * WORLD_SIZE
        self.came_late = 0

    @rule(lost=st.sets(ranks))
    def restart(self, lost: set[int]) -> None:
        """All is new but the connections: what is on its way to some ranks, and from all, still arrives."""
        for index, rank in enumerate(self.ranks):
            self.late += [(self.wire, index, *said) for said in (*rank.loop_says, *rank.responder_says)]
            if index in lost:
                rank.connection.messages.clear()
        self.close()
        self.begin([rank.connection for rank in self.ranks])

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def read_late_reply(self, data: st.DataObject) -> None:
        """One of an earlier epoch: it means nothing any more, be it an answer or a request."""
        wire, index, kind, sequence = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        self.came_late += 1
        assert self.judge(wire, index, kind, sequence) is None
        assert self.reader.dropped == {"epoch": self.came_late}

    def judge(self, wire: Wire, index: int, kind: Kind, sequence: int) -> tuple[int, int, int] | None:
        """Have the driver judge a reply: its rank, kind and message, or None where it is dropped."""
        times = pack_times(NO_TIMES) if kind is Kind.RESULT else b""
        reply = self.reader._judge(wire.pack(kind, sequence, sequence, index) + times)
        return None if reply is None else (reply.header.rank, reply.header.kind, reply.header.sequence)

    # The driver.

    @rule(sizes=st.lists(st.integers(0, 15), min_size=1, max_size=3))
    def publish(self, sizes: list[int]) -> None:
        number = len(self.published) + 1
        frames = [bytes([number % 256]) * size for size in sizes]
        unanswered = self.published[min(self.acknowledged) :]
        has_credit = (
            len(unanswered) < WINDOW and sum(len(b"".join(each)) for each in unanswered) + sum(sizes) <= WINDOW_BYTES
        )
        assert self.publisher.has_credit(sum(sizes)) == has_credit
        if not has_credit:
            return
        is_full = any(rank.connection.up and rank.connection.is_full for rank in self.ranks)
        sequence = self.publisher.publish(Kind.STEP, number, frames, sum(sizes))
        assert sequence == (None if is_full else number)
        if sequence is not None:
            self.published.append(frames)

    @rule(index=ranks, of_responder=st.booleans())
    def read_reply(self, index: int, of_responder: bool) -> None:
        """Read a reply. Those of a rank's loop and of its responder come over sockets of their own, in any order."""
        rank = self.ranks[index]
        says = rank.responder_says if of_responder else rank.loop_says
        if not says:
            return
        kind, sequence = says.popleft()
        assert self.judge(self.wire, index, kind, sequence) == (index, kind, sequence)
        if kind == Kind.RESULT:
            self.acknowledged[index] = sequence
            self.publisher.acknowledge(index, sequence)
        elif sequence > self.publisher.acknowledged(index):  # else the other socket was faster: it is no longer missing
            self.publisher.replay(sequence)

    @rule(lost=st.sets(ranks))
    def heartbeat(self, lost: set[int]) -> None:
        for index, rank in enumerate(self.ranks):
            if index not in lost:
                rank.heartbeat(self.publisher.sequence)

    # The ranks.

    @rule(index=ranks, count=st.integers(1, PIPE))
    def receive(self, index: int, count: int) -> None:
        rank = self.ranks[index]
        for _ in range(min(count, len(rank.connection.messages))):
            rank.receive()

    # The transport.

    @rule(index=ranks, position=st.integers(0, PIPE))
    def lose(self, index: int, position: int) -> None:
        messages = self.ranks[index].connection.messages
        if position < len(messages):
            del messages[position]

    @rule(index=ranks, position=st.integers(0, PIPE))
    def repeat(self, index: int, position: int) -> None:
        messages = self.ranks[index].connection.messages
        if position < len(messages):
            messages.insert(position, messages[position])

    @rule(index=ranks, position=st.integers(0, PIPE), by=st.integers(1, PIPE))
    def delay(self, index: int, position: int, by: int) -> None:
        """Others overtake it."""
        messages = self.ranks[index].connection.messages
        if position < len(messages):
            late = messages[position]
            del messages[position]
            messages.insert(position + by, late)

    @rule(index=ranks)
    def cut(self, index: int) -> None:
        connection = self.ranks[index].connection
        connection.up = False
        connection.messages.clear()

    @precondition(lambda self: not all(rank.connection.up for rank in self.ranks))
    @rule()
    def mend(self) -> None:
        for rank in self.ranks:
            rank.connection.up = True

    # What always holds.

    @invariant()
    def every_rank_has_the_stream_from_its_beginning(self) -> None:
        for rank in self.ranks:
            assert [sequence for sequence, _ in rank.taken] == [*range(1, len(rank.taken) + 1)]
            assert [frames for _, frames in rank.taken] == self.published[: len(rank.taken)]
            assert rank.steps.sequence == len(rank.taken)

    @invariant()
    def what_another_epoch_has_sent_is_dropped_and_counted(self) -> None:
        assert [rank.steps.foreign for rank in self.ranks] == [rank.stale for rank in self.ranks]

    @invariant()
    def the_windows_are_never_exceeded(self) -> None:
        unanswered = self.published[min(self.acknowledged) :]
        assert self.publisher.in_flight == len(unanswered) <= WINDOW
        assert self.publisher.in_flight_bytes == sum(len(b"".join(each)) for each in unanswered) <= WINDOW_BYTES

    @invariant()
    def the_publisher_knows_who_is_slow(self) -> None:
        lowest = min(self.acknowledged)
        slow = (
            [] if lowest == len(self.published) else [i for i, each in enumerate(self.acknowledged) if each == lowest]
        )
        assert self.publisher.slow_ranks() == slow

    def teardown(self) -> None:
        try:
            self.everything_arrives_in_the_end()
        finally:
            self.close()

    def close(self) -> None:
        self.publisher.close()
        self.reader.close()
        self.context.term()

    def everything_arrives_in_the_end(self) -> None:
        """Over connections that work, replies and heartbeats alone bring every message to every rank."""
        self.mend_all()
        for _ in range(ENOUGH_ROUNDS):
            self.heartbeat(set())
            for index, rank in enumerate(self.ranks):
                self.receive(index, len(rank.connection.messages))
                while rank.loop_says or rank.responder_says:
                    self.read_reply(index, of_responder=not rank.loop_says)
            if not self.publisher.in_flight:
                break
        assert [len(rank.taken) for rank in self.ranks] == [len(self.published)] * WORLD_SIZE
        assert (self.publisher.in_flight, self.publisher.in_flight_bytes) == (0, 0)
        self.every_rank_has_the_stream_from_its_beginning()

    def mend_all(self) -> None:
        for rank in self.ranks:
            rank.connection.up = True


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
