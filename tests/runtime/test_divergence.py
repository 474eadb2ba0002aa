"""Ranks disagree on a message's collectives, or are only behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepcast.bus.errors import Diverged
from stepcast.bus.frames import pack_times
from stepcast.bus.tally import CODE_OF, COLLECTIVES, last_collective, roll, signature
from stepcast.runtime.divergence import DivergenceWatch

NAMES = COLLECTIVES[1:]
TRAIL = 8


def trail_of(names: list[str]) -> list[tuple[int, int, str]]:
    """The trail of a rank that has entered these collectives, as its ALIVE tells it."""
    fingerprint, trail = 0, []
    for count, name in enumerate(names, 1):
        fingerprint = roll(fingerprint, signature(name), CODE_OF[name])
        trail.append((count, fingerprint, name))
    return trail[::-1][:TRAIL]


def times_of(names: list[str]) -> bytes:
    """The times of a rank that has answered after these collectives."""
    count, fingerprint, _ = trail_of(names)[0] if names else (0, 0, "")
    return pack_times((0, 0, 0, 0, count, fingerprint))


def told(
    watch: DivergenceWatch, rank: int, names: list[str], answered: dict[int, bytes] | None = None
) -> Diverged | None:
    return watch.told("step 3", 3, 7, rank, trail_of(names), answered or {})


def test_a_fingerprint_tells_the_order_and_the_last_collective() -> None:
    one, other = trail_of(["all_reduce", "broadcast"]), trail_of(["broadcast", "all_reduce"])
    assert one[0][1] != other[0][1]
    assert [last_collective(each[0][1]) for each in (one, other)] == ["broadcast", "all_reduce"]
    assert last_collective(0) == "none"
    assert last_collective(0xFE) == "collective 254"
    # As documented: whoever counts elsewhere must come to the same.
    assert trail_of(["all_reduce"])[0][1] == (signature("all_reduce") * 0x9E3779B97F4A7C15 % 2**64) // 256 * 256 + 1


@given(st.lists(st.sampled_from(NAMES), max_size=20), st.data())
def test_a_rank_that_is_behind_in_the_same_sequence_is_not_diverged(names: list[str], data: st.DataObject) -> None:
    watch = DivergenceWatch()
    for rank in data.draw(st.lists(st.integers(0, 3), max_size=8)):
        done = data.draw(st.integers(0, len(names)))
        assert told(watch, rank, names[:done]) is None
    assert told(watch, 0, names, {1: times_of(names)}) is None


@given(
    st.lists(st.sampled_from(NAMES), max_size=10),
    st.permutations(NAMES).map(lambda names: names[:2]),
    st.lists(st.sampled_from(NAMES), max_size=TRAIL - 1),
)
def test_ranks_in_different_collectives_at_the_same_count_are_diverged(
    common: list[str], pair: list[str], later: list[str]
) -> None:
    watch = DivergenceWatch()
    assert told(watch, 0, [*common, pair[0]]) is None
    error = told(watch, 1, [*common, pair[1], *later])
    assert error is not None
    assert error.step == 3
    assert error.counts == {0: len(common) + 1, 1: len(common) + 1 + len(later)}
    assert error.last == {0: pair[0], 1: [pair[1], *later][-1]}


def test_a_rank_that_has_answered_after_fewer_collectives_is_diverged() -> None:
    error = told(DivergenceWatch(), 1, ["all_reduce", "barrier"], {0: times_of(["all_reduce"]), 2: times_of([])})
    assert error is not None
    assert error.counts == {0: 1, 1: 2, 2: 0}
    assert "rank 1 has entered 2, the last barrier; rank 2 answered after 0" in str(error)


def test_a_rank_that_is_behind_one_that_has_answered_is_not_diverged() -> None:
    answered = {0: times_of(["all_reduce", "barrier"])}
    assert told(DivergenceWatch(), 1, ["all_reduce"], answered) is None
    assert told(DivergenceWatch(), 1, ["all_reduce", "barrier"], answered) is None


def test_what_was_told_of_an_earlier_message_does_not_count() -> None:
    watch = DivergenceWatch()
    watch.told("step 3", 3, 7, 0, trail_of(["all_reduce"]), {})
    assert watch.told("step 4", 4, 8, 1, trail_of(["barrier"]), {}) is None
    watch.forget(8)
    assert watch.told("step 3", 3, 7, 1, trail_of(["barrier"]), {}) is None
