"""Runs `stepcast` as a user does: in a process of its own.

Its exit code, its two streams, its signals and its logging are what is tested, and none of them is itself when the
command runs inside pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "stepcast")
TIMEOUT_S = 100


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with some changes.

    Wide, so that no message is wrapped.
    """
    return {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", **changes}


def stepcast(*arguments: str, command: tuple[str, ...] = COMMAND, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end.

    Args:
        arguments: what follows `stepcast`.
        command: how it is started.
        variables: of its environment.
    """
    return subprocess.run(
        [*command, *arguments],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command, and end it in any case."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that the command has written to stderr; it wrote nothing to stdout."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
