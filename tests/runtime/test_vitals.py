"""The judgement on a group's ranks, on a clock, a bus and a kernel that the test sets."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from stepcast.bus.errors import StepcastError
from stepcast.bus.frames import pack_times
from stepcast.bus.liveness import Phase, RankLiveness
from stepcast.bus.verdicts import Verdict, Work
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.health import GroupHealth
from stepcast.runtime.pending import PendingTable
from stepcast.runtime.procfs import Sample
from stepcast.runtime.step import Limit, Pending
from stepcast.runtime.straggler import Straggler
from stepcast.runtime.vitals import Vitals, describe

INTERVAL_S = 2.0


class Bus:
    """Inbox and publisher, as far as they are asked."""

    def __init__(self, world_size: int) -> None:
        self.liveness = [RankLiveness(last_heard=0.0, phase=Phase.IDLE) for _ in range(world_size)]
        self.answered = [0] * world_size
        self.sequence = 0

    def phase(self, rank: int) -> Phase:
        told = self.liveness[rank].phase
        return Phase.STEP if told is Phase.IDLE and self.unanswered(rank) else told

    def acknowledged(self, rank: int) -> int:
        return self.answered[rank]

    def unanswered(self, rank: int) -> int:
        return self.sequence - self.answered[rank]


class Process:
    """A rank's process, as far as it is asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 100 + rank
        self.is_local = True
        self.place = f"pid {self.pid}"


