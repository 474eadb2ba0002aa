"""Where the sockets live: ``ipc://`` endpoints in a private run directory.

A run directory has mode 0700 and a random name. Its owner holds a lock on a file in it for as long as it lives, so that
a later run can tell a dead run's directory from a living one's, across pid namespaces too, and sweep it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

from .errors import ConfigError

#: sun_path holds 108 bytes with its closing zero: unix(7).
MAX_SOCKET_PATH_BYTES = 107
#: A directory without a lock file is swept when it is older than this: its owner may just be creating it.
UNLOCKED_GRACE_S = 60.0

_PREFIX = "stepcast-"
_LOCK = "lock"
_LONGEST_NAME = "replies"
_RANDOM_BYTES = 8  # mkdtemp appends eight characters
_FALLBACKS = ("/tmp", "/var/tmp")  # noqa: S108 - roots for a private 0700 directory of random name


class RunDirectory:
    """A private directory for one run's sockets and files.

    Args:
        root: where to make it; None for the platform's temporary directory. When its path is too long for a socket,
            /tmp and /var/tmp are tried. A root that is given must be a writable directory.

    Raises:
        ConfigError: no directory that is writable and short enough was found.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = _usable_root(root)
        sweep(self.root)
        self.path, self._lock_fd = _create(self.root)
        _held.add(self)

    def endpoint(self, name: str) -> str:
        """Name a socket of this run.

        Args:
            name: the file name, at most as long as "replies".

        Returns:
            An ``ipc://`` endpoint.
        """
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Delete the directory and all that is in it, and let go of its lock. Safe to call again."""
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock_fd)

    def let_go_in_fork(self) -> None:
        """Let go of the lock in a fork of the owner, which must not seem to live for as long as its forks do."""
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd >= 0:
            os.close(lock_fd)


_held: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _let_go_in_fork() -> None:
    for directory in list(_held):
        directory.let_go_in_fork()


os.register_at_fork(after_in_child=_let_go_in_fork)


def sweep(root: Path) -> list[Path]:
    """Delete the run directories that dead runs of this user left behind.

    Args:
        root: the directory that holds run directories.

    Returns:
        The directories that were deleted.
    """
    swept = []
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if _sweep_one(path):
                swept.append(path)
        except OSError:  # swept by another run at the same time, or not ours to judge
            continue
    return swept


def _sweep_one(path: Path) -> bool:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - status.st_mtime <= UNLOCKED_GRACE_S:
            return False
        shutil.rmtree(path)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Still under the lock, so that an owner that is only just locking it sees that it has lost it.
        shutil.rmtree(path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _usable_root(root: str | os.PathLike[str] | None) -> Path:
    wanted = Path(root) if root is not None else Path(tempfile.gettempdir())
    refused = []
    for candidate in (wanted, *map(Path, _FALLBACKS)):
        # A relative root would break in a worker that changes its directory.
        resolved = candidate.absolute()
        longest = len(os.fsencode(resolved)) + 1 + len(_PREFIX) + _RANDOM_BYTES + 1 + len(_LONGEST_NAME)
        if longest > MAX_SOCKET_PATH_BYTES:
            refused.append(f"{resolved} (a socket path in it would have {longest} bytes)")
        elif os.access(resolved, os.W_OK | os.X_OK) and resolved.is_dir():
            return resolved
        else:
            refused.append(f"{resolved} (not a writable directory)")
            if root is not None and candidate is wanted:
                break  # asked for by name: another one would be a surprise
    raise ConfigError(
        f"no directory for the run's sockets: tried {', '.join(refused)}; set run_dir to a writable directory whose "
        f"socket paths stay within {MAX_SOCKET_PATH_BYTES} bytes"
    )


def _create(root: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweeper got in between and is deleting it
            os.close(fd)
            continue
        if path.exists():
            return path, fd
        os.close(fd)
