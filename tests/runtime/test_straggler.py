"""Which rank is slow, and why."""

from __future__ import annotations

import pytest

from stepcast.bus.frames import Times, pack_times
from stepcast.runtime.straggler import Straggler, Timed, describe_waiting, find_straggler, judge_step

MS = 1_000_000
PUBLISHED_NS = 50_000 * MS


def rank_times(way_ms: int, compute_ms: int, waited_ms: int = 0) -> Times:
    return Times(PUBLISHED_NS + way_ms * MS, compute_ms * MS, waited_ms * MS, 0, 0)


@pytest.mark.parametrize(
    ("ranks", "rank", "cause", "lead_ms"),
    [
        ([(1, 20, 10), (1, 20, 0), (1, 20, 10)], 1, "compute", 10),
        ([(1, 20, 10), (1, 20, 10), (11, 10, 0)], 2, "bus", 10),
        ([(0, 30, 28), (0, 30, 28)], None, "collective", 28),
    ],
)
def test_the_slow_rank_and_the_cause_are_named(
    ranks: list[tuple[int, int, int]], rank: int | None, cause: str, lead_ms: int
) -> None:
    found = judge_step(PUBLISHED_NS / 1e9, {number: rank_times(*each) for number, each in enumerate(ranks)})
    assert found is not None
    assert (found.rank, found.cause) == (rank, cause)
    assert found.lead_s == pytest.approx(lead_ms / 1e3)


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


def test_an_error_says_who_waits_for_whom() -> None:
    phases = {0: "collective", 1: "step", 2: "idle"}
    assert describe_waiting([0, 1], phases) == ", and rank 0 waits in a collective for rank 1"
    assert describe_waiting([0], phases) == ", all that have not answered wait in a collective (rank 0)"
    assert describe_waiting([1], phases) == ""
