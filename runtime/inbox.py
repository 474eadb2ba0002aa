"""What the ranks' messages mean to the driver: reply by reply, into the tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgpack

from stepcast.bus import codec
from stepcast.bus.errors import ProtocolError
from stepcast.bus.frames import Flag, Kind
from stepcast.bus.liveness import Phase, RankLiveness, TailGap
from stepcast.bus.publisher import Publisher
from stepcast.bus.replies import Reply

from .pending import PendingTable

_RESULT = int(Kind.RESULT)
_IDLE = Phase.IDLE
_IDLE_PHASES = (Phase.IDLE, Phase.PARKED)
#: What a rank does with a message.
_PHASE_OF = {int(Kind.STEP): Phase.STEP, int(Kind.CALL): Phase.CALL, int(Kind.STOP): Phase.STOPPING}

#: An answer may be on its way for that long, over a socket of its own, after an ALIVE that is ahead of it.
_ANSWER_GRACE_S = 10.0

_log = logging.getLogger("stepcast.runtime")


class Inbox:
    """Takes the replies of one group. The caller serialises.

    Args:
        publisher: learns what is answered, and replays what is missing.
        pending: the steps under way.
        world_size: the number of ranks.
        now: the clock's reading.

    Attributes:
        liveness: what was last heard of each rank.
        greeted: for each rank the sockets, "step" and "control", over which it has received PROBE.
        loaded: ranks whose worker is set up.
        said_bye: ranks that have torn their worker down.
        broken: ranks that raised outside a step: the exception's type, text and traceback.
        unrecoverable: messages of a rank, or for it, are lost for good.
        malformed: messages dropped because their payload could not be understood.
    """

    def __init__(self, publisher: Publisher, pending: PendingTable, world_size: int, now: float) -> None:
        self._publisher = publisher
        self._pending = pending
        self.liveness = [RankLiveness(last_heard=now, phase_since=now) for _ in range(world_size)]
        self.greeted: list[set[str]] = [set() for _ in range(world_size)]
        self.loaded: set[int] = set()
        self.said_bye: set[int] = set()
        self._lost = [TailGap(_ANSWER_GRACE_S) for _ in range(world_size)]
        self.broken: dict[int, Sequence[str]] = {}
        self.unrecoverable: ProtocolError | None = None
        self.malformed = 0

    @property
    def all_greeted(self) -> bool:
        """Whether every rank has received PROBE over both of its sockets."""
        return all(len(sockets) == 2 for sockets in self.greeted)  # noqa: PLR2004 - step and control

    def take(self, reply: Reply, now: float) -> bool:
        """Take a reply.

        Args:
            reply: the reply.
            now: the clock's reading.

        Returns:
            Whether it is not an answer to a step: the monitor wants to know.
        """
        header, times, frames = reply
        kind, _, sequence, step, rank = header
        told = self.liveness[rank]
        told.last_heard = now
        if kind == _RESULT:
            told.phase, told.phase_since, told.sequence, told.step = _IDLE, now, sequence, step
            self._publisher.acknowledge(rank, sequence)
            if step:
                self._pending.result(rank, sequence, frames, times)
            return not step
        try:
            self._take_rare(reply, told, now)
        except (ProtocolError, ValueError, TypeError, IndexError) as problem:
            self.malformed += 1
            _log.warning("dropped a malformed message of rank %d: %s", rank, problem)
        return True

    def phase(self, rank: int) -> Phase:
        """What a rank is doing, as far as is known: an idle rank that has something to answer is at it by now."""
        told = self.liveness[rank].phase
        work = self._publisher.working_on(rank) if told is Phase.IDLE else None
        if work is None:
            return told
        return _PHASE_OF.get(work[0], Phase.IDLE)

    def phases(self) -> dict[int, str]:
        """What each rank is doing, as far as is known."""
        return {rank: str(self.phase(rank)) for rank in range(len(self.liveness))}

    def _take_rare(self, reply: Reply, told: RankLiveness, now: float) -> None:
        header = reply.header
        rank = header.rank
        if header.kind == Kind.FAILURE:
            exception_type, text, trace = codec.decode(reply.frames)
            if header.step:
                told.told(now, Phase.IDLE)
                self._publisher.acknowledge(rank, header.sequence)
                self._pending.failed(rank, header.sequence, (exception_type, text, trace), now)
            else:
                self.broken[rank] = (exception_type, text, trace)
        elif header.kind in (Kind.ALIVE, Kind.READY):
            phase, age_s, *rest = msgpack.unpackb(reply.frames[0])
            told.told(now, Phase(phase), float(age_s))
            told.sequence, told.step = header.sequence, header.step
            if header.kind == Kind.READY and phase == Phase.IDLE:
                self.loaded.add(rank)
            if header.kind == Kind.ALIVE:
                self._look_for_lost_answer(rank, told)
                self._pending.entered(rank, header.sequence, rest[0])
        elif header.kind == Kind.HELLO:
            self.greeted[rank].add("step" if header.flags & Flag.STEP_SOCKET else "control")
        elif header.kind == Kind.BYE:
            self.said_bye.add(rank)
        elif header.kind == Kind.GAP and header.sequence > self._publisher.acknowledged(rank):
            # Else it was asked for over one socket before it was answered over the other.
            self._replay(rank, header.sequence)

    def _look_for_lost_answer(self, rank: int, told: RankLiveness) -> None:
        # The mirror image of a lost step: the rank is idle, and has answered more than has come here. Those behind the
        # lost one may have come.
        answered = self._pending.answered_by(rank, self._publisher.acknowledged(rank))
        if self._lost[rank].heartbeat(told.sequence, answered, idle=told.phase in _IDLE_PHASES, now=told.last_heard):
            self.unrecoverable = ProtocolError(
                f"an answer of rank {rank} was lost: it says that it has answered message {told.sequence}, "
                f"the last that came here is that to message {answered}",
                expected=str(told.sequence),
                got=str(answered),
                rank=rank,
            )

    def _replay(self, rank: int, first: int) -> None:
        try:
            count = self._publisher.replay(first)
        except ProtocolError as problem:
            self.unrecoverable = ProtocolError(f"rank {rank} misses messages, and {problem}", rank=rank)
            return
        _log.warning("rank %d misses message %d; published %d messages again", rank, first, count)
