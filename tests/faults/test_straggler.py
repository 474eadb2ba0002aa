"""A rank that holds the others up is named, and why."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from stepcast import Executor
from tests.faults.rig import HERE, Stage
from tests.harness import busy_process

LIMIT_S = 30.0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the ranks need a processor each")
def test_a_rank_that_is_kept_from_its_processor_is_told_from_one_that_computes(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps take as much of a processor as the others', and longer: others run on the same one."""
    caplog.set_level("INFO")
    free, crowded = sorted(os.sched_getaffinity(0))[:2]
    config = stage.config(world_size=2, heartbeat_interval_s=0.1).replace(worker=f"{HERE}/victims.py:Spinner")
    with Executor(config) as executor, contextlib.ExitStack() as crowd:
        for _ in range(3):
            crowd.enter_context(busy_process(crowded))
        for rank, processor in enumerate((free, crowded)):
            for thread in os.listdir(f"/proc/{executor.worker_pids[rank]}/task"):  # noqa: PTH208 - names alone
                os.sched_setaffinity(int(thread), {processor})
        deadline = time.monotonic() + LIMIT_S
        while "rank 1 waits for a processor" not in caplog.text and time.monotonic() < deadline:
            executor.step(0.01)
        straggler = executor.health().straggler
    assert "rank 1 waits for a processor" in caplog.text
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (1, "descheduled")
