"""Two network namespaces as two hosts, and the link between them: it is cut for a while, and heals."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.two_hosts import TwoHosts, two_hosts

SCRIPT = Path(__file__).with_name("over_a_link.py")
STEPS, CUT_AFTER = 60, 20
CUT_S = 2.0
LIMIT_S = 30.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def start(stack: ExitStack, hosts: TwoHosts, host: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Run the script on one of them."""
    command = hosts.command(host, sys.executable, str(SCRIPT), *arguments)
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
    stack.callback(process.kill)
    return process


def hear(process: subprocess.Popen[bytes]) -> str:
    """The next line that a process says, which must come soon."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT_S)[0], "it says nothing"
    return process.stdout.readline().decode().strip()


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")


def test_a_link_that_is_cut_for_a_while_loses_nothing(hosts: TwoHosts) -> None:
    """Steps and answers wait for it to heal; none is missed, and no connection ends."""
    with ExitStack() as stack:
        driver = start(stack, hosts, 0, "driver", hosts.addresses[0], str(STEPS))
        rank = start(stack, hosts, 1, "rank", str(STEPS))
        tell(rank, hear(driver))
        tell(driver, hear(rank))
        for step in range(1, CUT_AFTER + 1):
            tell(driver, "next")
            assert hear(driver) == f"answered {step}"
        hosts.cut()
        for _ in range(CUT_AFTER, STEPS):
            tell(driver, "next")
        time.sleep(CUT_S)  # that is how long it is cut
        assert not select.select([driver.stdout], [], [], 0)[0], "a step went over a link that is cut"
        hosts.heal()
        for step in range(CUT_AFTER + 1, STEPS + 1):
            assert hear(driver) == f"answered {step}"
        assert (hear(driver), hear(rank)) == ("lost nothing", "took all")
        assert (driver.wait(LIMIT_S), rank.wait(LIMIT_S)) == (0, 0)
