"""Run by torchrun on two hosts: steps with a collective in each, of which rank 0 keeps a count in a file.

Arguments: the directory for what is noted. Rank 0 notes its ranks' process ids and its count; each rank notes the error
that ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from stepcast import Executor, ExecutorConfig, RankInfo, StepcastError, Worker

_INTERVAL_S = 0.02


class Sums(Worker):
    """Adds its rank to those of all others."""

    def setup(self, rank: RankInfo) -> None:
        from stepcast.workers.process_group import init_process_group  # noqa: PLC0415

        self.rank = rank.rank
        init_process_group(rank)

    def execute(self, step: Any) -> list[float]:
        import torch  # noqa: PLC0415

        total = torch.full((1,), float(self.rank))
        torch.distributed.all_reduce(total)
        return [step, total.item()]

    def teardown(self) -> None:
        from stepcast.workers.process_group import destroy_process_group  # noqa: PLC0415

        destroy_process_group()


def note(directory: Path, name: str, value: object) -> None:
    """Write a note, whole or not at all."""
    (directory / f"{name}.new").write_text(json.dumps(value))
    (directory / f"{name}.new").rename(directory / name)


def main() -> None:
    """Start the group, and take steps."""
    directory = Path(sys.argv[1])
    config = ExecutorConfig.load(
        worker=Sums, heartbeat_interval_s=0.5, lost_timeout_s=6.0, startup_timeout_s=60.0, log_level="WARNING"
    )
    try:
        executor = Executor(config)
    except StepcastError as error:
        note(directory, f"ended-{os.environ['RANK']}", f"{type(error).__name__}: {error}")
        raise
    with executor:
        note(directory, "pids", executor.worker_pids)
        try:
            take_steps(executor, directory)
        except StepcastError as error:
            # Now: where a rank has ended, the agent soon ends this process.
            note(directory, "ended-0", f"{type(error).__name__}: {error}")
            raise


def take_steps(executor: Executor, directory: Path) -> None:
    """Take steps until the group fails."""
    world_size = executor.config.world_size
    for count in itertools.count(1):
        assert executor.step(count, gather=True) == [[count, sum(range(world_size))]] * world_size
        note(directory, "count", count)
        time.sleep(_INTERVAL_S)


if __name__ == "__main__":
    main()
