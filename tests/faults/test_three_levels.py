"""A front end starts a driver, which starts workers: whichever is killed, none of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepcast.bus.endpoints import sweep
from tests.harness import process_has_ended, wait_until

DRIVER = """
import sys, threading
from stepcast import Executor, ExecutorConfig
failed = threading.Event()
config = ExecutorConfig(
    worker="stepcast.workers.echo:Echo", world_size=2, watch_parent=True, restart=sys.argv[1], max_restarts=1,
    restart_backoff_s=600.0, stop_timeout_s=1.0,
)
with Executor(config, on_failure=lambda error: failed.set()) as executor:
    print(executor.step(0), *executor.worker_pids, flush=True)
    failed.wait()
"""
FRONT_END = """
import os, subprocess, sys
driver = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
print(os.getpid(), driver.pid, flush=True)
driver.wait()
"""


@pytest.mark.parametrize("restart", ["never", "on_failure"])
@pytest.mark.parametrize("level", ["front end", "driver", "worker"])
def test_nothing_is_left_whatever_is_killed(level: str, restart: str) -> None:
    """A driver that serves a front end says `watch_parent`, and ends with it, whether it is restarted or not."""
    command = [sys.executable, "-c", FRONT_END, DRIVER, restart]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        answer, *workers = process.stdout.readline().split()
        assert answer == "0"
        pids += map(int, workers)
        front_end, driver, worker, _ = pids
        os.kill({"front end": front_end, "driver": driver, "worker": worker}[level], signal.SIGKILL)
        wait_until(lambda: all(map(process_has_ended, pids[1:])), 5.0)
        process.wait(5.0)
    sweep(Path(os.environ["TMPDIR"]))  # as the next run would: a driver that was killed can't remove its directory
