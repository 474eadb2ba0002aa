"""The "torchrun" backend: a group of the processes that torchrun has started.

Rank 0's process is the driver. Its shard is computed in a child of its own, so that it shares neither the interpreter's
lock nor the fate of the embedder's event loop. The other processes serve the group from where they build their
`Executor`.

They find one another through the store of torchrun's agent: each follower leaves a record of itself, then the driver
one of its sockets, and from then on everything goes over the bus.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import ConfigError, StartupError
from stepcast.runtime import failures
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.state import Life
from stepcast.workers.boot import run_worker
from stepcast.workers.boot_config import BootConfig

from . import mp
from .agent import AgentStore, Place
from .attached import AttachedProcess
from .launcher import Launcher
from .plan import Link, identity, plan_rank, rank_environment
from .process import WorkerProcess

#: What all ranks must have been told alike, by the names of `BootConfig`.
_SHARED = (
    "world_size",
    "output_rank",
    "device_class",
    "collective_timeout_s",
    "worker",
    "max_message_bytes",
    "startup_timeout_s",
    "reply_timeout_s",
    "resume_timeout_s",
    "check_collectives",
    "keepalive",
    "options",
)
_DRIVER = "driver"

#: Numbers the groups of this process, as every rank's does: they make theirs in the same order.
_groups = itertools.count(1)


class TorchrunLauncher(Launcher):
    """Takes over the processes that torchrun has started; for rank 0, it starts one.

    Args:
        config: the settings, with the device resolved.
        directory: the run's private directory.
        life: run id and epoch.

    Raises:
        ConfigError: torchrun's ranks do not fit the settings.
    """

    def __init__(self, config: ExecutorConfig, directory: RunDirectory, life: Life) -> None:
        self._config = config
        self._life = life
        self._place = place = fitting_place(config)
        self._prefix = place.prefix(_next_group(config))
        link = Link.on_this_host(directory, life)
        self._link = link._replace(rendezvous=rendezvous(place, self._prefix, life.epoch))
        self._boot = plan_rank(
            config,
            life,
            self._link,
            rank=0,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            die_with_driver=True,
        )

    def launch(self, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:
        """Start rank 0, and wait for what the others leave in the store."""
        own = mp.spawn_all([self._boot], [rank_environment(self._config, self._boot)])
        try:
            followers = self._meet_followers(is_cancelled)
        except BaseException:
            mp.discard(own)
            raise
        return [*own, *(AttachedProcess(rank, (each["pid"], each["start_time"])) for rank, each in followers.items())]

    def _meet_followers(self, is_cancelled: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + self._config.startup_timeout_s
        store = AgentStore(self._place, self._prefix, self._config.startup_timeout_s)
        try:
            followers = self._wait_for_followers(store, deadline, is_cancelled)
            store.put(_DRIVER, self._record())
        except BaseException as error:
            with contextlib.suppress(StartupError):  # it may be the store that has failed
                store.put(_DRIVER, {"failed": str(error)})  # whoever waits need not wait any longer
            raise
        return followers

    def _wait_for_followers(
        self, store: AgentStore, deadline: float, is_cancelled: Callable[[], bool]
    ) -> dict[int, dict[str, Any]]:
        keys = {_key(rank): rank for rank in range(1, self._config.world_size)}
        records = {keys[key]: record for key, record in store.take(list(keys), deadline, is_cancelled).items()}
        missing = [rank for rank in keys.values() if rank not in records]
        if missing and is_cancelled():
            raise StartupError("it was shut down meanwhile", ranks=missing, phases={})
        if missing:
            raise failures.never_came(missing, self._config.startup_timeout_s)
        own = settings_digests(self._boot)
        for rank, record in sorted(records.items()):
            different = sorted(name for name, digest in own.items() if record["settings"].get(name) != digest)
            if different:
                raise failures.other_settings(rank, different)
        return dict(sorted(records.items()))

    def _record(self) -> dict[str, Any]:
        pid, start_time = self._link.keeper
        return {
            "run_id": self._life.run_id,
            "pid": pid,
            "start_time": start_time,
            "publish": self._boot.publish_endpoint,
            "replies": self._boot.reply_endpoint,
        }


def follow(config: ExecutorConfig) -> int:
    """Be one of torchrun's ranks, until the group ends.

    Args:
        config: the settings, with the device resolved.

    Returns:
        The exit code.

    Raises:
        ConfigError: torchrun's ranks do not fit the settings.
        StartupError: the driver can't be found.
    """
    place = fitting_place(config)
    prefix = place.prefix(_next_group(config))
    unlinked = Link("", "", rendezvous(place, prefix, 1), identity(os.getpid()))
    boot = _plan(config, place, Life(b""), unlinked)
    with _environment(rank_environment(config, boot)):  # before torch is imported, unless the program has
        return _follow(config, place, prefix, unlinked, boot)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give this process other variables, and then its own again."""
    before = dict(os.environ)
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)  # other threads may look something up meanwhile
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]


