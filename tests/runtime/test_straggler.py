"""Which rank is slow, and why."""

from __future__ import annotations

import pytest

from stepcast.bus.frames import Times, pack_times
from stepcast.runtime.straggler import Straggler, StragglerWatch, Timed, describe_waiting, find_straggler, judge_step

MS = 1_000_000
PUBLISHED_NS = 50_000 * MS


def rank_times(way_ms: int, compute_ms: int, waited_ms: int = 0, queued_ms: int = 0) -> Times:
    return Times(PUBLISHED_NS + way_ms * MS, compute_ms * MS, queued_ms * MS, waited_ms * MS, 0, 0)


@pytest.mark.parametrize(
    ("ranks", "rank", "cause", "lead_ms"),
    [
        ([(1, 20, 10), (1, 20, 0), (1, 20, 10)], 1, "compute", 10),
        ([(1, 20, 10), (1, 20, 10), (11, 10, 0)], 2, "bus", 10),
        ([(1, 20, 10, 1), (1, 20, 0, 7), (1, 20, 10, 2)], 1, "descheduled", 10),
        ([(1, 20, 10, 4), (1, 20, 0, 8), (1, 20, 10, 4)], 1, "compute", 10),
        ([(1, 20, 10, 0), (11, 10, 0, 8)], 1, "descheduled", 10),
        ([(0, 30, 28), (0, 30, 28)], None, "collective", 28),
    ],
)
def test_the_slow_rank_and_the_cause_are_named(
    ranks: list[tuple[int, ...]], rank: int | None, cause: str, lead_ms: int
) -> None:
    found = judge_step(PUBLISHED_NS / 1e9, {number: rank_times(*each) for number, each in enumerate(ranks)})
    assert found is not None
    assert (found.rank, found.cause) == (rank, cause)
    assert found.lead_s == pytest.approx(lead_ms / 1e3)


def test_a_rank_that_is_still_at_the_step_before_has_no_late_messages() -> None:
    """Steps go in a pipeline: what it is late with is the work, not the way to it."""
    before = {0: rank_times(0, 10), 1: rank_times(0, 40)}
    now = {0: rank_times(11, 10), 1: rank_times(41, 40)}
    found = judge_step(PUBLISHED_NS / 1e9, now, before)
    assert found is not None
    assert (found.rank, found.cause) == (1, "compute")
    assert found.lead_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    "ranks", [[(1, 20, 2), (1, 20, 1)], [(1, 900, 0)], []], ids=["alike", "alone", "nobody has answered"]
)
def test_nobody_is_named_without_a_lead(ranks: list[tuple[int, int, int]]) -> None:
    assert judge_step(PUBLISHED_NS / 1e9, {number: rank_times(*each) for number, each in enumerate(ranks)}) is None


def window(slow: list[int | None]) -> list[Timed]:
    """Steps in each of which one of three ranks computes for 10 ms more than the others."""
    return [
        Timed(
            step, PUBLISHED_NS / 1e9, {rank: pack_times(rank_times(0, 15 if rank == who else 5)) for rank in range(3)}
        )
        for step, who in enumerate(slow, 1)
    ]


def test_a_window_names_what_held_up_most_of_its_steps() -> None:
    found = find_straggler(window([1, 1, None, 2, 1]))
    assert found == Straggler(1, "compute", pytest.approx(0.01), 3, 5)
    assert str(found) == "rank 1 computes 10 ms longer in 3 of 5 steps"


@pytest.mark.parametrize("slow", [[], [None, None], [0, 1, 2], [1, None]])
def test_a_window_without_a_majority_names_nobody(slow: list[int | None]) -> None:
    assert find_straggler(window(slow)) is None


def test_every_cause_can_be_put_into_words() -> None:
    for cause in ("bus", "compute", "descheduled", "collective"):
        assert "12 ms" in str(Straggler(None if cause == "collective" else 2, cause, 0.012, 3, 5))


def test_the_log_tells_once_of_what_is_seen_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    slow, other = Straggler(1, "compute", 0.01, 60, 64), Straggler(2, "bus", 0.01, 60, 64)
    seen = [slow, None, slow, slow, slow, other, slow, None, None, None, slow, slow]
    looks = iter(seen)
    watch = StragglerWatch(2.0, lambda: next(looks))
    told = []
    for number in range(2 * len(seen)):  # at every second look it is not yet time
        caplog.clear()
        watch.look(100.0 + number)
        told += [(number // 2, message.partition(":")[0]) for message in caplog.messages]
    slow_words = "rank 1 computes 10 ms longer in 60 of 64 steps"
    assert told == [(3, slow_words), (8, "no rank holds the group up any more"), (11, slow_words)]


def test_a_few_steps_are_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watch = StragglerWatch(1.0, lambda: Straggler(1, "compute", 0.01, 4, 4))
    for now in range(5):
        watch.look(float(now))
    assert not caplog.messages


def test_an_error_says_who_waits_for_whom() -> None:
    phases = {0: "collective", 1: "step", 2: "idle"}
    assert describe_waiting([0, 1], phases) == ", and rank 0 waits in a collective for rank 1"
    assert describe_waiting([0], phases) == ", all that have not answered wait in a collective (rank 0)"
    assert describe_waiting([1], phases) == ""
