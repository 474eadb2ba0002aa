"""Ranks, the driver and torchrun's agent are killed: the right end, and nobody waits for the agent's own grace."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.faults.rig import TORCH, wait_for_none_left
from tests.harness import process_has_ended, wait_until
from tests.torchrun.rig import AGENTS_GRACE_S, Job

#: What none of ours may need.
LONG_S = AGENTS_GRACE_S / 2


@pytest.mark.parametrize("victim", [0, 2], ids=["the driver's shard", "a follower"])
def test_a_rank_killed_in_a_collective_is_named_and_all_end(tmp_path: Path, victim: int) -> None:
    """WorkerLost tells rank and signal; peers that wait for the dead one in the collective end with it."""
    words = {str(rank): "block" if rank == victim else "collective" for rank in range(3)}
    with Job(tmp_path, "step", settings={"worker": TORCH}, STEP=json.dumps(words)) as job:
        job.wait_for("pids-0", *(f"{word}-{rank}" for rank, word in words.items()))
        with job.agent_stopped():  # it has no part in this
            pid = job.kill(f"block-{victim}")
            job.wait_for("lost")
            for other in {0, 1, 2} - {victim}:
                wait_until(lambda other=other: process_has_ended(job.pid(f"collective-{other}")), LONG_S)
        rank, exit_code, text, _ = job.found("lost")
        assert (rank, exit_code) == (victim, -signal.SIGKILL)
        assert f"rank {victim} (pid {pid}) was killed by SIGKILL while in phase step" in text
        assert job.finish(LONG_S) == 1
        wait_for_none_left(5.0)


def test_after_the_agents_restart_a_group_works_again(tmp_path: Path) -> None:
    """The ranks are gone long before the agent would kill them; the keys that the dead left in its store do no harm."""
    options = ("--max-restarts=2",)
    with Job(tmp_path, "step", settings={"worker": TORCH}, options=options, STEP='{"1": "block"}') as job:
        job.wait_for("block-1")
        pids = job.found("pids-0")
        killed_at = time.monotonic()
        job.kill("block-1")
        for pid in pids:
            wait_until(lambda pid=pid: process_has_ended(pid), LONG_S)
        job.wait_for("again")
        assert time.monotonic() - killed_at < AGENTS_GRACE_S
        assert job.found("again") == [3.0] * 3
        assert job.finish() == 0
        assert "rank 1" in job.output  # the driver's log, before the agent's SIGTERM
        wait_for_none_left(5.0)


def test_a_killed_driver_takes_its_ranks_with_it(tmp_path: Path) -> None:
    """Its shard and the followers end by themselves, though they are in a step."""
    with Job(tmp_path, "step", STEP='["block"]') as job:
        job.wait_for("pids-0", *(f"block-{rank}" for rank in range(3)))
        with job.agent_stopped():
            job.kill("program-0")
            for rank in range(3):
                wait_until(lambda rank=rank: process_has_ended(job.pid(f"block-{rank}")), LONG_S)
        assert job.finish(LONG_S) == 1
        wait_for_none_left(5.0)


def test_a_killed_agent_takes_everything_with_it(tmp_path: Path) -> None:
    """Nobody else would end its ranks: it sends nothing when it is killed."""
    with Job(tmp_path, "step", STEP='["block"]') as job:
        job.wait_for("pids-0", *(f"block-{rank}" for rank in range(3)))
        job.process.kill()
        wait_for_none_left(LONG_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    """The driver gets it too: SIGTERM ends it, Ctrl-C shuts the group down, in the midst of a step that never ends."""
    limits = {"stop_timeout_s": 1.0, "terminate_timeout_s": 1.0}
    with Job(tmp_path, "step", settings=limits, STEP='["block"]') as job:
        job.wait_for("pids-0", *(f"block-{rank}" for rank in range(3)))
        job.process.send_signal(number)
        assert job.finish(LONG_S) == 1
        wait_for_none_left(5.0)


def test_a_driver_that_handles_sigterm_finishes_its_work(tmp_path: Path) -> None:
    """The agent's SIGTERM comes to all ranks; the followers leave it to the driver what it means."""
    with Job(tmp_path, "drain") as job:
        job.wait_for(*(f"wait_for_go-{rank}" for rank in range(3)))
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("leaving-0")
        (tmp_path / "go").touch()
        assert job.finish(LONG_S) == 1  # as whenever the agent was told to end
        assert job.found("drained") == ["gone", [0, 1, 2]]
        assert [job.there(f"atexit-{rank}") for rank in range(3)] == [True] * 3
        assert [job.there(f"end-{rank}") for rank in range(3)] == [True, False, False]
        wait_for_none_left(5.0)
