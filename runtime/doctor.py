"""What this host offers a group, and whether one can start here: a report for people and programs.

Everything is looked up where it can be without importing torch; whether a backend works is told by starting a group.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import re
import resource
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from stepcast.bus.endpoints import MAX_SOCKET_PATH_BYTES, RunDirectory
from stepcast.bus.errors import ConfigError

from .config import START_METHODS, ExecutorConfig
from .platforms import Host, Platform, choose_platform, detect_platforms, package_version
from .trial import Trial, try_backends

_PACKAGES = ("stepcast", "pyzmq", "msgpack", "torch", "structlog", "transformers")
#: The extras that users install; the others are for work on stepcast itself.
_EXTRAS = ("cli", "causal-lm")
#: Where `RunDirectory` goes when the directory that was asked for won't do.
_FALLBACK_ROOTS = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - only looked at


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What there is to compute on.

    Attributes:
        cores: the host's cores.
        usable: those that this process may run on.
        quota: how many cores' time its control group may use; None where that is not limited.
    """

    cores: int
    usable: Sequence[int]
    quota: float | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory, in bytes.

    Attributes:
        total: the host's.
        available: what can be used without swapping.
        limit: the control group's limit; None where there is none.
    """

    total: int
    available: int
    limit: int | None


@dataclass(frozen=True, kw_only=True)
class RunDirectoryReport:
    """Where a run's sockets would live.

    Attributes:
        root: the directory that holds run directories; None where none will do.
        writable: whether it will do.
        mode: the mode of a run directory in it, in octal.
        longest_socket_path_bytes: the length of the longest socket path in it.
        limit_bytes: the longest that the kernel takes.
        stale: directories that dead runs had left there. They have been deleted, as the next start would have done.
        problem: why none will do.
    """

    root: str | None
    writable: bool
    mode: str | None
    longest_socket_path_bytes: int | None
    limit_bytes: int
    stale: Sequence[str]
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit that the kernel sets this process; None is no limit.

    Attributes:
        soft: the limit.
        hard: what it may be raised to.
    """

    soft: int | None
    hard: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that `stepcast doctor` tells.

    Attributes:
        ok: whether the backends "mp" and "uni" both work.
        platform: the kind of device that would be used.
        platforms: every kind that was found.
        packages: the version of each package that matters, and of Python and libzmq; None where it is missing.
        missing: for each extra the packages of it that are not installed.
        processors, memory, run_directory: as their classes say.
        limits: "open_files" and "processes".
        kernel: its release, and which of the features that stepcast uses it has.
        start_methods: the ways of starting processes that this system has.
        backends: for each backend, whether it can start, and why not.
    """

    ok: bool
    platform: str
    platforms: Sequence[Platform]
    packages: Mapping[str, str | None]
    missing: Mapping[str, Sequence[str]]
    processors: Processors
    memory: Memory
    run_directory: RunDirectoryReport
    limits: Mapping[str, Limit]
    kernel: Mapping[str, str | bool]
    start_methods: Sequence[str]
    backends: Mapping[str, Trial]


def examine(config: ExecutorConfig, host: Host | None = None) -> Report:
    """Look at this host, and start a small group on each backend.

    Args:
        config: the settings that a group would have.
        host: where to look; None for this host.

    Returns:
        The report.
    """
    host = host or Host()
    platforms = detect_platforms(host)
    run_directory = examine_run_directory(config.run_dir)  # before a group sweeps it
    backends = try_backends(config)
    return Report(
        ok=all(backends[name].available for name in ("mp", "uni")),
        platform=choose_platform(platforms).name,
        platforms=platforms,
        packages=packages(host.version),
        missing=missing_packages(host.version),
        processors=processors(host.root),
        memory=memory(host.root),
        run_directory=run_directory,
        limits={"open_files": _limit(resource.RLIMIT_NOFILE), "processes": _limit(resource.RLIMIT_NPROC)},
        kernel=kernel(),
        start_methods=[name for name in START_METHODS if name in multiprocessing.get_all_start_methods()],
        backends=backends,
    )


def packages(version: Callable[[str], str | None] = package_version) -> dict[str, str | None]:
    """Return the versions of what stepcast is made of.

    Args:
        version: returns a package's version; None where it is not installed.
    """
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "libzmq": zmq.zmq_version(),
    }


def missing_packages(version: Callable[[str], str | None] = package_version) -> dict[str, list[str]]:
    """Return, for each extra that users install, the packages of it that are missing.

    Args:
        version: returns a package's version; None where it is not installed.
    """
    try:
        requirements = importlib.metadata.requires("stepcast") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources alone
        requirements = []
    missing: dict[str, list[str]] = {extra: [] for extra in _EXTRAS}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra *== *["']([\w-]+)""", requirement)
        if name and extra and extra[1] in missing and version(name[0]) is None:
            missing[extra[1]].append(name[0])
    return missing


def processors(root: Path = Path("/")) -> Processors:
    """Count the cores.

    Args:
        root: the file system's root.
    """
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return Processors(
        cores=os.cpu_count() or 1,
        usable=sorted(os.sched_getaffinity(0)),
        quota=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
    )


def memory(root: Path = Path("/")) -> Memory:
    """Measure the memory.

    Args:
        root: the file system's root.
    """
    kibibytes = dict(re.findall(r"^(\w+): +(\d+) kB$", _read(root / "proc/meminfo"), flags=re.MULTILINE))
    limit = _read(root / "sys/fs/cgroup/memory.max")
    return Memory(
        total=int(kibibytes.get("MemTotal", 0)) << 10,
        available=int(kibibytes.get("MemAvailable", 0)) << 10,
        limit=int(limit) if limit.isdigit() else None,
    )


def examine_run_directory(wanted: str | None) -> RunDirectoryReport:
    """Make a run directory as a group would, look at it, and delete it.

    Args:
        wanted: the directory that is to hold it; None for the platform's temporary directory.
    """
    roots = (Path(wanted or tempfile.gettempdir()).absolute(), *_FALLBACK_ROOTS)
    # Making a run directory sweeps those of dead runs: what has gone by then was stale.
    before = {root: set(root.glob("stepcast-*")) for root in roots}
    try:
        directory = RunDirectory(wanted)
    except (ConfigError, OSError) as problem:
        return RunDirectoryReport(
            root=None,
            writable=False,
            mode=None,
            longest_socket_path_bytes=None,
            limit_bytes=MAX_SOCKET_PATH_BYTES,
            stale=(),
            problem=str(problem),
        )
    try:
        longest = max((directory.endpoint(name).removeprefix("ipc://") for name in ("publish", "replies")), key=len)
        return RunDirectoryReport(
            root=str(directory.root),
            writable=True,
            mode=f"{stat.S_IMODE(directory.path.stat().st_mode):04o}",
            longest_socket_path_bytes=len(os.fsencode(longest)),
            limit_bytes=MAX_SOCKET_PATH_BYTES,
            stale=sorted(str(path) for path in before.get(directory.root, ()) if not path.exists()),
            problem=None,
        )
    finally:
        directory.remove()


def kernel() -> dict[str, str | bool]:
    """Try out the features of the kernel that stepcast uses."""
    return {
        "release": platform.release(),
        "pidfd_open": _works(lambda: os.pidfd_open(os.getpid())),
        "eventfd": _works(lambda: os.eventfd(0)),
        "memfd_create": _works(lambda: os.memfd_create("stepcast-doctor")),
    }


def _works(make_descriptor: Callable[[], int]) -> bool:
    try:
        os.close(make_descriptor())
    except (OSError, AttributeError):
        return False
    return True


def _limit(which: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