class Scene:
    """A group of two ranks."""

    def __init__(self, **settings: Any) -> None:
        config = ExecutorConfig(worker="m:C", world_size=2, heartbeat_interval_s=INTERVAL_S, **settings)
        self.now = 0.0
        self.bus: Any = Bus(2)
        self.pending = PendingTable(2, 0.5)
        self.processes: Any = [Process(0), Process(1)]
        self.state = "S"
        self.cpu_per_s = 0.0
        self.reads: list[int] = []
        self.vitals = Vitals(config, self.bus, self.bus, self.pending, self.read)
        self.vitals.watch(self.processes)

    def read(self, pid: int, now: float) -> Sample:
        self.reads.append(pid)
        return Sample(now, self.state, self.cpu_per_s * now, 0.0, False)

    def pass_time(self, seconds: float, *, silent: tuple[int, ...] = ()) -> None:
        """Look every half interval, send a heartbeat every interval, which all answer but the silent."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL_S / 2
            self.vitals.look(self.now)
            if self.now % INTERVAL_S == 0:
                self.vitals.asked(self.now)
            for rank in {0, 1} - set(silent):
                self.bus.liveness[rank].heard(self.now)

    def publish(self, limit_s: float = 300.0) -> Pending:
        self.bus.sequence += 1
        limit = Limit(limit_s, "step_timeout_s")
        entry = Pending(self.bus.sequence, 1, "step", True, 0, True, self.now, None, limit)
        self.pending.add(entry)
        return entry

    def answer(self, rank: int, compute_s: float) -> None:
        self.bus.answered[rank] = self.bus.sequence
        self.pending.result(rank, self.bus.sequence, (), pack_times((0, int(compute_s * 1e9), 0, 0, 0, 0)))

    def verdicts(self) -> list[str]:
        return [rank.verdict for rank in self.vitals.ranks(self.now)]


def test_ranks_that_answer_are_not_looked_up_in_the_kernel() -> None:
    """Nothing is read for them."""
    scene = Scene()
    scene.pass_time(20)
    assert scene.verdicts() == ["idle", "idle"]
    assert scene.reads == []
    assert scene.vitals.look_s in (None, INTERVAL_S / 2)


def test_a_stopped_rank_is_found_by_the_kernel_after_its_first_unanswered_heartbeat() -> None:
    """And is well again as soon as it was heard, before the next look."""
    scene = Scene()
    scene.state = "T"
    scene.pass_time(4, silent=(1,))
    assert scene.verdicts() == ["idle", "stopped"]
    assert set(scene.reads) == {101}
    scene.bus.liveness[1].heard(scene.now)
    assert scene.verdicts() == ["idle", "idle"]


@pytest.mark.parametrize(("cpu_per_s", "expected"), [(0.98, "busy"), (0.0, "unresponsive")])
def test_a_silent_rank_is_judged_by_its_progress(cpu_per_s: float, expected: str) -> None:
    """Within three intervals; its processor time tells."""
    scene = Scene()
    scene.cpu_per_s = cpu_per_s
    scene.pass_time(3 * INTERVAL_S, silent=(1,))
    assert scene.verdicts() == ["idle", expected]
    assert f"state S, {cpu_per_s:.2f} of a core" in scene.vitals.ranks(scene.now)[1].detail


def test_a_rank_that_its_peers_wait_for_is_slow() -> None:
    """The words say how long they took."""
    scene = Scene()
    scene.publish()
    scene.pass_time(1)
    scene.answer(0, 0.5)
    assert scene.verdicts() == ["idle", "busy"]
    scene.pass_time(3)
    assert scene.verdicts() == ["idle", "slow"]
    slow = scene.vitals.ranks(scene.now)[1]
    assert slow.detail == "in phase step for 4 s, for which its peers took 0.5 s at most"
    assert (slow.phase_age_s, slow.queue_depth) == (4.0, 1)


def test_a_rank_past_its_limit_is_stuck_and_stays_so_when_the_group_has_failed() -> None:
    """The report is that of the error."""
    scene = Scene()
    scene.publish(limit_s=4.0)
    scene.answer(0, 0.5)
    scene.pass_time(4)
    assert scene.vitals.report(scene.now) == (
        "rank 0 is idle (in phase idle for 4 s); rank 1 is stuck (in phase step for 4 s, past its limit of 4 s)"
    )
    scene.pending.fail_all(StepcastError("the end"))
    assert scene.verdicts() == ["idle", "stuck"]
    scene.bus.liveness[1].told(scene.now, Phase.GONE)
    assert scene.verdicts() == ["idle", "gone"]


def test_what_is_wrong_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    """Not with each look."""
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.state = "T"
    for _ in range(5):
        scene.pass_time(2, silent=(1,))
        assert scene.vitals.find_lost(scene.now) == (None, False)
    scene.pass_time(4)
    assert scene.vitals.find_lost(scene.now) == (None, False)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("rank 1 (pid 101) is stopped in phase idle, and has answered no heartbeat for ")
    assert first.endswith(": stopped by a signal (SIGSTOP; state T): kill -CONT 101 lets it go on")
    assert second == "rank 1 (pid 101) goes on: idle"


def test_a_rank_is_lost_when_its_limit_has_passed() -> None:
    """The error has the limit's name, the phase, and what the kernel says."""
    scene = Scene(unresponsive_timeout_s=8.0)
    scene.pass_time(8, silent=(1,))
    assert scene.vitals.find_lost(scene.now) == (None, False)
    scene.pass_time(2, silent=(1,))
    error, is_there = scene.vitals.find_lost(scene.now)
    assert is_there
    assert error is not None
    assert (error.rank, error.pid, error.exit_code, error.phase, error.silent_for_s) == (1, 101, None, "idle", 8.0)
    assert "no heartbeat for 8.00 s, over unresponsive_timeout_s=8 s, in phase idle: unresponsive: waits" in str(error)


def test_a_rank_that_computes_is_never_lost() -> None:
    """`step_timeout_s` judges it."""
    scene = Scene(unresponsive_timeout_s=8.0)
    scene.cpu_per_s = 1.0
    scene.pass_time(40, silent=(1,))
    assert scene.vitals.find_lost(scene.now) == (None, False)


def test_words_for_a_step_near_its_limit() -> None:
    """They say which share it has used up."""
    words = describe(Verdict.SLOW, Phase.STEP, Work(200.0, 200.0, 300.0), 200.0)
    assert words == "in phase step for 200 s, over 50% of its limit of 300 s"


def test_health_as_a_dictionary_is_json() -> None:
    """The same names; lists and dictionaries all through."""
    scene = Scene()
    ranks = scene.vitals.ranks(0.0)
    health = GroupHealth(
        state="ready",
        ok=True,
        failure=None,
        epoch=1,
        published=0,
        in_flight=0,
        in_flight_bytes=0,
        dropped={"late": 1},
        straggler=Straggler(rank=1, cause="bus", lead_s=0.25, steps=3, of=4),
        ranks=ranks,
    )
    plain = health.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["dropped"] == {"late": 1}
    assert [rank["rank"] for rank in plain["ranks"]] == [0, 1]
    assert plain["ranks"][0]["verdict"] == "idle"
