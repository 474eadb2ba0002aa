"""Fails a test that leaves something behind: a process, a thread, a descriptor, a file or shared memory.

What was left is cleaned up, so that no later test is blamed for it.

Each test runs with its own short temporary directory and with a mark in its environment. A process that carries the
mark was started by that test, even if its parent has died since and it is no longer among our children.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

#: How long a test's processes, threads and descriptors may take to go away after it.
GRACE_S = 5.0
#: The variable that marks the processes of a test.
MARK = "STEPCAST_TEST_ID"

_POLL_INTERVAL_S = 0.02
_SHARED_MEMORY = Path("/dev/shm")
_SESSION = f"{os.getpid()}-{os.urandom(6).hex()}"
#: arg_start to env_end in /proc/PID/stat: where the kernel laid the program's arguments, at random.
_LAYOUT_FIELDS = slice(45, 49)


@dataclass(frozen=True)
class Snapshot:
    """What a process holds at one moment."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def take(cls, mark: str) -> Snapshot:
        """Look at this process and at all that carry the mark."""
        return cls(
            frozenset(_our_processes(mark)),
            frozenset(threading.enumerate()),
            Counter(target for _, target in _descriptors()),
            frozenset(path.name for path in _SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else frozenset(),
        )


@dataclass
class Leaks:
    """What is there now and was not before."""

    processes: list[psutil.Process] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)

    @classmethod
    def between(cls, before: Snapshot, mark: str, directory: Path) -> Leaks:
        """Compare with what is there now."""
        now = Snapshot.take(mark)
        return cls(
            processes=sorted(now.processes - before.processes, key=lambda each: each.pid),
            threads=[each for each in now.threads - before.threads if each.is_alive()],
            descriptors=sorted((now.descriptors - before.descriptors).elements()),
            files=sorted(
                str(Path(parent, name).relative_to(directory))
                for parent, directories, files in os.walk(directory)
                for name in directories + files
            ),
            shared_memory=sorted(
                name for name in now.shared_memory - before.shared_memory if not _is_held_by_others(name, mark)
            ),
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.threads or self.descriptors or self.files or self.shared_memory)

    def describe(self) -> list[str]:
        """Tell of each leak on a line of its own."""
        return [
            *(f"process {_describe_process(each)}" for each in self.processes),
            *(f"thread {each.name!r}{' (daemon)' if each.daemon else ''}" for each in self.threads),
            *(f"descriptor of {target}" for target in self.descriptors),
            *(f"file {path} in the temporary directory" for path in self.files),
            *(f"shared memory {name}" for name in self.shared_memory),
        ]

    def clean_up(self) -> None:
        """End the processes and delete the shared memory. Threads and descriptors can only be forgiven."""
        for each in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)  # refuses when the pid has become another's
        deadline = time.monotonic() + GRACE_S
        while any(_is_there(each) for each in self.processes) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        for name in self.shared_memory:
            with contextlib.suppress(OSError):
                (_SHARED_MEMORY / name).unlink()


@pytest.fixture(scope="session", autouse=True)
def session_guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepares the session for `leak_guard`, and finds what module and session fixtures leave running."""
    # These outlive the test that needs them first.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    resource_tracker.ensure_running()
    mark = f"{_SESSION}-session"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("STEPCAST_")]:
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")  # no test downloads anything
        patch.setenv(MARK, mark)
        yield
    left = [each for each in _marked_processes(mark) if _is_there(each)]
    if left:
        described = [_describe_process(each) for each in left]
        Leaks(processes=left).clean_up()
        pytest.fail("module or session fixtures left processes:\n  " + "\n  ".join(described), pytrace=False)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, session_guard: None) -> Iterator[None]:
    """Fails the test, after the teardown of its other fixtures, for what it leaves behind."""
    mark = f"{_SESSION}-{os.urandom(6).hex()}"
    # Socket paths in it have to stay within 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="sc-", dir="/tmp"))
    before = Snapshot.take(mark)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
            patch.setenv(name, str(directory))
        patch.setattr(tempfile, "tempdir", None)  # it remembers an earlier TMPDIR
        yield
    try:
        leaks = _wait_for_none(before, mark, directory)
        described = leaks.describe()
        leaks.clean_up()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if described:
        pytest.fail(f"{request.node.nodeid} left behind:\n  " + "\n  ".join(described), pytrace=False)


def _wait_for_none(before: Snapshot, mark: str, directory: Path) -> Leaks:
    leaks = Leaks.between(before, mark, directory)
    if not leaks:
        return leaks
    _stop_forkserver(leaks)
    deadline = time.monotonic() + GRACE_S
    while leaks and time.monotonic() < deadline:
        gc.collect()  # what only a reference cycle holds is not left behind
        time.sleep(_POLL_INTERVAL_S)
        leaks = Leaks.between(before, mark, directory)
    return leaks


def _stop_forkserver(leaks: Leaks) -> None:
    """Stop multiprocessing's own forkserver, which it would keep for this process's whole life."""
    forkserver: Any = multiprocessing.forkserver._forkserver
    for each in leaks.processes:
        if each.pid == forkserver._forkserver_pid:
            os.kill(each.pid, signal.SIGKILL)  # it would wait for each process that has inherited its pipe
            forkserver._stop()


def _our_processes(mark: str) -> Iterator[psutil.Process]:
    yield from psutil.Process().children(recursive=True)
    yield from _marked_processes(mark)


def _marked_processes(mark: str) -> Iterator[psutil.Process]:
    """Find processes that carry the mark, or that are forks of this one, whose initial environment they show.

    Zombies show none: those of ours are among our children, and others' are for others to reap.
    """
    entry = f"{MARK}={mark}".encode()
    ours = _read(os.getpid(), "environ"), _layout(os.getpid())
    for pid in psutil.pids():
        if pid == os.getpid():
            continue
        environment = _read(pid, "environ")
        if not environment:
            continue
        if entry in environment.split(b"\0") or (environment, _layout(pid)) == ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(pid)


def _layout(pid: int) -> list[bytes]:
    return _read(pid, "stat").rpartition(b")")[2].split()[_LAYOUT_FIELDS]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def _descriptors() -> Iterator[tuple[int, str]]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            yield int(path.name), str(path.readlink())


def _is_held_by_others(name: str, mark: str) -> bool:
    """Tell whether a process that is not ours has this shared memory mapped: then it belongs to somebody else."""
    path = os.fsencode(_SHARED_MEMORY / name)
    ours = {os.getpid(), *(each.pid for each in _our_processes(mark))}
    return any(path in _read(pid, "maps") for pid in psutil.pids() if pid not in ours)


def _is_there(process: psutil.Process) -> bool:
    """Tell whether it runs; reaps it where it is a child of ours that has ended."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(process.pid, os.WNOHANG)[0]:
            return False
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe_process(process: psutil.Process) -> str:
    try:
        status = process.status()
        command = process.name() if status == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended since)"
    return f"{process.pid} ({status}): {command}"
