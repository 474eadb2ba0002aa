"""Runs ranks of a group on the stand-in for Gaudi cards, with or without a fault in stepcast's own source.

It reads cases from stdin, and writes what became of each: by rank "kept", or what was broken. Each rank is a fork of
this process, which has imported torch, to be quick, and nothing of stepcast's or of the stand-in's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch

RANKS = 2
#: Kills a rank that hangs. Nothing waits for it but a rank whose peer has failed, and that one is killed before.
LIMIT_S = 60
KEPT = "kept"


def edit_sources(edits: list[list[str]]) -> Callable[[], list[str]]:
    """Have modules imported with a change in their source. Returns what tells of the changes that were not made."""
    waiting = {module: (old, new) for module, old, new in edits}
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if name not in waiting:
            return original(self, name)
        old, new = waiting.pop(name)
        source = self.get_source(name) or ""
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
        return compile(source.replace(old, new), self.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return lambda: list(waiting)


def be_rank(rank: int, case: dict[str, Any], directory: Path) -> None:
    """Go through what a rank does; the assertions are the contract's."""
    os.environ.update(case["environ"], STUB_HPU_DIR=str(directory))
    left_out = edit_sources(case["edits"])
    if case["imported_before"]:
        import habana_frameworks.torch  # noqa: F401, PLC0415

    from stepcast.bus.endpoints import RunDirectory  # noqa: PLC0415
    from stepcast.runtime.config import ExecutorConfig  # noqa: PLC0415
    from stepcast.runtime.launch.plan import plan_ranks, rank_environment  # noqa: PLC0415
    from stepcast.runtime.state import Life  # noqa: PLC0415

    config = ExecutorConfig(worker="none:None", world_size=RANKS, device="hpu")
    boot = plan_ranks(config, RunDirectory(str(directory)), Life(bytes(16)), die_with_driver=False)[rank]
    environment = dict(rank_environment(config, boot))
    os.environ.clear()
    os.environ.update(environment)

    from stepcast.workers import process_group  # noqa: PLC0415
    from stepcast.workers.base import RankInfo  # noqa: PLC0415

    place = {name: getattr(boot, name) for name in ("rank", "local_rank", "local_world_size", "world_size", "device")}
    place["device_class"] = boot.device_class
    info = RankInfo(
        **place,
        epoch=1,
        output_rank=0,
        rendezvous=f"file://{directory}/rendezvous",
        collective_timeout_s=LIMIT_S,
    )
    device = process_group.init_process_group(info)
    notes = (directory / f"notes-{rank}").read_text
    assert torch.distributed.get_backend() == "hccl"
    modules = os.environ.get("HABANA_VISIBLE_MODULES", "0,1,2,3").split(",")
    assert f"acquired {modules[rank]}\nallreduce\n" in notes(), "no first collective on its own card"
    summed = torch.full((2,), rank + 1.0, device=boot.device)
    torch.distributed.all_reduce(summed)
    assert summed.tolist() == [3.0, 3.0]
    device.seed(7)
    assert "seed 7" in notes()
    assert device.memory().free < device.memory().total
    torch.distributed.all_reduce(summed)
    process_group.keep_alive(boot.device)
    torch.distributed.all_reduce(summed)
    process_group.destroy_process_group()
    assert notes().endswith("left\n"), "it has not left the group"
    assert ("mark_step" in notes()) == (os.environ.get("PT_HPU_LAZY_MODE") != "0"), "mark_step belongs to lazy mode"
    assert not left_out(), f"never imported: {left_out()}"


def run_rank(rank: int, case: dict[str, Any], directory: Path) -> int:
    """Fork a rank. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(LIMIT_S)
    outcome = KEPT
    try:
        be_rank(rank, case, directory)
    except BaseException:  # noqa: BLE001 - the test judges it
        outcome = traceback.format_exc()
    (directory / f"outcome-{rank}").write_text(outcome)
    os._exit(outcome != KEPT)


def run_case(case: dict[str, Any]) -> list[str]:
    """Run a group; when one of its ranks has failed, the others are killed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = {run_rank(rank, case, directory): rank for rank in range(RANKS)}
        outcomes = ["killed when another rank failed"] * RANKS
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
            with contextlib.suppress(FileNotFoundError):
                outcomes[rank] = (directory / f"outcome-{rank}").read_text()
        return outcomes


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).with_name("stubs")))
    json.dump([run_case(case) for case in json.load(sys.stdin)], sys.stdout)
