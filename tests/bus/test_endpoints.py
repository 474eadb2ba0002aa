"""Run directories: private, short, never shared, and swept once their run is dead."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepcast.bus import endpoints
from stepcast.bus.endpoints import MAX_SOCKET_PATH_BYTES, UNLOCKED_GRACE_S, RunDirectory, sweep
from stepcast.bus.errors import ConfigError
from tests.harness import process_has_ended, wait_until

NOBODY = 65534

#: Makes a run directory, says where, and holds it until its stdin ends.
OWNER = """
import sys
from stepcast.bus.endpoints import RunDirectory
directory = RunDirectory(sys.argv[1])
print(directory.path, flush=True)
sys.stdin.read()
"""

#: Makes 20 run directories in as many processes at the same moment, and ends without removing any.
CROWD = """
import os, sys
from stepcast.bus.endpoints import RunDirectory
children, (gate, opener), (reader, writer) = [], os.pipe(), os.pipe()
for _ in range(20):
    child = os.fork()
    if not child:
        os.close(opener)
        os.read(gate, 1)
        directory = RunDirectory(sys.argv[1])
        os.write(writer, f"{directory.path}\\n".encode())
        sys.stdin.read()
        os._exit(0)
    children.append(child)
os.close(writer)
os.close(opener)
with os.fdopen(reader) as paths:
    for _ in range(20):
        print(paths.readline(), end="", flush=True)
for child in children:
    os.waitpid(child, 0)
"""

#: Makes a run directory as a user who may not write to the root.
STRANGER = f"""
import os, sys
from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import ConfigError
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
try:
    RunDirectory(sys.argv[1])
