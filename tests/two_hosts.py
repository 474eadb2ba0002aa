"""Two network namespaces as two hosts, and the link between them. They share this host's files and processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

LIMIT_S = 30.0
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class TwoHosts:
    """Two network namespaces, joined by a pair of interfaces.

    Attributes:
        names: of the namespaces.
        interfaces: the end of the link in each.
        addresses: of these.
    """

    names: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str] = ADDRESSES

    def command(self, host: int, *command: str) -> Sequence[str]:
        """Put together what runs a command on one of them."""
        return ("ip", "netns", "exec", self.names[host], *command)

    def cut(self) -> None:
        """Cut the link: nothing arrives, and nothing tells either side."""
        ip("-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def heal(self) -> None:
        """Let it carry again."""
        ip("-n", self.names[0], "link", "set", self.interfaces[0], "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=LIMIT_S)


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts, and remove them. Skips the test where that can't be done."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the ip command")
    tag = secrets.token_hex(3)
    made = TwoHosts((f"sca{tag}", f"scb{tag}"), (f"sc{tag}", f"sd{tag}"))
    with contextlib.ExitStack() as stack:
        try:
            ip("netns", "add", made.names[0])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        stack.callback(ip, "netns", "delete", made.names[0])
        ip("netns", "add", made.names[1])
        stack.callback(ip, "netns", "delete", made.names[1])
        # The pair ends with its namespaces.
        first, second = made.interfaces
        ip("-n", made.names[0], "link", "add", first, "type", "veth", "peer", second, "netns", made.names[1])
        for name, interface, address in zip(made.names, made.interfaces, made.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield made
