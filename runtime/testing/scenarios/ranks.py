"""A rank ends, is stopped, or keeps its interpreter for itself."""

from __future__ import annotations

from stepcast.bus.errors import WorkerLost
from stepcast.bus.verdicts import Verdict
from stepcast.runtime.testing.chaos import NO_ERROR
from stepcast.runtime.testing.stage import RankScenario, Stage

from .common import COLLECTIVE, LATE, LOST, SHORT, in_step

#: A stopped rank is found within so many heartbeat intervals.
_FOUND_WITHIN_INTERVALS = 3
#: And this long after: a driver's thread may have to wait for a processor, too.
_SCHEDULING_S = 0.2


def _kill_idle(stage: Stage) -> None:
    stage.run()
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.await_failure()


def _kill_all(stage: Stage) -> None:
    def kill_each() -> None:
        for rank in range(stage.world_size):
            stage.group.kill(rank)

    stage.fault(kill_each)
    error = stage.await_failure()
    if isinstance(error, WorkerLost):
        stage.victim = error.rank  # the one that was found first


def _kill_while_others_wait(stage: Stage) -> None:
    """The victim sleeps; its peers are in the step, or in its collective; then it is killed."""
    stage.group.in_next_step(stage.victim, "sleep")
    futures = stage.steps(4)
    stage.wait(0.3)  # they get into it meanwhile
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.answers(futures)


def _kill_stopped(stage: Stage) -> None:
    stage.group.stop(stage.victim)
    futures = stage.steps(2)
    stage.fault(lambda: stage.group.kill(stage.victim))
    stage.answers(futures)


def _find_stopped(stage: Stage) -> None:
    """Health turns red, in time, and green again."""
    stage.fault(lambda: stage.group.stop(stage.victim))
    stage.watch_until(Verdict.STOPPED)
    stage.record.detect()
    found_s = (stage.record.since_fault_ms(stage.record.detected_at) or 0.0) / 1e3
    limit_s = _FOUND_WITHIN_INTERVALS * stage.group.config.heartbeat_interval_s + _SCHEDULING_S
    if found_s > limit_s:
        raise AssertionError(f"a stopped rank was found after {found_s:.2f} s, not within {limit_s:.2f} s")
    stage.group.resume(stage.victim)
    stage.watch_until(Verdict.IDLE)
    stage.run()


def _stop_and_resume(stage: Stage) -> None:
    stage.fault(lambda: stage.group.stop(stage.victim))
    futures = stage.steps(4)
    stage.watch_until(Verdict.STOPPED)
    stage.group.resume(stage.victim)
    stage.answers(futures)


def _stop_idle_for_good(stage: Stage) -> None:
    stage.fault(lambda: stage.group.stop(stage.victim))
    stage.await_failure()


def _stop_for_good(stage: Stage) -> None:
    stage.fault(lambda: stage.group.stop(stage.victim))
    stage.run(1)


#: A rank that holds the GIL is silent for longer than that.
_LONG_S = 1.2

SCENARIOS = (
    RankScenario("kill-idle", LOST, _kill_idle, verdict=Verdict.GONE),
    RankScenario("kill-all", LOST, _kill_all, verdict=Verdict.GONE),
    RankScenario("kill-in-step", LOST, in_step("kill"), verdict=Verdict.GONE),
    RankScenario("kill-while-peers-wait", LOST, _kill_while_others_wait, verdict=Verdict.GONE),
    RankScenario("kill-in-collective", LOST, _kill_while_others_wait, settings=COLLECTIVE, verdict=Verdict.GONE),
    RankScenario("kill-stopped", LOST, _kill_stopped, verdict=Verdict.GONE),
    RankScenario("exit-in-step", LOST, in_step("exit"), verdict=Verdict.GONE),
    RankScenario("exit-cleanly-in-step", LOST, in_step("exit_cleanly"), verdict=Verdict.GONE),
    RankScenario("os-exit-in-step", LOST, in_step("os_exit"), verdict=Verdict.GONE),
    RankScenario("segfault-in-step", LOST, in_step("segfault"), verdict=Verdict.GONE),
    RankScenario("stopped-is-found", NO_ERROR, _find_stopped, verdict=Verdict.STOPPED),
    RankScenario("stop-and-resume", NO_ERROR, _stop_and_resume, verdict=Verdict.STOPPED),
    RankScenario(
        "stop-past-unresponsive-limit",
        LOST,
        _stop_idle_for_good,
        settings={"unresponsive_timeout_s": 0.7, "dump_timeout_s": 0.2},
        verdict=Verdict.STOPPED,
    ),
    RankScenario("stop-past-limit", LATE, _stop_for_good, settings=SHORT, verdict=Verdict.STOPPED),
    # One that waits in native code with the GIL held looks like one that is deadlocked there; one that computes there
    # does not.
    RankScenario("hold-gil", NO_ERROR, in_step("hold_gil", _LONG_S), verdict=Verdict.UNRESPONSIVE),
    RankScenario("hold-gil-past-limit", LATE, in_step("hold_gil"), settings=SHORT, verdict=Verdict.STUCK),
    RankScenario(
        "hold-gil-past-unresponsive-limit",
        LOST,
        in_step("hold_gil"),
        settings={"unresponsive_timeout_s": 0.7, "dump_timeout_s": 0.2},
        verdict=Verdict.UNRESPONSIVE,
    ),
    RankScenario(
        "compute-in-gil",
        NO_ERROR,
        in_step("compute_in_gil", _LONG_S),
        settings={"unresponsive_timeout_s": 0.7},
        verdict=Verdict.SLOW,
    ),
    RankScenario(
        "compute-in-gil-before-collective",
        NO_ERROR,
        in_step("compute_in_gil", _LONG_S),
        settings={**COLLECTIVE, "unresponsive_timeout_s": 0.7},
        verdict=Verdict.BUSY,
    ),
)
