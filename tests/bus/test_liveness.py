"""Heartbeat arithmetic, on a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.bus.liveness import HeartbeatTimer, Phase, RankLiveness, Silence, TailGap

NOW = 1000.0


# --- When a heartbeat is due ----------------------------------------------------------------------------------------


def test_a_heartbeat_is_due_one_interval_after_the_timer_was_made() -> None:
    """Where nothing is published, the interval runs from the start."""
    timer = HeartbeatTimer(2.0, NOW)
    assert timer.remaining_s(NOW) == 2.0
    assert timer.remaining_s(NOW + 1.5) == 0.5
    assert timer.remaining_s(NOW + 2.0) == 0.0
    assert timer.remaining_s(NOW + 5.0) == -3.0


def test_any_publication_puts_the_heartbeat_off_by_an_interval() -> None:
    """The interval runs from the last publication, whenever that was."""
    timer = HeartbeatTimer(2.0, NOW)
    timer.published(NOW + 1.5)
    assert timer.remaining_s(NOW + 2.0) == 1.5
    timer.published(NOW + 10.0)
    assert timer.remaining_s(NOW + 10.0) == 2.0


def test_a_heartbeat_is_due_one_interval_after_the_last_one() -> None:
    """Whatever was published before it."""
    timer = HeartbeatTimer(2.0, NOW)
    timer.published(NOW + 1.0)
    timer.sent(NOW + 3.0)
    assert timer.remaining_s(NOW + 3.0) == 2.0


def test_a_rank_that_was_not_heard_is_asked_though_something_is_published_all_the_time() -> None:
    """Once in an interval; a rank that answers the steps needs no heartbeat."""
    timer = HeartbeatTimer(2.0, NOW)
    timer.published(NOW + 2.9)
    assert timer.remaining_s(NOW + 3.0, oldest_heard=NOW + 2.5) == 1.5
    assert timer.remaining_s(NOW + 3.0, oldest_heard=NOW + 0.5) == -0.5
    timer.sent(NOW + 3.0)
    timer.published(NOW + 4.9)
    assert timer.remaining_s(NOW + 4.9, oldest_heard=NOW + 0.5) == pytest.approx(0.1)


def test_asking_does_not_change_when_it_is_due() -> None:
    """A timer that is only read does not move."""
    timer = HeartbeatTimer(0.25, NOW)
    assert {timer.remaining_s(NOW + 1.0) for _ in range(5)} == {-0.75}


# --- What is known of a rank ----------------------------------------------------------------------------------------


def test_a_rank_begins_as_spawning() -> None:
    """Before its first message nothing is known but when it was asked for."""
    rank = RankLiveness(last_heard=NOW)
    assert (rank.phase, rank.sequence, rank.step) == (Phase.SPAWNING, 0, 0)


def test_hearing_from_a_rank_changes_neither_its_phase_nor_its_age() -> None:
    """A message that tells no phase counts as a sign of life only."""
    rank = RankLiveness(last_heard=NOW, phase=Phase.STEP, phase_since=NOW - 3, sequence=4, step=2)
    rank.heard(NOW + 1)
    assert rank == RankLiveness(last_heard=NOW + 1, phase=Phase.STEP, phase_since=NOW - 3, sequence=4, step=2)


def test_a_told_phase_began_as_long_ago_as_its_age() -> None:
    """The phase's beginning is on the driver's clock: the rank tells an age, since its clock may be another."""
    rank = RankLiveness(last_heard=NOW)
    rank.told(NOW + 5, Phase.LOADING, 1.5)
    assert (rank.last_heard, rank.phase, rank.phase_since) == (NOW + 5, Phase.LOADING, NOW + 3.5)
    rank.told(NOW + 6, Phase.IDLE)
    assert (rank.last_heard, rank.phase, rank.phase_since) == (NOW + 6, Phase.IDLE, NOW + 6)


def test_phases_are_told_as_words_and_keep_their_numbers() -> None:
    """The number travels, so it must never change; people read the word."""
    words = "spawning starting importing loading idle step call collective parked stopping gone"
    assert [str(Phase(number)) for number in range(len(Phase))] == words.split()
    assert f"{Phase.IDLE}" == "idle"


# --- Whether the last message was lost ------------------------------------------------------------------------------


def test_one_heartbeat_that_is_ahead_proves_nothing() -> None:
    """Steps and heartbeats come over different sockets: the step may be just behind."""
    assert not TailGap().heartbeat(5, 4, idle=True)


def test_the_second_heartbeat_on_an_idle_rank_proves_the_loss() -> None:
    """A rank that is idle and received nothing between two heartbeats has lost what they tell of."""
    tail = TailGap()
    assert not tail.heartbeat(5, 4, idle=True)
    assert tail.heartbeat(5, 4, idle=True)


def test_it_is_proven_again_until_the_message_comes() -> None:
    """Where the replay is lost too, every further heartbeat asks again, and none when it has come."""
    tail = TailGap()
    told = [tail.heartbeat(5, received, idle=True) for received in (4, 4, 4, 4, 5, 5)]
    assert told == [False, True, True, True, False, False]


def test_anything_received_in_between_starts_anew() -> None:
    """A rank that made progress between two heartbeats is only behind."""
    tail = TailGap()
    assert [tail.heartbeat(9, received, idle=True) for received in (4, 5, 6, 6)] == [False, False, False, True]


def test_a_busy_rank_misses_nothing_yet() -> None:
    """A rank that computes has its next message in its queue; only an idle one can tell."""
    tail = TailGap()
    assert not any(tail.heartbeat(5, 4, idle=False) for _ in range(5))
    assert not tail.heartbeat(5, 4, idle=True)


def test_being_busy_in_between_starts_anew() -> None:
    """Two heartbeats on an idle rank count only when none on a busy one came between them."""
    tail = TailGap()
    assert [tail.heartbeat(5, 4, idle=idle) for idle in (True, False, True, True)] == [False, False, False, True]


def test_more_published_in_between_does_not_matter() -> None:
    """What counts is that the rank received nothing, not that the driver published nothing."""
    tail = TailGap()
    assert not tail.heartbeat(5, 4, idle=True)
    assert tail.heartbeat(8, 4, idle=True)


def test_a_first_message_that_is_lost_is_found_too() -> None:
    """A rank that has received nothing at all is no exception."""
    tail = TailGap()
    assert not tail.heartbeat(0, 0, idle=True)
    assert not tail.heartbeat(1, 0, idle=True)
    assert tail.heartbeat(1, 0, idle=True)


def test_a_rank_that_has_everything_misses_nothing() -> None:
    """A heartbeat that is overtaken by later steps is no gap either."""
    for received in (5, 6):
        tail = TailGap()
        assert not any(tail.heartbeat(5, received, idle=True) for _ in range(5))


def test_with_a_grace_heartbeats_that_come_at_once_prove_nothing() -> None:
    """A process that was stopped finds several heartbeats in its queue: the message may be in another one."""
    tail = TailGap(grace_s=5.0)
    assert not any(tail.heartbeat(5, 4, idle=True, now=NOW + number / 1000) for number in range(50))
    assert not tail.heartbeat(5, 4, idle=True, now=NOW + 4.9)
    assert tail.heartbeat(5, 4, idle=True, now=NOW + 5.0)
    assert tail.heartbeat(5, 4, idle=True, now=NOW + 5.1)


def test_the_grace_begins_anew_with_every_message_that_comes() -> None:
    """Only a message that has been missing for all of the grace is lost."""
    tail = TailGap(grace_s=5.0)
    assert not tail.heartbeat(9, 4, idle=True, now=NOW)
    assert not tail.heartbeat(9, 5, idle=True, now=NOW + 4)
    assert not tail.heartbeat(9, 5, idle=True, now=NOW + 8)
    assert not tail.heartbeat(9, 5, idle=False, now=NOW + 10)
    assert not tail.heartbeat(9, 5, idle=True, now=NOW + 12)
    assert tail.heartbeat(9, 5, idle=True, now=NOW + 17)


def test_one_heartbeat_after_the_grace_proves_nothing() -> None:
    """However long nothing was heard, it takes two heartbeats."""
    assert not TailGap(grace_s=5.0).heartbeat(5, 4, idle=True, now=NOW + 1000)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=30))
def test_a_loss_is_proven_by_two_heartbeats_in_a_row_and_by_nothing_else(
    heartbeats: list[tuple[int, int, bool]],
) -> None:
    """The answer is a function of this heartbeat and the one before it."""
    tail = TailGap()
    before = None
    for highest, received, idle in heartbeats:
        missing = idle and received < highest
        assert tail.heartbeat(highest, received, idle=idle) == (missing and before == received)
        before = received if missing else None


# --- Whether a rank is silent ---------------------------------------------------------------------------------------


def looked_at(silence: Silence, *moments: float, last_heard: float = NOW) -> Silence:
    for moment in moments:
        silence.look(NOW + moment, last_heard)
    return silence


def test_a_rank_that_nobody_has_asked_is_not_silent() -> None:
    """However long nothing was heard: nothing was to be heard."""
    silence = looked_at(Silence(2.0), 1, 2, 3, 100)
    assert (silence.is_silent, silence.unanswered, silence.silent_s) == (False, 0, 0.0)


def test_a_rank_is_silent_after_two_heartbeats_and_an_interval_and_a_half() -> None:
    """Neither is enough alone."""
    silence = Silence(2.0)
    silence.asked(NOW + 2, NOW)
    assert not looked_at(silence, 3, 4, 5, 6).is_silent  # one heartbeat
    silence = Silence(2.0)
    silence.asked(NOW + 2, NOW)
    looked_at(silence, 3)
    silence.asked(NOW + 4, NOW)
    assert not silence.is_silent
    assert looked_at(silence, 5).is_silent
    assert (silence.unanswered, silence.silent_s) == (2, 3.0)


def test_any_message_ends_the_silence() -> None:
    """It counts from the next heartbeat on again."""
    silence = Silence(2.0)
    silence.asked(NOW + 2, NOW)
    looked_at(silence, 3)
    silence.asked(NOW + 4, NOW)
    assert looked_at(silence, 5).is_silent
    looked_at(silence, 6, last_heard=NOW + 5.5)
    assert (silence.is_silent, silence.unanswered, silence.silent_s) == (False, 0, 0.0)
    silence.asked(NOW + 6, NOW + 5.5)
    assert not looked_at(silence, 7, 8, last_heard=NOW + 5.5).is_silent


def test_the_time_in_which_the_driver_did_not_look_counts_for_half_an_interval() -> None:
    """Its own stop is no silence of the rank's."""
    silence = Silence(2.0)
    silence.asked(NOW + 2, NOW)
    silence.asked(NOW + 600, NOW)
    assert (silence.is_silent, silence.silent_s) == (False, 1.0)
    assert looked_at(silence, 601, 602).is_silent
