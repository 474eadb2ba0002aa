"""Groups of torchrun's ranks: what they answer, and whose program goes on when."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from stepcast import Executor, ExecutorConfig
from tests.faults.rig import TORCH, wait_for_none_left
from tests.torchrun.programs import exercise
from tests.torchrun.rig import Job

EXPECTED = {
    "step": "a step",
    "gather": [0, 1, 2],
    "collective": [3.0] * 3,
    "futures": list(range(20)),
    "call": [3.0] * 3,
    "failed": [1, "LookupError", [1], False],
    "after": 3.0,
}


def test_mp_answers_what_is_expected_of_torchrun(tmp_path: Path) -> None:
    """The same worker, the same steps."""
    options = {"dir": str(tmp_path)}
    with Executor(ExecutorConfig(worker=TORCH, world_size=3, backend="mp", worker_options=options)) as executor:
        assert exercise(executor) == EXPECTED


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ((), {}),
        (("--virtual-local-rank", "--rdzv-id=a/b c?d#e"), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
    ids=["as usual", "the store is served by rank 0, and every rank is local rank 0"],
)
def test_followers_that_return_serve_one_group_after_another(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    """Both answer as on mp, a stopped rank shows in `health`, and each program has its own surroundings back."""
    settings = {"worker": TORCH}
    with Job(tmp_path, "two_groups", options=options, settings=settings, **variables) as job:
        assert job.finish() == 0, job.output
        assert job.found("first") == EXPECTED
        assert job.found("second") == EXPECTED
        verdicts, after = job.found("stopped")
        assert verdicts[2] == "stopped"
        assert after == [0, 1, 2]
        for rank in range(3):
            assert job.there(f"between-{rank}")
            own = {"plan": False, "kept": "mine", "sigint": True, "sigterm": True, "state": "stopped"}
            assert job.found(f"after-{rank}") == own
        wait_for_none_left(5.0)


def test_followers_never_come_back_to_their_program(tmp_path: Path) -> None:
    """Not even where the executor is built in a thread; so a second group is refused at once."""
    with Job(tmp_path, "once") as job:
        assert job.finish() == 0, job.output
        assert job.found("step") == [0, 1, 2]
        assert "one process makes one group, unless followers_return=True" in job.found("second")
        assert [job.there(f"end-{rank}") for rank in range(3)] == [True, False, False]
        assert [job.there(f"on-{rank}") for rank in range(3)] == [True, False, False]
        wait_for_none_left(5.0)


def test_a_start_that_fails_is_explained_on_every_rank(tmp_path: Path) -> None:
    """Settings that differ are named, and a rank that never comes; who waits for the driver is told at once."""
    with Job(tmp_path, "bad_starts") as job:
        assert job.finish() == 1  # at last a rank has failed
        differs = "rank 2 was given other settings than rank 0: max_message_bytes"
        assert job.found("settings-0").startswith(f"StartupError: {differs}")
        for rank in (1, 2):
            told = f"StartupError: rank {rank} has no group to serve: its driver, rank 0, could not start the group: "
            assert job.found(f"settings-{rank}").startswith(told + differs)

        absent = "rank 2: not there within startup_timeout_s=3 s"
        assert job.found("absent-0").startswith(f"StartupError: {absent}")
        assert absent in job.found("absent-1") or "has not come within startup_timeout_s=3 s" in job.found("absent-1")

        assert job.found("interrupted-0").startswith("KeyboardInterrupt")
        assert job.found("interrupted-1").endswith("could not start the group: it was shut down meanwhile")

        raised = job.found("raised-0")
        assert raised.startswith(
            "StartupError: rank 1 failed in the worker's setup(): LookupError: no luck in loading on rank 1"
        )
        assert "in setup" in raised  # the traceback
        assert not job.there("raised-1")
        wait_for_none_left(5.0)
