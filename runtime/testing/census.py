"""What this process and its children hold: processes, threads, descriptors, run directories, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from resource import getpagesize
from typing import Any

from stepcast.workers.death_watch import stat_fields

#: The variable that marks processes.
MARK = "STEPCAST_CHAOS_ID"

_POLL_INTERVAL_S = 0.02
_PPID_FIELD = 1  # in `stat_fields`
#: multiprocessing's own helpers live as long as this process.
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


class Census:
    """What is there now, to compare with what is there later.

    Args:
        root: where run directories are; None for the platform's temporary directory.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = Path(tempfile.gettempdir()) if root is None else root
        self._before = _inventory(self._root)

    def leaks(self, grace_s: float) -> list[str]:
        """Tell what has come since and is there still.

        Args:
            grace_s: how long it may take to go away.

        Returns:
            A line for each.
        """
        deadline = time.monotonic() + grace_s
        while (left := _inventory(self._root) - self._before) and time.monotonic() < deadline:
            gc.collect()  # what only a reference cycle holds is not left behind
            time.sleep(_POLL_INTERVAL_S)
        return sorted(left.elements())


def resident_mib() -> float:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * getpagesize() / (1 << 20)


def _inventory(root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in _descendants(os.getpid()):
        if not any(name in _read(pid, "cmdline") for name in _HELPERS):
            found[f"process {pid}"] += 1
    found.update(f"thread {thread.name!r}" for thread in threading.enumerate())
    pipes = {str(fd) for fd in _helpers_pipes()}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            if path.name not in pipes:
                found[f"descriptor of {path.readlink()}"] += 1
    found.update(f"run directory {path}" for path in root.glob("stepcast-*") if _is_ours(path))
    return found


def _helpers_pipes() -> list[int | None]:
    """This process's ends of the pipes to multiprocessing's helpers, where these run."""
    tracker: Any = resource_tracker
    server: Any = forkserver
    return [tracker._resource_tracker._fd, server._forkserver._forkserver_alive_fd]  # noqa: SLF001 - no public way


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid()
    return False


def children_of(pid: int) -> list[int]:
    """Find a process's children, those included that nobody has reaped."""
    return _children().get(pid, [])


def _descendants(root: int) -> list[int]:
    children = _children()
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _children() -> dict[int, list[int]]:
    """Those of every process that has any."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat_fields(path)
            children.setdefault(int(fields[_PPID_FIELD]), []).append(int(path.name))
    return children


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def marked(mark: str) -> list[int]:
    """Find the processes that were started with a mark in their environment, or by one that was.

    Args:
        mark: the value of `MARK` there.

    Returns:
        The ids of those that have not ended.
    """
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if has_variable(pid, MARK, mark)]


def has_variable(pid: int, name: str, value: str) -> bool:
    """Tell whether a living process was started with a variable in its environment, or forked from one that was.

    Args:
        pid: its id.
        name, value: the variable's.
    """
    return f"{name}={value}".encode() in _read(pid, "environ").split(b"\0")
