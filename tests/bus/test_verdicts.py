"""What the driver makes of a rank, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.bus.liveness import Phase
from stepcast.bus.verdicts import Activity, Verdict, Work, judge

STARTING = (Phase.SPAWNING, Phase.STARTING, Phase.IMPORTING, Phase.LOADING)
AT_WORK = Work(age_s=3.0, working_s=3.0, limit_s=300.0)


def verdict(phase: Phase = Phase.IDLE, work: Work | None = None, **known: Any) -> Verdict:
    return judge(phase, work, **{"silent": False, "activity": None, "interval_s": 2.0, **known})


@pytest.mark.parametrize(
    ("phase", "work", "expected"),
    [
        *((phase, None, Verdict.STARTING) for phase in STARTING),
        (Phase.IDLE, None, Verdict.IDLE),
        (Phase.PARKED, None, Verdict.IDLE),
        (Phase.STEP, None, Verdict.BUSY),
        (Phase.STEP, AT_WORK, Verdict.BUSY),
        (Phase.CALL, AT_WORK, Verdict.BUSY),
        (Phase.COLLECTIVE, AT_WORK, Verdict.BUSY),
        (Phase.IDLE, AT_WORK, Verdict.BUSY),  # the step is on its way to it, or its answer to us
        (Phase.STOPPING, None, Verdict.STOPPING),
        (Phase.GONE, None, Verdict.GONE),
    ],
)
def test_a_rank_that_answers_is_judged_by_what_it_does(phase: Phase, work: Work | None, expected: Verdict) -> None:
    """Busy is not stuck."""
    assert verdict(phase, work) is expected


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(149.0, 149.0, 300.0), Verdict.BUSY),
        (Work(150.0, 150.0, 300.0), Verdict.SLOW),
        (Work(299.0, 299.0, 300.0), Verdict.SLOW),
        (Work(300.0, 300.0, 300.0), Verdict.STUCK),
        (Work(5.9, 5.9, 300.0, peers_s=2.0), Verdict.BUSY),
        (Work(6.0, 6.0, 300.0, peers_s=2.0), Verdict.SLOW),
        (Work(9.0, 5.9, 300.0, peers_s=2.0), Verdict.BUSY),  # it was busy with an earlier one
        (Work(1.9, 1.9, 300.0, peers_s=0.1), Verdict.BUSY),  # not worth a word
    ],
)
def test_a_step_is_judged_by_its_limit_and_by_its_peers(work: Work, expected: Verdict) -> None:
    """Slow from half of the limit on, or at three times its peers' time; stuck past the limit."""
    assert verdict(Phase.STEP, work) is expected


@pytest.mark.parametrize(
    ("activity", "expected"),
    [
        (Activity.RUNS, Verdict.BUSY),
        (Activity.STARVED, Verdict.SLOW),
        (Activity.WAITS, Verdict.UNRESPONSIVE),
        (None, Verdict.UNRESPONSIVE),
        (Activity.STOPPED, Verdict.STOPPED),
    ],
)
@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.STEP])
def test_a_silent_rank_of_this_host_is_judged_by_what_the_kernel_says(
    phase: Phase, activity: Activity | None, expected: Verdict
) -> None:
    """One that computes is at work, whatever it was last known to do."""
    assert verdict(phase, silent=True, activity=activity) is expected


def test_a_silent_rank_elsewhere_is_lost() -> None:
    """Nobody can ask its kernel."""
    assert verdict(Phase.STEP, AT_WORK, silent=True, local=False) is Verdict.LOST
    assert verdict(Phase.STEP, AT_WORK, local=False) is Verdict.BUSY


@pytest.mark.parametrize("phase", STARTING)
def test_a_silent_rank_that_starts_is_starting(phase: Phase) -> None:
    """An import holds the GIL, and waits for the disk; but one that is stopped does not."""
    assert verdict(phase, silent=True, activity=Activity.WAITS) is Verdict.STARTING
    assert verdict(phase, silent=True, activity=Activity.STOPPED) is Verdict.STOPPED


@given(
    phase=st.sampled_from(Phase),
    work=st.none() | st.builds(Work, *[st.floats(0, 400)] * 3, st.none() | st.floats(0, 400)),
    silent=st.booleans(),
    activity=st.none() | st.sampled_from(Activity),
    local=st.booleans(),
)
def test_what_only_the_kernel_knows_only_the_kernel_says(
    phase: Phase, work: Work | None, silent: bool, activity: Activity | None, local: bool
) -> None:
    """Gone and stopped are never guessed; no silence here is a loss; who answers in time is healthy."""
    found = verdict(phase, work, silent=silent, activity=activity, local=local)
    assert (found is Verdict.GONE) == (phase is Phase.GONE)
    assert found is not Verdict.STOPPED or activity is Activity.STOPPED
    assert found is not Verdict.LOST or (silent and not local)
    assert found is not Verdict.UNRESPONSIVE or (silent and local)
    answers = not silent and activity is None and phase is not Phase.GONE
    assert found.is_healthy or not answers or (work is not None and work.is_past_limit)
