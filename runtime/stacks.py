"""Stack dumps of ranks that are stuck, before they are killed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stepcast.bus.liveness import Phase, RankLiveness
from stepcast.workers.responder import DUMP_SIGNAL

from . import procfs
from .launch.process import WorkerProcess

#: Where a rank has not armed the signal yet, or has ended.
_CAN_NOT = frozenset({Phase.SPAWNING, Phase.STARTING, Phase.GONE})

_log = logging.getLogger("stepcast.runtime")


def dump(processes: Sequence[WorkerProcess], liveness: Sequence[RankLiveness], now: float) -> bool:
    """Have ranks write their stacks to stderr, and so to the log. It needs no GIL of theirs.

    Args:
        processes: the ranks' processes.
        liveness: what was last heard of each rank.
        now: the clock's reading.

    Returns:
        Whether there is something to wait for.
    """
    asked = False
    for process in processes:
        if liveness[process.rank].phase in _CAN_NOT:
            continue
        sample = procfs.read(process.pid, now)
        if sample is not None and sample.state in "Tt":
            _log.warning(
                "rank %d (pid %d) is stopped (state %s), and can give no stack", process.rank, process.pid, sample.state
            )
            continue
        process.send_signal(DUMP_SIGNAL)
        asked = True
    return asked
