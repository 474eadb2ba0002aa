"""Two network namespaces as two hosts, and the link between them: it is cut for a while, and heals."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("over_a_link.py")
STEPS, CUT_AFTER = 60, 20
CUT_S = 2.0
LIMIT_S = 30.0
DRIVER_ADDRESS, RANK_ADDRESS = "10.213.7.1", "10.213.7.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=LIMIT_S)


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces, joined by a pair of interfaces."""

    driver: str
    rank: str
    interface: str

    def start(self, stack: ExitStack, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Run the script in one of them."""
        process = stack.enter_context(
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        )
        stack.callback(process.kill)
        return process


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the ip command")
    tag = secrets.token_hex(3)
    made = Hosts(f"scd{tag}", f"scr{tag}", f"sc{tag}")
    with ExitStack() as stack:
        try:
            ip("netns", "add", made.driver)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        stack.callback(ip, "netns", "delete", made.driver)
        ip("netns", "add", made.rank)
        stack.callback(ip, "netns", "delete", made.rank)
        # The pair ends with its namespaces.
        ip("-n", made.driver, "link", "add", made.interface, "type", "veth", "peer", "eth0", "netns", made.rank)
        ip("-n", made.driver, "address", "add", f"{DRIVER_ADDRESS}/24", "dev", made.interface)
        ip("-n", made.rank, "address", "add", f"{RANK_ADDRESS}/24", "dev", "eth0")
        ip("-n", made.driver, "link", "set", made.interface, "up")
        ip("-n", made.rank, "link", "set", "eth0", "up")
        yield made


def hear(process: subprocess.Popen[bytes]) -> str:
    """The next line that a process says, which must come soon."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT_S)[0], "it says nothing"
    return process.stdout.readline().decode().strip()


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")


def test_a_link_that_is_cut_for_a_while_loses_nothing(hosts: Hosts) -> None:
    """Steps and answers wait for it to heal; none is missed, and no connection ends."""
    with ExitStack() as stack:
        driver = hosts.start(stack, hosts.driver, "driver", DRIVER_ADDRESS, str(STEPS))
        rank = hosts.start(stack, hosts.rank, "rank", str(STEPS))
        tell(rank, hear(driver))
        tell(driver, hear(rank))
        for step in range(1, CUT_AFTER + 1):
            tell(driver, "next")
            assert hear(driver) == f"answered {step}"
        ip("-n", hosts.driver, "link", "set", hosts.interface, "down")
        for _ in range(CUT_AFTER, STEPS):
            tell(driver, "next")
        time.sleep(CUT_S)  # that is how long it is cut
        assert not select.select([driver.stdout], [], [], 0)[0], "a step went over a link that is cut"
        ip("-n", hosts.driver, "link", "set", hosts.interface, "up")
        for step in range(CUT_AFTER + 1, STEPS + 1):
            assert hear(driver) == f"answered {step}"
        assert (hear(driver), hear(rank)) == ("lost nothing", "took all")
        assert (driver.wait(LIMIT_S), rank.wait(LIMIT_S)) == (0, 0)
