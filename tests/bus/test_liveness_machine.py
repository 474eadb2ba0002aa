"""Driver and ranks over a transport that delays, reorders and loses: who is silent is found, and nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepcast.bus.liveness import HeartbeatTimer, Phase, RankLiveness, Silence
from stepcast.bus.verdicts import Activity, Verdict, judge

WORLD_SIZE = 3
#: Time passes in ticks.
INTERVAL = 20
MAX_DELAY = 6
#: A rank that goes on, or a driver that wakes: what it has to say is here after that.
SETTLED = MAX_DELAY + 1

ranks = st.integers(0, WORLD_SIZE - 1)


@dataclass
class Rank:
    """A rank's process, what is on its way to and from it, and what the driver knows of it."""

    told: RankLiveness
    silence: Silence
    running: bool = True
    alive: bool = True
    asked: int = 0
    lose_next: bool = False
    lost_last: bool = False
    #: When what it has said arrives.
    replies: list[int] = field(default_factory=list)
    #: Ticks of the driver's own time since it was stopped, or has gone on.
    since: int = 1000


class Liveness(RuleBasedStateMachine):
    """One driver, three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.frozen = False
        self.publishing = False
        self.delay = 0
        self.timer = HeartbeatTimer(INTERVAL, 0)
        self.ranks = [self.new_rank() for _ in range(WORLD_SIZE)]

    def new_rank(self) -> Rank:
        return Rank(RankLiveness(last_heard=self.now, phase=Phase.IDLE, phase_since=self.now), Silence(INTERVAL))

    # What happens.

    @rule(ticks=st.integers(1, 6 * INTERVAL))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()
            self.nobody_is_condemned_who_answers()
            self.who_is_stopped_is_found_within_three_intervals()

    @rule(delay=st.integers(0, MAX_DELAY))
    def answers_take(self, delay: int) -> None:
        self.delay = delay

    @rule(number=ranks)
    def stop(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.running:
            rank.running, rank.since = False, 0

    @rule(number=ranks)
    def go_on(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.running and rank.alive:
            rank.running, rank.since = True, 0

    @rule(number=ranks)
    def lose_a_heartbeat(self, number: int) -> None:
        """One at a time; it may also be its answer."""
        self.ranks[number].lose_next = not self.ranks[number].lost_last

    @rule(number=ranks)
    def kill(self, number: int) -> None:
        self.ranks[number].running = self.ranks[number].alive = False
        self.ranks[number].told.told(self.now, Phase.GONE)

    @precondition(lambda self: not self.frozen)
    @rule(number=ranks)
    def restart(self, number: int) -> None:
        """What the old one has said is of another epoch."""
        self.ranks[number] = self.new_rank()

    @rule(steadily=st.booleans())
    def publish_steps(self, steadily: bool) -> None:
        """One in each tick, or none."""
        self.publishing = steadily

    @rule()
    def freeze_the_driver(self) -> None:
        self.frozen = True

    @rule()
    def wake_the_driver(self) -> None:
        if self.frozen:
            self.frozen = False
            for rank in self.ranks:
                if not rank.running:
                    rank.since = 0
                # Its sockets were asleep too: what lies there comes after the first look.
                rank.replies = [max(due, self.now + 2) for due in rank.replies]

    # The machinery.

    def tick(self) -> None:
        self.now += 1
        for rank in self.ranks:
            if rank.running:
                rank.replies += [self.now + self.delay] * rank.asked
                rank.asked = 0
        if not self.frozen:
            self.look()

    def look(self) -> None:
        for rank in self.ranks:
            rank.since += 1
            here = [due for due in rank.replies if due <= self.now]
            if here and rank.alive:
                rank.told.heard(self.now)
            rank.replies = [due for due in rank.replies if due > self.now]
            rank.silence.look(self.now, rank.told.last_heard)
        if self.publishing:
            self.timer.published(self.now)
            for rank in self.ranks:
                rank.asked += 1
        if self.timer.remaining_s(self.now, min(rank.told.last_heard for rank in self.ranks)) > 0:
            return
        self.timer.sent(self.now)
        for rank in self.ranks:
            rank.silence.asked(self.now, rank.told.last_heard)
            rank.asked += not rank.lose_next
            rank.lost_last, rank.lose_next = rank.lose_next, False

    # What holds.

    @invariant()
    def nobody_is_condemned_who_answers(self) -> None:
        for rank in self.ranks:
            verdict = self.verdict(rank)
            if rank.running and rank.since > SETTLED:
                assert verdict is Verdict.IDLE
            assert (verdict is Verdict.GONE) == (not rank.alive)

    @invariant()
    def who_is_stopped_is_found_within_three_intervals(self) -> None:
        for rank in self.ranks:
            if rank.alive and not rank.running and rank.since > 3 * INTERVAL:
                assert rank.silence.is_silent
                assert self.verdict(rank) is Verdict.UNRESPONSIVE
                assert self.verdict(rank, local=False) is Verdict.LOST

    def verdict(self, rank: Rank, *, local: bool = True) -> Verdict:
        silent = rank.silence.is_silent
        waits = Activity.WAITS if silent and local else None
        return judge(rank.told.phase, None, silent=silent, activity=waits, interval_s=INTERVAL, local=local)


TestLiveness = Liveness.TestCase
TestLiveness.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
