"""When an idle group publishes KEEPALIVE."""

from __future__ import annotations

import pytest

from stepcast import ConfigError, ExecutorConfig
from stepcast.runtime.keepalive import KeepalivePacer


def test_it_is_due_at_every_nth_heartbeat_of_silence() -> None:
    pacer, sequence, published = KeepalivePacer(3), 5, []
    for beat in range(1, 10):
        if pacer.heartbeat(sequence, 0):
            published.append(beat)
            sequence += 1
    assert published == [3, 6, 9]


def test_a_message_begins_the_silence_anew() -> None:
    pacer = KeepalivePacer(3)
    assert [pacer.heartbeat(5, 0), pacer.heartbeat(5, 0)] == [False, False]
    assert [pacer.heartbeat(6, 0) for _ in range(3)] == [False, False, True]


def test_it_waits_for_messages_that_are_under_way() -> None:
    pacer = KeepalivePacer(2)
    assert [pacer.heartbeat(5, in_flight) for in_flight in (1, 1, 1, 0)] == [False, False, False, True]


def test_without_a_number_it_is_never_due() -> None:
    pacer = KeepalivePacer(None)
    assert not any(pacer.heartbeat(5, 0) for _ in range(100))


def test_intervals_above_a_third_of_the_collective_timeout_are_refused() -> None:
    settings = {"worker": "a:B", "heartbeat_interval_s": 2.0, "keepalive_every": 10, "keepalive": "collective"}
    ExecutorConfig(**settings, collective_timeout_s=60.0)
    tenths = {"heartbeat_interval_s": 0.1, "keepalive_every": 3}
    ExecutorConfig(**{**settings, **tenths}, collective_timeout_s=0.9)
    with pytest.raises(ConfigError, match=r"keepalive_every=10 .* is 20 s, more than a third of .*=59"):
        ExecutorConfig(**settings, collective_timeout_s=59.0)
    ExecutorConfig(**{**settings, "keepalive": "bus"}, collective_timeout_s=59.0)
