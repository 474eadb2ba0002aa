"""What each rank of a group is told, and the environment it gets."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import ConfigError
from stepcast.bus.keys import RankKeys
from stepcast.runtime import platforms
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.state import Life
from stepcast.workers.base import Worker
from stepcast.workers.boot_config import BootConfig
from stepcast.workers.death_watch import process_start_time

#: Gives a rank of this host another link than the driver's own. The one place where something can be put between the
#: two: `stepcast.testing` puts its proxy there. None leaves them alone.
reroute: Callable[[ExecutorConfig, int, Link], Link] | None = None


class Link(NamedTuple):
    """How a rank reaches the driver, and the other ranks.

    Attributes:
        publish_endpoint: the driver's PUB socket.
        reply_endpoint: the driver's PULL socket.
        rendezvous: where the ranks' process groups meet.
        keeper: a process of the rank's host with whose end the rank ends, by its id and start time: the driver, where
            it is on that host.
        keys: for a driver on another host.
    """

    publish_endpoint: str
    reply_endpoint: str
    rendezvous: str
    keeper: tuple[int, int]
    keys: RankKeys | None = None

    @classmethod
    def on_this_host(cls, directory: RunDirectory, life: Life) -> Link:
        """Link ranks of this host to this process.

        Args:
            directory: the run's private directory.
            life: run id and epoch.
        """
        return cls(
            directory.endpoint("publish"),
            directory.endpoint("replies"),
            f"file://{directory.path}/rendezvous-{life.epoch}",
            identity(os.getpid()),
        )


def identity(pid: int) -> tuple[int, int]:
    """Identify a process of this host that exists.

    Args:
        pid: its id.

    Returns:
        The id and the start time, which tells it from a later process with the same id.

    Raises:
        ProcessLookupError: there is none.
    """
    start_time = process_start_time(pid)
    if start_time is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return pid, start_time


def rerouted(config: ExecutorConfig, rank: int, link: Link) -> Link:
    """Link a rank of this host as it is to be linked: to the driver, or to what was put before it.

    Args:
        config: the settings.
        rank: the rank.
        link: its link to the driver.
    """
    return link if reroute is None else reroute(config, rank, link)


def plan_rank(
    config: ExecutorConfig,
    life: Life,
    link: Link,
    *,
    rank: int,
    local_rank: int,
    local_world_size: int,
    own_process: bool = True,
    die_with_driver: bool = False,
) -> BootConfig:
    """Write down what a rank is told.

    Args:
        config: the settings, with the device resolved.
        life: run id and epoch.
        link: how it reaches the driver and the other ranks.
        rank, local_rank, local_world_size, own_process, die_with_driver: as in `BootConfig`.

    Returns:
        Its configuration.
    """
    kind = platforms.kind_named(config.device)
    link = rerouted(config, rank, link)
    pid, start_time = link.keeper
    return BootConfig(
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        world_size=config.world_size,
        epoch=life.epoch,
        output_rank=config.output_rank,
        device=kind.device(local_rank),
        device_class=kind.device_class,
        rendezvous=link.rendezvous,
        collective_timeout_s=config.collective_timeout_s,
        worker=worker_spec(config.worker),
        run_id=life.run_id,
        publish_endpoint=link.publish_endpoint,
        reply_endpoint=link.reply_endpoint,
        max_message_bytes=config.max_message_bytes,
        driver_pid=pid,
        driver_start_time=start_time,
        die_with_driver=die_with_driver,
        startup_timeout_s=config.startup_timeout_s,
        reply_timeout_s=config.reply_timeout_s,
        resume_timeout_s=config.failure_grace_s + config.reply_timeout_s,
        linger_s=config.linger_s,
        own_process=own_process,
        log_level=config.log_level,
        check_collectives=config.check_collectives,
        keepalive=config.keepalive,
        arguments=list(sys.argv),
        options=dict(config.worker_options),
        curve=link.keys,
        driver_timeout_s=config.resolved_lost_timeout_s,
    )


def plan_ranks(
    config: ExecutorConfig, directory: RunDirectory, life: Life, *, die_with_driver: bool
) -> list[BootConfig]:
    """Write down what each rank of a group on this host is told.

    Args:
        config: the settings, with the device resolved.
        directory: the run's private directory.
        life: run id and epoch.
        die_with_driver: as in `BootConfig`.

    Returns:
        A configuration for each rank, in order.
    """
    link, size = Link.on_this_host(directory, life), config.world_size
    return [
        plan_rank(
            config, life, link, rank=rank, local_rank=rank, local_world_size=size, die_with_driver=die_with_driver
        )
        for rank in range(size)
    ]


class Variables(NamedTuple):
    """How a rank's environment differs from that of the process that starts it.

    Attributes:
        removed: those that the rank must not have.
        defaults: those that it has where the other process has not.
        values: those that it has in any case.
    """

    removed: Collection[str]
    defaults: Mapping[str, str]
    values: Mapping[str, str]

    def applied_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Put together the rank's environment.

        Args:
            environ: the other process's, which is left alone.

        Returns:
            The whole environment.
        """
        kept = {name: value for name, value in environ.items() if name not in self.removed}
        return {**self.defaults, **kept, **self.values}


def rank_variables(config: ExecutorConfig, boot: BootConfig) -> Variables:
    """Tell which variables a rank needs, wherever it is started.

    Args:
        config: the settings, with the device resolved.
        boot: what the rank is told.
    """
    defaults = dict(platforms.kind_named(config.device).environment())
    if boot.local_world_size > 1:
        # Ranks that share a host's cores slow one another down with a thread pool each.
        defaults["OMP_NUM_THREADS"] = "1"
    place = {
        "RANK": str(boot.rank),
        "LOCAL_RANK": str(boot.local_rank),
        "WORLD_SIZE": str(boot.world_size),
        "LOCAL_WORLD_SIZE": str(boot.local_world_size),
    }
    return Variables(platforms.not_inherited(), defaults, {**place, **config.worker_env})


def rank_environment(config: ExecutorConfig, boot: BootConfig) -> Mapping[str, str]:
    """Put together the environment of a rank that this process starts; this process's own is left alone.

    Args:
        config: the settings, with the device resolved.
        boot: what the rank is told.

    Returns:
        The whole environment.
    """
    return rank_variables(config, boot).applied_to(os.environ)


def worker_spec(worker: str | type[Worker]) -> str:
    """Name the worker's class so that another process can find it.

    Args:
        worker: the class, or its name.

    Returns:
        ``module:Class`` or ``path/to/script.py:Class``.

    Raises:
        ConfigError: no other process can find it.
    """
    if isinstance(worker, str):
        source, _, name = worker.rpartition(":")
        return f"{Path(source).absolute()}:{name}" if source.endswith(".py") else worker
    if "<locals>" in worker.__qualname__:
        raise ConfigError(
            f"worker={worker.__qualname__}: a class defined in a function can't be found by the worker processes; "
            "define it at the top level of a module"
        )
    if worker.__module__ != "__main__":
        return f"{worker.__module__}:{worker.__qualname__}"
    main = sys.modules["__main__"]
    if main.__spec__ is not None and main.__spec__.name not in ("__main__", ""):  # python -m package.module
        return f"{main.__spec__.name}:{worker.__qualname__}"
    try:
        path = inspect.getsourcefile(worker)
    except (TypeError, OSError):
        path = None
    if path is None or not Path(path).is_file():
        raise ConfigError(
            f"worker={worker.__qualname__}: it was defined interactively, where the worker processes can't find it; "
            "define it in a file"
        )
    return f"{Path(path).absolute()}:{worker.__qualname__}"
