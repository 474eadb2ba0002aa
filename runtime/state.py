"""The life of a group.

A group changes state as a unit:

    NEW -> STARTING -> READY <-> DEGRADED -> STOPPING -> STOPPED
                |        |          |           |
                +--------+----------+-----------+-> FAILED

READY becomes DEGRADED when a step fails: what the workers hold is unknown to stepcast, though every one of them still
answers. The next step that all ranks answer makes it READY again. FAILED is final, and so is STOPPED.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Life(NamedTuple):
    """One life of the group.

    Attributes:
        run_id: 16 bytes.
        epoch: its number, from 1.
        first_step: the id of its first step: ids go on from one life to the next.
    """

    run_id: bytes
    epoch: int = 1
    first_step: int = 1


class GroupState(Enum):
    """Where a group is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"

    @property
    def accepts_steps(self) -> bool:
        """Whether steps can be submitted."""
        return self in (GroupState.READY, GroupState.DEGRADED)


_ALLOWED: dict[GroupState, frozenset[GroupState]] = {
    GroupState.NEW: frozenset({GroupState.STARTING, GroupState.STOPPED, GroupState.FAILED}),
    GroupState.STARTING: frozenset({GroupState.READY, GroupState.FAILED, GroupState.STOPPING}),
    GroupState.READY: frozenset({GroupState.DEGRADED, GroupState.FAILED, GroupState.STOPPING}),
    GroupState.DEGRADED: frozenset({GroupState.READY, GroupState.FAILED, GroupState.STOPPING}),
    GroupState.STOPPING: frozenset({GroupState.STOPPED, GroupState.FAILED}),
    GroupState.FAILED: frozenset(),
    GroupState.STOPPED: frozenset(),
}


def can_change(old: GroupState, new: GroupState) -> bool:
    """Tell whether a group may go from one state to another.

    Args:
        old: where it is.
        new: where it would go.
    """
    return new in _ALLOWED[old]
