"""Rank 0 of two, in the parent, and rank 1, its child: `fork_at_exit.py METHOD LEAVES`. Prints the child's process id.

Both make a group on the stand-in for Gaudi cards, compute, and end; with LEAVES they leave the group before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys


def be_rank(rank: int, leaves: bool) -> None:
    """Compute once with the other rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import torch  # noqa: PLC0415, I001 - first, as everybody does
    import habana_frameworks.torch  # noqa: F401, PLC0415

    where = f"file://{os.environ['STUB_HPU_DIR']}/rendezvous"
    torch.distributed.init_process_group("hccl", init_method=where, world_size=2, rank=rank)
    total = torch.ones(1, device="hpu")
    torch.distributed.all_reduce(total)
    assert total.item() == 2
    if leaves:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    method, leaves = sys.argv[1], sys.argv[2] == "leaves"
    # As executors do whose driver is rank 0: the child first, then the device.
    child = multiprocessing.get_context(method).Process(target=be_rank, args=(1, leaves))
    child.start()
    print(child.pid, flush=True)
    be_rank(0, leaves)
