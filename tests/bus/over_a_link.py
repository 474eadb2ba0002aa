"""A driver and a rank, each a process in a network of its own: run by test_link_cut.py, never imported."""

from __future__ import annotations

import sys
from time import monotonic

import zmq

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.frames import NO_TIMES, Kind
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import ReplyReader
from stepcast.bus.reply_sender import ReplySender
from stepcast.bus.subscriber import Message, StepSubscriber

RUN_ID = bytes(16)
LIMIT_S = 30.0
PAYLOAD = bytes(100_000)


def say(*words: object) -> None:
    print(*words, flush=True)


def drive(address: str, steps: int) -> None:
    """Greet one rank, then publish a step for each line that comes, when the one before was answered."""
    directory = RunDirectory()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, address)
    publisher = Publisher(
        context,
        directory.endpoint("publish"),
        run_id=RUN_ID,
        epoch=1,
        world_size=1,
        max_in_flight=4,
        max_in_flight_bytes=1 << 24,
        gate=gate,
    )
    reader = ReplyReader(
        context,
        directory.endpoint("replies"),
        run_id=RUN_ID,
        epoch=1,
        world_size=1,
        max_message_bytes=1 << 20,
        gate=gate,
    )
    say(publisher.tcp_endpoint, reader.tcp_endpoint, gate.public_key.decode())
    gate.admit(0, sys.stdin.readline().strip().encode())
    deadline = monotonic() + LIMIT_S
    greeted = False
    while not greeted and monotonic() < deadline:
        publisher.control(Kind.PROBE)
        greeted = any(reply.header.kind == Kind.HELLO for reply in reader.receive(0.05))
    for step in range(1, steps + 1):
        sys.stdin.readline()
        publisher.publish(Kind.STEP, step, [PAYLOAD], len(PAYLOAD))
        replies = reader.receive(LIMIT_S)
        assert [reply.header.sequence for reply in replies] == [step], replies
        publisher.acknowledge(0, step)
        say("answered", step)
    say("lost nothing" if not (publisher.replayed or reader.dropped or gate.refused) else "lost something")
    publisher.close()
    reader.close()
    gate.close()
    context.term()
    directory.remove()


def follow(steps: int) -> None:
    """Be the rank; what is missing ends it."""
    own = KeyPair.make()
    say(own.public.decode())
    publish_endpoint, reply_endpoint, server = sys.stdin.readline().split()
    keys = RankKeys.of(server.encode(), own)
    replies = ReplySender(
        reply_endpoint, run_id=RUN_ID, epoch=1, rank=0, timeout_s=LIMIT_S, reconnect_timeout_s=0.0, keys=keys
    )
    stream = StepSubscriber(publish_endpoint, run_id=RUN_ID, epoch=1, max_message_bytes=1 << 20, keys=keys)
    assert stream.wait_for_probe(LIMIT_S)
    replies.send(Kind.HELLO)
    taken = 0
    while taken < steps:
        item = stream.next()
        if item is not None:
            assert isinstance(item, Message), item
            taken += 1
            replies.send(Kind.RESULT, item.header.sequence, item.header.step, times=NO_TIMES)
    stream.close()
    replies.close()
    say("took all")


if __name__ == "__main__":
    if sys.argv[1] == "driver":
        drive(sys.argv[2], int(sys.argv[3]))
    else:
        follow(int(sys.argv[2]))