def _follow(config: ExecutorConfig, place: Place, prefix: str, unlinked: Link, boot: BootConfig) -> int:
    store = AgentStore(place, prefix, config.startup_timeout_s)
    pid, start_time = unlinked.keeper
    store.put(_key(place.rank), {"pid": pid, "start_time": start_time, "settings": settings_digests(boot)})
    driver = store.take([_DRIVER], time.monotonic() + config.startup_timeout_s).get(_DRIVER)
    if driver is None:
        raise failures.driver_never_came(
            place.rank, f"has not come within startup_timeout_s={config.startup_timeout_s:g} s"
        )
    if "failed" in driver:
        raise failures.driver_never_came(place.rank, f"could not start the group: {driver['failed']}")
    link = Link(driver["publish"], driver["replies"], unlinked.rendezvous, (driver["pid"], driver["start_time"]))
    worker = config.worker
    del store  # its connection
    return run_worker(_plan(config, place, Life(driver["run_id"]), link), worker if isinstance(worker, type) else None)


def fitting_place(config: ExecutorConfig) -> Place:
    """Read this process's place, and see that it fits the settings.

    Args:
        config: the settings.

    Raises:
        ConfigError: it does not.
    """
    place = Place.of_this_process()
    if place.world_size != config.world_size:
        raise ConfigError(
            f"world_size={config.world_size}, but torchrun has started {place.world_size} ranks: leave it away, or "
            f"start as many"
        )
    if place.group_world_size > 1:
        raise ConfigError(f"torchrun has started ranks on {place.group_world_size} hosts: this version serves one")
    return place


def rendezvous(place: Place, prefix: str, epoch: int) -> str:
    """Tell where the ranks' process groups meet: in the agent's store.

    Args:
        place: this process's place.
        prefix: what is in front of the group's keys there.
        epoch: the life of the group.
    """
    host, port = place.master
    return f"stepcast://{host}:{port}/{prefix}/rendezvous-{epoch}"


def settings_digests(boot: BootConfig) -> dict[str, bytes]:
    """Digest the settings that all ranks must share, each by itself, so that one that differs can be named.

    Args:
        boot: what a rank is told.

    Returns:
        A digest for each setting's name. They can't be turned back into the settings.
    """
    return {name: _digest(getattr(boot, name)) for name in _SHARED}


def _digest(value: Any) -> bytes:
    packed = msgpack.packb(dict(value) if isinstance(value, Mapping) else value, unicode_errors="surrogateescape")
    return hashlib.sha256(packed).digest()[:8]


def _plan(config: ExecutorConfig, place: Place, life: Life, link: Link) -> BootConfig:
    return plan_rank(
        config,
        life,
        link,
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        own_process=False,
    )


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _next_group(config: ExecutorConfig) -> int:
    number = next(_groups)
    if number > 1 and not config.followers_return:
        raise ConfigError(
            "torchrun's other ranks have left with the group before: one process makes one group, unless "
            "followers_return=True lets each rank's program go on to the next"
        )
    return number
