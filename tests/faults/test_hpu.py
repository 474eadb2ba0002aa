"""Groups on Gaudi cards, as far as a stand-in for their software can tell: they compute, and they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepcast import Executor, ExecutorConfig
from stepcast.bus.errors import WorkerLost
from stepcast.runtime import platforms
from stepcast.runtime.platforms import Host
from tests.faults.rig import SETTINGS
from tests.harness import process_has_ended, wait_until

pytest.importorskip("torch")

HERE = Path(__file__).parent
STUBS = HERE.parent / "workers" / "stubs"
LIMIT_S = 60.0


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with four cards, and the stand-in installed. Returns where the ranks leave their notes."""
    for number in range(4):
        for path, text in (
            (f"dev/accel/accel{number}", ""),
            (f"sys/class/accel/accel{number}/device/vendor", "0x1da3"),
        ):
            file = tmp_path / "host" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    monkeypatch.setattr(platforms, "this_host", Host(root=tmp_path / "host"))
    monkeypatch.syspath_prepend(str(STUBS))
    monkeypatch.setenv("HLS_MODULE_ID", "0")  # the driver's own business
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    directory = tmp_path / "notes"
    directory.mkdir()
    return directory


def config(directory: Path, worker: str = "Summing", **settings: Any) -> ExecutorConfig:
    return ExecutorConfig(
        worker=f"{HERE}/hpu_victims.py:{worker}",
        backend="mp",
        world_size=2,
        device="hpu",
        worker_env={"STUB_HPU_DIR": str(directory)},
        **{**SETTINGS, **settings},
    )


def notes(directory: Path, rank: int) -> list[str]:
    return (directory / f"notes-{rank}").read_text().splitlines()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_group_on_cards_computes_and_leaves_in_good_order(cards: Path, method: str) -> None:
    """Each rank has a card of its own; all leave their group before they end; the driver has no card."""
    with Executor(config(cards, start_method=method)) as executor:
        assert executor.step(1.0, gather=True) == [["hccl", "hpu", 3.0]] * 2
    for rank in range(2):
        told = notes(cards, rank)
        assert f"acquired {rank}" in told
        assert told[-1] == "left"
    assert "habana_frameworks" not in sys.modules
    assert not (cards / "notes-none").exists()


def test_a_group_that_the_worker_forgets_is_left_all_the_same(cards: Path) -> None:
    """Not by exit handlers, but by all ranks while the driver still waits for them."""
    with Executor(config(cards, "Careless", start_method="fork")) as executor:
        executor.step(1.0)
    assert [notes(cards, rank)[-1] for rank in range(2)] == ["left", "left"]


def test_a_rank_that_ends_alone_waits_for_nobody(cards: Path) -> None:
    """Its exit handlers would wait for its peers, which go on; so would those of the peers, once it is dead."""
    with Executor(config(cards)) as executor:
        executor.step(1.0, gather=True)  # neither is in a collective
        os.kill(executor.worker_pids[1], signal.SIGTERM)
        failure = wait_until(lambda: executor.health().failure, LIMIT_S)
    assert re.search(r"rank 1 .*exited with code 143", failure)
    assert not [rank for rank in range(2) if "leaving" in notes(cards, rank)]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_rank_that_waits_for_a_dead_one_to_leave_is_ended(cards: Path, method: str) -> None:
    """HCCL has no limit for it; the driver knows of the death at once, and ends the others."""
    executor = Executor(config(cards, "DiesInTeardown", start_method=method))
    executor.step(1.0, gather=True)
    with pytest.raises(WorkerLost, match=r"rank 1 .*exited with code 5"):
        executor.shutdown()
    assert "left" not in notes(cards, 0)


@contextmanager
def fork_at_exit(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    environment = {**os.environ, "PYTHONPATH": str(STUBS), "STUB_HPU_DIR": str(directory)}
    environment.pop("HLS_MODULE_ID")
    with subprocess.Popen(
        [sys.executable, HERE / "fork_at_exit.py", *arguments], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="forks run exit handlers since Python 3.13")
def test_a_forked_rank_that_leaves_its_group_to_exit_handlers_hangs_its_parent(cards: Path) -> None:
    """What the others below avoid: the fork has no exit handlers, and the parent's wait for it, without a limit."""
    with fork_at_exit(cards, "fork", "stays") as (parent, child):
        wait_until(lambda: process_has_ended(child), LIMIT_S)
        waited = notes(cards, 0).count("waiting for peers")
        # It has ended for good, and still the parent asks for it, again and again.
        wait_until(lambda: notes(cards, 0).count("waiting for peers") > waited + 20, LIMIT_S)
        assert parent.poll() is None
        assert "leaving" not in notes(cards, 1)


@pytest.mark.parametrize("arguments", [("fork", "leaves"), ("spawn", "stays")])
def test_who_leaves_the_group_before_or_has_exit_handlers_ends(cards: Path, arguments: tuple[str, str]) -> None:
    """A fork that leaves explicitly, as stepcast's ranks do, and a spawned process."""
    with fork_at_exit(cards, *arguments) as (parent, child):
        assert parent.wait(LIMIT_S) == 0
        wait_until(lambda: process_has_ended(child), LIMIT_S)
    assert [notes(cards, rank)[-1] for rank in range(2)] == ["left", "left"]
