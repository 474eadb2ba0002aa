"""`ExecutorConfig`: every setting of a group, validated, from one place."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import msgpack

from stepcast.bus.errors import ConfigError
from stepcast.workers.base import Worker

from .config_sources import from_environment, from_file

BACKENDS = ("mp", "torchrun", "ray", "uni")
START_METHODS = ("spawn", "fork", "forkserver")
RESTARTS = ("never", "on_failure")
KEEPALIVES = ("bus", "collective")
LOG_FORMATS = ("console", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MIB = 1 << 20
_LOST_INTERVALS = 5
#: The kernel's and ZeroMQ's waits are told in milliseconds, as C ints.
_MAX_SECONDS = 2_000_000


def started_by_torchrun() -> bool:
    """Tell whether torchrun has started this process, as one rank of a group."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _default_world_size() -> int:
    try:
        return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1
    except (KeyError, ValueError):
        raise ConfigError("torchrun has set no WORLD_SIZE that is a number: give world_size") from None


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """The settings of a group. Immutable; wrong values raise `ConfigError` when it is built.

    Attributes:
        worker: the worker's class: the class itself, or ``module:Class``, or ``path/to/script.py:Class``.
        world_size: the number of ranks. In a process that torchrun has started, it is by default what torchrun says.
        backend: what runs the ranks: "mp" (a process per rank, on this host), "torchrun" (the processes that torchrun
            has started, of which rank 0 is the driver), "ray" (actors of a Ray cluster) or "uni" (one rank, in this
            process). None chooses: "torchrun" in a process that torchrun has started; else "uni" for a world size of 1
            where neither `restart` nor `watch_parent` asks for processes; else "mp".
        start_method: how "mp" starts its processes: "spawn" (fresh interpreters), "fork" or "forkserver".
        followers_return: what becomes of torchrun's ranks other than 0, which serve the group from where they build
            their `Executor`: False ends their processes there when the group ends, True returns to their program.
        worker_options: plain MessagePack values, handed to each worker as `RankInfo.options`.
        worker_env: environment variables for the worker processes, beside those of this process. Spawned workers
            have them before any module of theirs is imported; torchrun's ranks, from where they build their `Executor`.
        device: the kind of device that workers compute on, one for each rank: "cpu", "cuda", "rocm", "hpu", "xpu", a
            name that another package has registered, or "auto" for the first that this host has and can use.
        output_rank: the rank whose result answers a step.
        max_in_flight: steps that may be under way at once: the window in messages.
        max_in_flight_bytes: the bytes of payload and buffers that may be under way at once: the window in bytes.
        max_message_bytes: the largest message, in bytes of payload and buffers, either way.
        startup_timeout_s: from start until every rank is ready.
        step_timeout_s: from a step's publication until every rank has answered it; past it the group ends.
        call_timeout_s: the same for `call`.
        backpressure_timeout_s: how long a submission waits for room in the windows.
        failure_grace_s: after a rank raised, how long the others have to answer the same step.
        heartbeat_interval_s: seconds without a publication after which a heartbeat is published.
        unresponsive_timeout_s: how long a rank may leave heartbeats unanswered that is stopped, or does not compute, by
            what the kernel says; past it the group ends. None: it only shows in `health()`, and a step's limit ends the
            group. At least three heartbeat intervals.
        lost_timeout_s: how long a rank on another host may leave heartbeats unanswered until it is taken for lost, and
            be without a word of the driver until it ends. At least three heartbeat intervals; None for five.
        secret_file: a file with the secret that the hosts of a group under torchrun share, at least 16 bytes, readable
            by its owner alone; None for the variable STEPCAST_SECRET. Needed for more than one host.
        address: the address of the driver's host at which ranks of other hosts reach it; None chooses: under torchrun
            the one from which its store is reached.
        probe_interval_s: how often the driver publishes PROBE at first; it slows down to once a second.
        reply_timeout_s: how long a worker's reply may wait for the driver to read it; past it the worker ends.
        stop_timeout_s: after STOP, how long the workers have to finish; past it they get SIGTERM.
        terminate_timeout_s: after SIGTERM, how long they have; past it they get SIGKILL.
        kill_timeout_s: after SIGKILL, how long to wait for the kernel to end them.
        dump_timeout_s: how long to wait for stack dumps before a stuck group is ended.
        linger_s: how long a worker's threads, and then its last output, may take to end when it exits.
        collective_timeout_s: the limit of each collective in a worker's torch.distributed process group.
        check_collectives: whether the workers count their collectives, so that ranks that disagree on them are found
            (`Diverged`) and the time waited in them is known.
        keepalive: what an idle group does so that no collective times out: "bus" (nothing: ranks parked on the bus are
            in none), or "collective" (a tiny one every `keepalive_every` heartbeats; needed where ranks park inside a
            broadcast, `Worker.idle`).
        keepalive_every: that number of heartbeat intervals; together at most a third of `collective_timeout_s`.
        restart: what happens when the group has failed: "never" (the executor is done for), or "on_failure" (all its
            processes are replaced, with `setup` again; steps under way fail, and later ones run on the new group). A
            group that does not come up at first is not restarted.
        max_restarts: how many restarts in a row are tried, with no life of `restart_window_s` in between; past them the
            executor is done for.
        restart_window_s: a group that has been ready for so long is as good as new: failures before are forgotten.
        restart_backoff_s: how long to wait before the first restart; each further one in a row waits twice as long as
            the one before, and none for longer than `restart_window_s`.
        restart_wait_s: how long a submission waits for the group to be restarted; its own `timeout_s` bounds it too.
        watch_parent: whether the group ends, and this process gets SIGTERM, when the process that has started this one
            dies. For a driver that serves a front end in another process. `stepcast generate` sets it, where nobody
            has set it and the "mp" backend is used, unless it was started to outlive its shell (nohup).
        run_dir: the directory that holds the run's private directory; None for the platform's temporary directory.
        log_format: "console" or "json": how lines are written where stepcast itself sets logging up (its command line).
        log_level: the level of the workers' own logging.
    """

    worker: str | type[Worker]
    world_size: int = field(default_factory=_default_world_size)
    backend: str | None = None
    start_method: str = "spawn"
    followers_return: bool = False
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    output_rank: int = 0
    max_in_flight: int = 8
    max_in_flight_bytes: int = 256 * _MIB
    max_message_bytes: int = 256 * _MIB
    startup_timeout_s: float = 600.0
    step_timeout_s: float = 300.0
    call_timeout_s: float = 600.0
    backpressure_timeout_s: float = 60.0
    failure_grace_s: float = 0.5
    heartbeat_interval_s: float = 2.0
    unresponsive_timeout_s: float | None = None
    lost_timeout_s: float | None = None
    secret_file: str | None = None
    address: str | None = None
    probe_interval_s: float = 0.02
    reply_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0
    terminate_timeout_s: float = 3.0
    kill_timeout_s: float = 5.0
    dump_timeout_s: float = 0.5
    linger_s: float = 1.0
    collective_timeout_s: float = 600.0
    check_collectives: bool = True
    keepalive: str = "bus"
    keepalive_every: int = 10
    restart: str = "never"
    max_restarts: int = 3
    restart_window_s: float = 600.0
    restart_backoff_s: float = 0.5
    restart_wait_s: float = 60.0
    watch_parent: bool = False
    run_dir: str | None = None
    log_format: str = "console"
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_type(each.name, str(each.type), getattr(self, each.name))
        _check_worker(self.worker)
        _check_choice("backend", self.backend, (*BACKENDS, None))
        _check_choice("start_method", self.start_method, START_METHODS)
        _check_choice("keepalive", self.keepalive, KEEPALIVES)
        _check_choice("restart", self.restart, RESTARTS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        for name in (
            "world_size",
            "max_in_flight",
            "max_in_flight_bytes",
            "max_message_bytes",
            "keepalive_every",
            "max_restarts",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 1")
        if not 0 <= self.output_rank < self.world_size:
            raise ConfigError(
                f"output_rank={self.output_rank}: must be a rank of the group, 0 to {self.world_size - 1}"
            )
        if self.backend == "uni":
            self._check_uni()
        for name in ("unresponsive_timeout_s", "lost_timeout_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and _is_less(limit_s, 3 * self.heartbeat_interval_s):
                raise ConfigError(
                    f"{name}={limit_s!r}: must be at least 3 times heartbeat_interval_s={self.heartbeat_interval_s!r}"
                )
        interval_s = self.keepalive_every * self.heartbeat_interval_s
        if self.keepalive == "collective" and _is_less(self.collective_timeout_s, 3 * interval_s):
            raise ConfigError(
                f"keepalive_every={self.keepalive_every} times heartbeat_interval_s={self.heartbeat_interval_s:g} is "
                f"{interval_s:g} s, more than a third of collective_timeout_s={self.collective_timeout_s:g}: a rank "
                "parked in a collective might time out; lower one of the first two, or raise the timeout"
            )
        _check_environment(self.worker_env)
        try:
            options = msgpack.unpackb(msgpack.packb(dict(self.worker_options)), strict_map_key=False)
        except (TypeError, ValueError, OverflowError) as problem:
            raise ConfigError(f"worker_options must hold plain MessagePack values: {problem}") from None
        # Copied through and through: a caller's later change to its own values must not reach a running group.
        object.__setattr__(self, "worker_options", MappingProxyType(options))
        object.__setattr__(self, "worker_env", MappingProxyType(dict(self.worker_env)))

    def _check_uni(self) -> None:
        if self.world_size != 1:
            raise ConfigError(f"backend='uni' runs one rank, but world_size={self.world_size}: use backend='mp'")
        if self.restart != "never":
            raise ConfigError(
                f"restart={self.restart!r} replaces processes, and backend='uni' has none of its own: use backend='mp'"
            )
        if self.watch_parent:
            raise ConfigError("watch_parent=True: backend='uni' has no monitor to watch it; use backend='mp'")

    def _check_torchrun(self) -> None:
        if not started_by_torchrun():
            raise ConfigError(
                "backend='torchrun' serves the ranks that torchrun has started, and this process was not started by "
                "it: run `torchrun --nproc-per-node N program`, or use backend='mp'"
            )
        if self.restart != "never":
            raise ConfigError(
                f"restart={self.restart!r}: under torchrun its agent restarts the ranks: give torchrun --max-restarts"
            )
        if self.start_method != "spawn":
            raise ConfigError(
                f"start_method={self.start_method!r}: torchrun has started the ranks; leave it at 'spawn'"
            )

    @property
    def resolved_backend(self) -> str:
        """The backend to use: the one that was asked for, else the one that is chosen.

        Raises:
            ConfigError: the environment does not allow it.
        """
        backend = self.backend
        if backend is None:
            needs_processes = self.world_size > 1 or self.restart != "never" or self.watch_parent
            backend = "torchrun" if started_by_torchrun() else "mp" if needs_processes else "uni"
        if backend == "torchrun":
            self._check_torchrun()
        elif backend != "uni" and started_by_torchrun():
            raise ConfigError(
                f"backend={backend!r}: this process was started by torchrun, which has started every rank already: "
                "leave the backend at 'torchrun', or start the program without torchrun"
            )
        if backend == "ray" and self.start_method != "spawn":
            raise ConfigError(f"start_method={self.start_method!r}: Ray starts the ranks; leave it at 'spawn'")
        return backend

    @property
    def resolved_lost_timeout_s(self) -> float:
        """`lost_timeout_s`, in seconds, where it is not set as well."""
        return self.lost_timeout_s or _LOST_INTERVALS * self.heartbeat_interval_s

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> ExecutorConfig:
        """Build a configuration from several places; the later ones win: a TOML file, the environment, arguments.

        Args:
            path: a TOML file with the settings by their names, at its top level or in a table ``[stepcast]``.
            environ: where ``STEPCAST_*`` variables are looked up, such as ``STEPCAST_WORLD_SIZE``; None for the
                process's environment.
            defaults: settings by their names, in the place of the defaults of this class.
            overrides: settings by their names.

        Returns:
            The configuration.

        Raises:
            ConfigError: the file can't be read, or a setting is unknown or wrong.
        """
        settings = dict(defaults or {})
        settings.update(from_file(path) if path is not None else {})
        types = {each.name: str(each.type) for each in fields(cls)}
        settings.update(from_environment(os.environ if environ is None else environ, types))
        settings.update(overrides)
        unknown = sorted(set(settings) - set(types))
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(types))}")
        return cls(**settings)

    def replace(self, **changes: Any) -> ExecutorConfig:
        """Copy the configuration with some settings changed.

        Args:
            changes: settings by their names.

        Returns:
            The copy, validated.
        """
        return dataclasses.replace(self, **changes)


def _is_less(seconds: float, limit_s: float) -> bool:
    """Compare two settings as they were written: 0.3 is 3 times 0.1."""
    return seconds < limit_s and not math.isclose(seconds, limit_s)


def _check_type(name: str, type_name: str, value: Any) -> None:
    if type_name == "int":
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif type_name == "float | None" and value is None:
        fits = True
    elif type_name.startswith("float"):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if fits and not 0 < value <= _MAX_SECONDS:
            raise ConfigError(f"{name}={value!r}: must be a number of seconds above 0, at most {_MAX_SECONDS}")
    elif type_name == "bool":
        fits = isinstance(value, bool)
    elif type_name.startswith("Mapping"):
        fits = isinstance(value, Mapping)
    elif type_name in ("str", "str | None"):
        fits = isinstance(value, str) or (value is None and "None" in type_name)
    else:
        fits = True
    if not fits:
        raise ConfigError(f"{name}={value!r}: must be of type {type_name}, is {type(value).__name__}")


def _check_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        pair: tuple[object, object] = (name, value)
        if not all(isinstance(each, str) for each in pair):
            raise ConfigError(f"worker_env[{name!r}]={value!r}: names and values must be of type str")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"worker_env[{name!r}]={value!r}: the name must not be empty or hold '=', and neither may hold NUL"
            )


def _check_choice(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _is_worker_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Worker)


def _check_worker(worker: str | type[Worker]) -> None:
    if isinstance(worker, str):
        source, colon, name = worker.rpartition(":")
        if not (colon and source and name):
            raise ConfigError(
                f"worker={worker!r}: must be a subclass of stepcast.Worker, or 'module:Class', or "
                "'path/to/script.py:Class'"
            )
    elif not _is_worker_class(worker):
        raise ConfigError(f"worker={worker!r}: must be a subclass of stepcast.Worker, or name one")
