"""How often and how soon a group is restarted: arithmetic on a clock that the test reads."""

from __future__ import annotations

import pytest

from stepcast import ConfigError, ExecutorConfig
from stepcast.runtime.supervisor import RestartPolicy


def delays(policy: RestartPolicy, *lives_s: float) -> list[float | None]:
    return [policy.failed(lived_s) for lived_s in lives_s]


def test_each_further_restart_waits_twice_as_long() -> None:
    policy = RestartPolicy(4, window_s=100.0, backoff_s=0.5)
    assert delays(policy, 0.0, 1.0, 99.0, 7.0) == [0.5, 1.0, 2.0, 4.0]


def test_past_the_number_there_is_no_restart_however_long_the_failures_took_together() -> None:
    policy = RestartPolicy(2, window_s=100.0, backoff_s=1.0)
    assert delays(policy, 99.0, 99.0, 99.0, 99.0) == [1.0, 2.0, None, None]


def test_starts_that_fail_count_as_lives_of_no_length() -> None:
    policy = RestartPolicy(2, window_s=0.001, backoff_s=1.0)
    assert delays(policy, 5.0, 0.0, 0.0) == [0.001, 0.001, None]


def test_a_good_life_makes_all_failures_before_it_forgotten() -> None:
    policy = RestartPolicy(2, window_s=100.0, backoff_s=1.0)
    assert delays(policy, 0.0, 50.0, 100.0, 1.0, 1.0, 250.0) == [1.0, 2.0, 1.0, 2.0, None, 1.0]


def test_no_restart_waits_for_longer_than_the_window() -> None:
    policy = RestartPolicy(2000, window_s=100.0, backoff_s=1.0)
    assert delays(policy, *[0.0] * 2000)[7:] == [100.0] * 1993


def test_a_group_without_processes_can_not_be_restarted() -> None:
    with pytest.raises(ConfigError, match=r"restart='on_failure' replaces processes, and backend='uni' has none"):
        ExecutorConfig(worker="m:C", backend="uni", restart="on_failure")
    assert ExecutorConfig(worker="m:C", restart="on_failure").resolved_backend == "mp"


def test_a_group_without_processes_watches_no_parent() -> None:
    with pytest.raises(ConfigError, match="watch_parent=True: backend='uni' has no monitor"):
        ExecutorConfig(worker="m:C", backend="uni", watch_parent=True)
    assert ExecutorConfig(worker="m:C", watch_parent=True).resolved_backend == "mp"
