"""What the ranks' messages come to: here, whom a rank's own report of its end is blamed on."""

from __future__ import annotations

from typing import Any

import pytest

from stepcast.bus import codec
from stepcast.bus.frames import Header, Kind
from stepcast.bus.replies import Reply
from stepcast.runtime.inbox import _BLAME_S, Broken, Inbox


@pytest.fixture
def inbox() -> Inbox:
    unused: Any = None
    return Inbox(publisher=unused, pending=unused, world_size=3, now=0.0)


def raised(rank: int, text: str) -> Reply:
    frames = codec.encode(["RuntimeError", text, "a traceback"])
    return Reply(Header(Kind.FAILURE, 0, 0, 0, rank), b"", frames)


def test_a_rank_that_raised_is_not_judged_before_a_death_may_have_come(inbox: Inbox) -> None:
    """A rank that is killed closes its connections before the kernel tells of its end."""
    assert inbox.judge_broken_at() is None
    inbox.take(raised(2, "connection closed by peer"), now=5.0)
    assert inbox.judge_broken_at() == 5.0 + _BLAME_S
    assert inbox.take_broken(5.0 + _BLAME_S / 2, at_once=False) == []
    assert inbox.take_broken(5.0 + _BLAME_S, at_once=False) == [
        (2, Broken("spawning", ("RuntimeError", "connection closed by peer", "a traceback")))
    ]


def test_a_rank_that_raised_is_judged_once(inbox: Inbox) -> None:
    inbox.take(raised(0, "no"), now=0.0)
    assert len(inbox.take_broken(10.0, at_once=False)) == 1
    assert inbox.take_broken(20.0, at_once=False) == []
    assert inbox.judge_broken_at() is None
    assert 0 in inbox.broken, "that it has told why it ends is not forgotten: its exit is no news"


def test_with_nobody_left_to_die_all_are_judged_at_once(inbox: Inbox) -> None:
    """In the order in which they told."""
    inbox.take(raised(1, "first"), now=0.0)
    inbox.take(raised(0, "second"), now=0.0)
    assert [rank for rank, _ in inbox.take_broken(0.0, at_once=True)] == [1, 0]
