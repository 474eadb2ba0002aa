"""A torchrun group over two hosts: the link is cut and heals, one host goes, the secret differs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import process_has_ended, wait_until
from tests.two_hosts import TwoHosts, two_hosts

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("on_two_hosts.py")
PORT = "29400"  # of a network that is the test's own
RANKS_EACH = 2
START_WITHIN_S = 60.0
CUT_S = 2.0
LIMIT_S = 30.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


class Job:
    """torchrun on each of the hosts, with the program."""

    def __init__(self, stack: ExitStack, hosts: TwoHosts, directory: Path, secret_files: tuple[Path, Path]) -> None:
        self.directory = directory
        self.agents = []
        for host, secret_file in enumerate(secret_files):
            environment = os.environ | {
                "STEPCAST_SECRET_FILE": str(secret_file),
                "GLOO_SOCKET_IFNAME": hosts.interfaces[host],
                "TMPDIR": str(directory),
            }
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}", "--rdzv-id", "job"]
            # Else torchrun would look for its own host's name among the addresses, which has none here.
            command += ["--rdzv-conf", f"is_host={int(host == 0)}", "--nproc-per-node", str(RANKS_EACH)]
            command += ["--local-addr", hosts.addresses[host], str(PROGRAM), str(directory)]
            with (directory / f"output-{host}").open("w") as output:
                agent = stack.enter_context(
                    subprocess.Popen(
                        hosts.command(host, *command),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
            stack.callback(self._end, agent)
            self.agents.append(agent)

    def note(self, name: str) -> Any:
        path = self.directory / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, name: str, timeout_s: float) -> Any:
        return wait_until(lambda: self.note(name), timeout_s, lambda: f"the note {name}:\n{self.output}")

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("output-*")))

    def wait_for_count(self, more: int) -> None:
        """Wait until some more steps were answered."""
        wanted = (self.note("count") or 0) + more
        wait_until(lambda: (self.note("count") or 0) >= wanted, LIMIT_S, lambda: f"step {wanted}:\n{self.output}")

    def ranks_of(self, agent: int) -> set[int]:
        """The ranks' processes that an agent has started."""
        own = self.agents[agent].pid
        listing = subprocess.run(["ps", "-eo", "pid,ppid"], check=True, capture_output=True, text=True).stdout
        parents = {int(pid): int(ppid) for pid, ppid in (line.split() for line in listing.splitlines()[1:])}
        return {pid for pid in self.note("pids") if parents.get(pid) == own}

    @staticmethod
    def _end(agent: subprocess.Popen[bytes]) -> None:
        """SIGTERM, which an agent forwards to its ranks; one that does not end is killed."""
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            agent.kill()


def secret_file(directory: Path, name: str) -> Path:
    path = directory / name
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@pytest.mark.slow
def test_a_group_over_two_hosts_outlives_a_cut_and_ends_with_one_of_them(hosts: TwoHosts, tmp_path: Path) -> None:
    """No step is lost to the cut. When a host goes for good, the driver says so, and each side's ranks end."""
    secret = secret_file(tmp_path, "secret")
    with ExitStack() as stack:
        job = Job(stack, hosts, tmp_path, (secret, secret))
        pids = job.wait_for("pids", START_WITHIN_S)
        job.wait_for_count(10)
        ranks = [job.ranks_of(agent) for agent in range(2)]
        assert sorted(map(len, ranks)) == [RANKS_EACH - 1, RANKS_EACH], "rank 0 is the driver's child, not an agent's"

        hosts.cut()
        with pytest.raises(AssertionError, match="waited 2 s"):
            wait_until(lambda: job.note("ended-0"), CUT_S)
        hosts.heal()
        job.wait_for_count(50)
        assert job.note("ended-0") is None

        hosts.cut()
        ended = job.wait_for("ended-0", LIMIT_S)
        assert ended.startswith("WorkerLost: rank "), ended
        assert "is lost: it has answered no heartbeat" in ended
        wait_until(lambda: all(map(process_has_ended, pids)), LIMIT_S, lambda: f"the ranks' end:\n{job.output}")
        hosts.heal()


def test_hosts_with_different_secrets_do_not_meet(hosts: TwoHosts, tmp_path: Path) -> None:
    """The error names the secret, and nobody hangs."""
    with ExitStack() as stack:
        job = Job(stack, hosts, tmp_path, (secret_file(tmp_path, "one"), secret_file(tmp_path, "other")))
        ended = job.wait_for("ended-0", START_WITHIN_S)
        assert ended.startswith("ProtocolError: "), ended
        assert "is not sealed with this host's secret" in ended
