"""The group idles: past limits, for long, with a rank that does not read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from stepcast.bus.frames import Kind
from stepcast.bus.verdicts import Verdict
from stepcast.runtime import procfs
from stepcast.runtime.testing.census import resident_mib
from stepcast.runtime.testing.chaos import NO_ERROR
from stepcast.runtime.testing.stage import RankScenario, Stage

from .common import COLLECTIVE, PARKED

if TYPE_CHECKING:
    from stepcast.runtime.processes import RankGroup

_LIMIT_S = 2.0
_PAST_LIMIT_S = 2.5
#: A parked rank may use this share of a processor; the kernel counts in hundredths of a second.
_IDLE_CORES = 0.05
_IDLE_S = 2.0
_CONTROL_MESSAGES = 100_000
_MEMORY_SLACK_MIB = 8.0


def _idle_past_limit(stage: Stage) -> None:
    stage.run(1)
    stage.fault(lambda: stage.wait(_PAST_LIMIT_S))
    stage.run(4)


def _idle_past_limit_in_broadcast(stage: Stage) -> None:
    """Nothing keeps the broadcast alive."""
    stage.run(1)
    stage.fault(lambda: None)
    stage.await_failure()


def _idle_without_computing(stage: Stage) -> None:
    stage.run()
    before = _cpu_s(stage)
    stage.fault(lambda: time.sleep(_IDLE_S))  # and no look at anybody
    used = [(after - earlier) / _IDLE_S for after, earlier in zip(_cpu_s(stage), before, strict=True)]
    if max(used) > _IDLE_CORES:
        raise AssertionError(f"idle ranks took {', '.join(f'{each:.1%}' for each in used)} of a processor")
    stage.run()


def _cpu_s(stage: Stage) -> list[float]:
    samples = [procfs.read(pid, time.monotonic()) for pid in stage.group.executor.worker_pids]
    return [0.0 if sample is None else sample.cpu_s for sample in samples]


def _flood_a_rank_that_does_not_read(stage: Stage) -> None:
    """What its pipe can't hold is lost to it, and not kept; its peers hear all of it meanwhile."""
    # No embedder could ask for so much.
    group = cast("RankGroup", stage.group.executor._group)._group  # noqa: SLF001
    stage.run()
    stage.fault(lambda: stage.group.stop(stage.victim))
    before = resident_mib()
    for _ in range(_CONTROL_MESSAGES):
        with group.lock:
            group.control(Kind.ABORT)  # of no step: there is nothing to do, or to answer
    grown = resident_mib() - before
    if grown > _MEMORY_SLACK_MIB:
        raise AssertionError(f"{grown:.1f} MiB are held for a rank that does not read")
    stage.watch_until(Verdict.STOPPED)
    stage.group.resume(stage.victim)
    stage.watch_until(Verdict.IDLE)
    stage.run()


SCENARIOS = (
    RankScenario(
        "idle-past-collective-limit",
        NO_ERROR,
        _idle_past_limit,
        settings={**COLLECTIVE, "collective_timeout_s": _LIMIT_S},
        verdict=Verdict.IDLE,
    ),
    RankScenario(
        "idle-in-broadcast-kept-alive",
        NO_ERROR,
        _idle_past_limit,
        settings={
            **PARKED,
            "collective_timeout_s": _LIMIT_S,
            "keepalive": "collective",
            "keepalive_every": 3,
        },
        verdict=Verdict.IDLE,
    ),
    RankScenario(
        "idle-in-broadcast-past-limit",
        "StepFailed",
        _idle_past_limit_in_broadcast,
        settings={**PARKED, "collective_timeout_s": _LIMIT_S},
        verdict=Verdict.IDLE,
    ),
    RankScenario("idle-without-computing", NO_ERROR, _idle_without_computing, verdict=Verdict.IDLE),
    RankScenario("flood-of-control-messages", NO_ERROR, _flood_a_rank_that_does_not_read, verdict=Verdict.STOPPED),
)
