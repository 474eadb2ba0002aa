"""The states of a group, and the ways between them."""

from __future__ import annotations

import itertools

from stepcast import GroupState
from stepcast.runtime.state import can_change

ALLOWED = {
    "new": {"starting", "failed", "stopped"},
    "starting": {"ready", "failed", "stopping"},
    "ready": {"degraded", "failed", "stopping"},
    "degraded": {"ready", "failed", "stopping"},
    "stopping": {"stopped", "failed"},
    "failed": set(),
    "stopped": set(),
}


def test_a_group_goes_only_the_ways_of_the_diagram() -> None:
    """All pairs of states: allowed are those that the module's diagram draws, and no others."""
    for old, new in itertools.product(GroupState, repeat=2):
        assert can_change(old, new) is (new.value in ALLOWED[old.value]), (old, new)


def test_only_a_ready_or_degraded_group_takes_steps() -> None:
    """A failed step leaves the group in use; every other state refuses steps."""
    assert {state for state in GroupState if state.accepts_steps} == {GroupState.READY, GroupState.DEGRADED}


def test_failed_and_stopped_are_final() -> None:
    """No executor comes back: a new one must be made."""
    for final in (GroupState.FAILED, GroupState.STOPPED):
        assert not any(can_change(final, state) for state in GroupState)


def test_every_state_can_be_reached_and_ended() -> None:
    """From NEW there is a way to each state, and from each to an end."""

    def reachable(state: GroupState) -> set[GroupState]:
        seen, todo = {state}, [state]
        while todo:
            old = todo.pop()
            new = {each for each in GroupState if can_change(old, each)} - seen
            seen |= new
            todo += new
        return seen

    assert reachable(GroupState.NEW) == set(GroupState)
    for state in GroupState:
        assert reachable(state) & {GroupState.FAILED, GroupState.STOPPED}