except ConfigError as problem:
    print(problem)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A short directory that holds nothing but run directories."""
    with tempfile.TemporaryDirectory(prefix="r-") as path:
        yield Path(path)


def run_directories(root: Path) -> list[Path]:
    return sorted(root.glob("stepcast-*"))


def leave_unlocked(root: Path, age_s: float) -> Path:
    """Make a run directory without a lock, as one is for a moment while it is made."""
    path = root / "stepcast-leftover"
    path.mkdir(mode=0o700)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


# --- A directory of one's own ---------------------------------------------------------------------------------------


def test_a_run_directory_is_private(root: Path) -> None:
    """Only its owner may enter the directory or open its lock, whatever the umask."""
    before = os.umask(0)
    try:
        directory = RunDirectory(root)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert [path.name for path in directory.path.iterdir()] == ["lock"]
    assert stat.S_IMODE((directory.path / "lock").stat().st_mode) == 0o600
    directory.remove()


def test_each_run_directory_has_a_random_name(root: Path) -> None:
    """No two are alike, and none can be guessed."""
    directories = [RunDirectory(root) for _ in range(20)]
    names = {directory.path.name for directory in directories}
    assert len(names) == 20
    assert all(re.fullmatch(r"stepcast-[a-z0-9_]{8}", name) for name in names)
    for directory in directories:
        directory.remove()


def test_an_endpoint_lies_in_the_directory_and_can_be_bound(root: Path) -> None:
    """An endpoint names a socket in the directory."""
    directory = RunDirectory(root)
    endpoint = directory.endpoint("replies")
    assert endpoint == f"ipc://{directory.path}/replies"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(endpoint.removeprefix("ipc://"))
    directory.remove()


def test_no_descriptor_of_a_directory_reaches_another_program(root: Path) -> None:
    """A program that the owner starts does not inherit the lock, which would outlive the owner in it."""
    directory = RunDirectory(root)
    assert not os.get_inheritable(directory._lock_fd)
    directory.remove()


def test_a_fork_of_the_owner_holds_nothing(root: Path) -> None:
    """With the owner dead its directory is swept, however long its forks live; in them it can't be removed."""
    directory = RunDirectory(root)
    (reader, writer), (told, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        directory.remove()
        os.write(tell, b"1")
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"1"
        os.close(told)
        assert sweep(root) == []
        os.close(directory._lock_fd)  # as the owner's death does
        directory._lock_fd = -1
        # The fork lets go once it runs.
        assert wait_until(lambda: sweep(root), 4.0) == [directory.path]
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_removing_a_directory_takes_all_that_is_in_it(root: Path) -> None:
    """Sockets, files and folders go with the directory, and its name is free."""
    directory = RunDirectory(root)
    (directory.path / "folder").mkdir()
    (directory.path / "folder" / "file").touch()
    directory.remove()
    assert run_directories(root) == []


def test_removing_twice_is_safe(root: Path) -> None:
    """The second time does nothing, and closes no descriptor that has become another's."""
    directory = RunDirectory(root)
    directory.remove()
    with (root / "other").open("w") as other:  # takes the lock's number
        directory.remove()
        other.write("still open")
    assert (root / "other").read_text() == "still open"


def test_removing_a_directory_that_is_gone_is_safe(root: Path) -> None:
    """Whoever deleted it by hand has done the work."""
    directory = RunDirectory(root)
    (directory.path / "lock").unlink()
    directory.path.rmdir()
    directory.remove()


# --- Where it is made -----------------------------------------------------------------------------------------------


def test_without_a_root_it_lies_in_the_temporary_directory() -> None:
    """TMPDIR decides where nothing else does."""
    directory = RunDirectory()
    assert directory.path.parent == Path(tempfile.gettempdir())
    directory.remove()


@pytest.mark.parametrize("given", [str, Path])
def test_a_root_may_be_a_string_or_a_path(root: Path, given: type) -> None:
    """Both kinds of path are taken."""
    directory = RunDirectory(given(root))
    assert directory.path.parent == root
    directory.remove()


def test_a_relative_root_is_made_absolute(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint is good in a process whose working directory is another."""
    (root / "here").mkdir()
    monkeypatch.chdir(root)
    directory = RunDirectory("here")
    monkeypatch.chdir("/")
    assert directory.path.is_absolute()
    assert directory.path.parent == root / "here"
    assert directory.path.is_dir()
    directory.remove()


def test_an_endpoint_in_the_longest_root_can_be_bound(root: Path) -> None:
    """The longest root that is used leaves room for a socket's path, to the byte."""
    longest = MAX_SOCKET_PATH_BYTES - len("/stepcast-xxxxxxxx/replies")
    deep = root / ("x" * (longest - len(str(root)) - 1))
    deep.mkdir()
    directory = RunDirectory(deep)
    assert directory.path.parent == deep
    path = directory.endpoint("replies").removeprefix("ipc://")
    assert len(os.fsencode(path)) == MAX_SOCKET_PATH_BYTES
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
    directory.remove()


def test_a_root_one_byte_too_long_falls_back(root: Path) -> None:
    """Where the kernel would refuse a socket's path, the directory lies elsewhere."""
    longest = MAX_SOCKET_PATH_BYTES - len("/stepcast-xxxxxxxx/replies")
    deep = root / ("x" * (longest - len(str(root))))
    deep.mkdir()
    directory = RunDirectory(deep)
    assert directory.path.parent == Path("/tmp")
    directory.remove()


def test_the_length_is_counted_in_bytes(root: Path) -> None:
    """A path of few characters may have many bytes."""
    deep = root / ("\N{SNOWMAN}" * 25)
    deep.mkdir()
    directory = RunDirectory(deep)
    assert directory.path.parent == Path("/tmp")
    directory.remove()


def test_a_long_tmpdir_falls_back_to_a_short_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR of 120 characters, as batch systems make them, does not keep a run from starting."""
    deep = root / ("x" * (120 - len(str(root)) - 1))
    deep.mkdir()
    assert len(str(deep)) == 120
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert tempfile.gettempdir() == str(deep)
    directory = RunDirectory()
    assert directory.path.parent == Path("/tmp")
    assert len(os.fsencode(directory.endpoint("replies").removeprefix("ipc://"))) <= MAX_SOCKET_PATH_BYTES
    directory.remove()


def test_where_no_directory_is_short_enough_the_error_names_all_that_were_tried(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says of each directory why it can't be used, and which setting to change."""
    deep = root / ("x" * 100)
    monkeypatch.setattr(endpoints, "_FALLBACKS", (str(root / "gone"), str(root / ("y" * 90))))
    with pytest.raises(ConfigError) as caught:
        RunDirectory(deep)
    message = str(caught.value)
    assert f"{deep} (a socket path in it would have {len(str(deep)) + 26} bytes)" in message
    assert f"{root / 'gone'} (" in message
    assert f"{root / ('y' * 90)} (a socket path" in message
    assert "run_dir" in message


@pytest.mark.parametrize("relative", [False, True])
def test_a_root_that_does_not_exist_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, relative: bool) -> None:
    """A run_dir with a typo is an error that names it: no other directory takes its place."""
    monkeypatch.chdir(root)
    with pytest.raises(ConfigError, match=re.escape(f"tried {root / 'gone'} (not a writable directory); set run_dir")):
        RunDirectory("gone" if relative else root / "gone")


@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_a_root_that_is_a_file_is_refused(root: Path, mode: int) -> None:
    """A run_dir that is no directory is an error that names it, for an executable file too."""
    path = root / "file"
    path.touch(mode)
    with pytest.raises(ConfigError, match=re.escape(f"{path} (not a writable directory)")):
        RunDirectory(path)


def test_a_root_that_may_not_be_written_to_is_refused(root: Path) -> None:
    """A run_dir of somebody else's is an error that names it."""
    root.chmod(0o555)
    result = subprocess.run(
        [sys.executable, "-c", STRANGER, root], capture_output=True, text=True, timeout=60, check=False
    )
    root.chmod(0o700)
    assert result.returncode == 0, result.stderr
    assert f"{root} (not a writable directory)" in result.stdout


# --- Sweeping -------------------------------------------------------------------------------------------------------


def test_the_directory_of_a_killed_run_is_swept_at_the_next_start(root: Path) -> None:
    """SIGKILL leaves a directory behind, and the next run in that root deletes it; while its owner lives it stays."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "publish").touch()
        first = RunDirectory(root)
        assert left.is_dir()
        owner.kill()
    second = RunDirectory(root)
    assert run_directories(root) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def test_a_live_runs_directory_is_kept_however_old_it_is(root: Path) -> None:
    """What counts is the lock, which only the owner's end releases, not the age."""
    directory = RunDirectory(root)
    os.utime(directory.path, (0, 0))
    assert sweep(root) == []
    assert directory.path.is_dir()
    directory.remove()


def test_what_was_swept_is_told(root: Path) -> None:
    """A sweep returns the directories that it deleted, and no others."""
    kept = RunDirectory(root)
    dead = [RunDirectory(root) for _ in range(2)]
    for directory in dead:
        os.close(directory._lock_fd)  # as the kernel does when the owner ends
    assert sorted(sweep(root)) == sorted(directory.path for directory in dead)
    assert run_directories(root) == [kept.path]
    kept.remove()


def test_a_young_directory_without_a_lock_is_kept(root: Path) -> None:
    """Its owner may be just about to lock it."""
    path = leave_unlocked(root, UNLOCKED_GRACE_S / 2)
    assert sweep(root) == []
    assert path.is_dir()


def test_an_old_directory_without_a_lock_is_swept(root: Path) -> None:
    """Its owner died before it could lock it."""
    path = leave_unlocked(root, UNLOCKED_GRACE_S + 10)
    assert sweep(root) == [path]
    assert not path.exists()


def test_a_directory_of_another_user_is_kept(root: Path) -> None:
    """A shared temporary directory holds other users' runs, which are theirs to sweep."""
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    path = leave_unlocked(root, UNLOCKED_GRACE_S + 10)
    os.chown(path, NOBODY, NOBODY)
    assert sweep(root) == []
    assert path.is_dir()


def test_other_things_are_kept(root: Path) -> None:
    """Files and links are none of our directories, and neither is what has another name; none is followed."""
    (root / "precious").mkdir()
    (root / "precious" / "lock").touch()
    (root / "precious" / "file").touch()
    (root / "stepcast-link").symlink_to(root / "precious")
    (root / "stepcast-dangling").symlink_to(root / "gone")
    (root / "stepcast-file").touch()
    os.mkfifo(root / "stepcast-fifo")
    os.utime(root / "precious", (0, 0))
    before = sorted(root.rglob("*"))
    assert sweep(root) == []
    assert sorted(root.rglob("*")) == before
    assert (root / "precious" / "file").exists()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_lock_that_is_a_link_is_not_followed(root: Path, dangling: bool) -> None:
    """A directory whose lock points elsewhere is not ours to judge."""
    path = leave_unlocked(root, UNLOCKED_GRACE_S + 10)
    status = path.stat()
    (path / "lock").symlink_to(root / "elsewhere")
    os.utime(path, (status.st_atime, status.st_mtime))
    if not dangling:
        (root / "elsewhere").touch()
    assert sweep(root) == []
    assert path.is_dir()
    assert (root / "elsewhere").exists() != dangling


def test_an_empty_root_has_nothing_to_sweep(root: Path) -> None:
    """Nothing is swept where nothing is, and where the root itself is missing."""
    assert sweep(root) == []
    assert sweep(root / "gone") == []


# --- Races ----------------------------------------------------------------------------------------------------------


def test_twenty_directories_made_at_once_never_collide(root: Path) -> None:
    """Each run sweeps while the others make their directories: all have their own, and lose it to none."""
    with subprocess.Popen(
        [sys.executable, "-c", CROWD, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as crowd:
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        paths = {Path(crowd.stdout.readline().strip()) for _ in range(20)}
        assert sweep(root) == []
        assert paths == set(run_directories(root))
        assert len(paths) == 20
        assert all((path / "lock").is_file() for path in paths)
        crowd.stdin.close()
        wait_until(lambda: process_has_ended(crowd.pid))
    assert set(sweep(root)) == paths


def test_a_sweeper_that_deletes_a_directory_before_it_is_locked_costs_another_try(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a lock's creation and its locking a sweeper may take the directory: the owner makes another one."""
    swept: list[Path] = []
    flock = fcntl.flock

    def sweep_first(fd: int, operation: int) -> None:
        monkeypatch.undo()
        swept.extend(sweep(root))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    directory = RunDirectory(root)
    assert len(swept) == 1
    assert run_directories(root) == [directory.path]
    assert sweep(root) == []  # and it holds its lock
    directory.remove()


def test_a_sweeper_that_is_at_a_directory_costs_another_try(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory whose lock a sweeper holds is given up, and its descriptor with it."""
    flock = fcntl.flock
    sweepers: list[Any] = []

    def lock_first(fd: int, operation: int) -> None:
        monkeypatch.undo()
        (path,) = run_directories(root)
        sweepers.append((path / "lock").open())
        flock(sweepers[0], operation)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_first)
    directory = RunDirectory(root)
    assert len(run_directories(root)) == 2
    sweepers[0].close()
    assert len(sweep(root)) == 1
    assert run_directories(root) == [directory.path]
    directory.remove()
