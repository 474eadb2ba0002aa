"""A Ray cluster for the tests, and what is left in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.harness import wait_until

_START_WITHIN_S = 60.0
#: Ray's own processes come and go; these are there for a group.
_OURS = ("ray::RankActor", "stepcast.workers.boot", "stepcast.runtime.launch.ray_broker")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
#: Prints what a driver sees of the cluster.
_LOOK = """
import json, logging, ray
from ray._private.state import actors
ray.init(configure_logging=False, logging_level=logging.ERROR, log_to_driver=False)
print(json.dumps({
    "actors": [each["State"] for each in actors().values() if each["State"] != "DEAD"],
    "groups": [each["state"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"],
    "free": ray.available_resources().get("CPU", 0.0),
}))
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        address: its address, for RAY_ADDRESS.
        session: the session of all its processes.
    """

    address: str
    session: int

    def look(self) -> dict[str, Any]:
        """Tell the states of the actors and placement groups that there are, and the free CPUs."""
        environment = {**os.environ, **_QUIET, "RAY_ADDRESS": self.address}
        done = subprocess.run(
            [sys.executable, "-c", _LOOK], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        seen: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
        return seen

    def raylets(self) -> list[psutil.Process]:
        """Find the processes that are its nodes."""
        return [each for each in processes("/raylet/raylet") if os.getsid(each.pid) == self.session]


def processes(*words: str) -> list[psutil.Process]:
    """Find processes that were started by this Python, in whose command line one of the words is."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(each.cmdline())
            is_here = each.environ().get("STEPCAST_TESTS_PYTHON") == sys.executable
            if is_here and any(word in command for word in words):
                found.append(each)
    return found


def wait_for_nothing_left(timeout_s: float = 5.0) -> None:
    """Wait until no process of a group is there, on whatever node."""
    wait_until(lambda: not processes(*_OURS), timeout_s, lambda: f"the end of {processes(*_OURS)}")


@contextlib.contextmanager
def running_cluster(cpus: int, nodes: int = 1) -> Iterator[Cluster]:
    """Run a cluster, each of whose nodes has some CPUs. Its processes are no children of this one."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    common = ["--block", "--disable-usage-stats", f"--num-cpus={cpus}", "--object-store-memory=80000000"]
    common += ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0"]
    head = ["--head", "--port=0", f"--temp-dir={directory}", "--include-dashboard=false"]
    sessions = []
    try:
        sessions.append(_start([*head, *common], directory / "head.log"))
        file = directory / "ray_current_cluster"
        told = lambda: (directory / "head.log").read_text(encoding="utf-8")  # noqa: E731
        wait_until(file.exists, _START_WITHIN_S, told)
        address = wait_until(lambda: file.read_text(encoding="utf-8").strip(), _START_WITHIN_S, told)
        for number in range(1, nodes):
            log = directory / f"node-{number}.log"
            sessions.append(_start([f"--address={address}", *common], log))
        cluster = Cluster(address, sessions[0])
        wait_until(lambda: "started" in told(), _START_WITHIN_S, told)
        if nodes > 1:
            wait_until(lambda: cluster.look()["free"] == cpus * nodes, _START_WITHIN_S, "the other nodes")
        yield cluster
    finally:
        for session in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        wait_until(lambda: not processes(*_OURS, str(directory)), 10.0, "the end of the cluster")
        shutil.rmtree(directory)


def _start(arguments: list[str], log: Path) -> int:
    """Start a node, by a process that ends at once, so that it is nobody's child. Returns its session's id."""
    code = (
        "import subprocess, sys\n"
        "with open(sys.argv[1], 'wb') as log:\n"
        "    node = subprocess.Popen(sys.argv[2:], stdin=-3, stdout=log, stderr=log, start_new_session=True)\n"
        "print(node.pid)\n"
        "node.returncode = 0\n"
    )
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, str(log), *command],
        env={**os.environ, **_QUIET},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return int(done.stdout)
