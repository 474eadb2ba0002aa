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
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack

from stepcast.bus.endpoints import RunDirectory
from stepcast.bus.errors import ConfigError, StartupError
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.sockets import DriverSockets
from stepcast.runtime.state import Life
from stepcast.workers.boot import run_worker
from stepcast.workers.boot_config import BootConfig

from . import mp
from .agent import AgentStore, Place, address_towards, shared_secret
from .attached import AttachedProcess, RemoteProcess
from .launcher import Launcher
from .plan import Link, identity, plan_rank, rank_environment, rerouted
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
#: Whether the last of them was the followers' last.
_last_group = False


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
        self._secret = shared_secret(config, place)
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

    def launch(self, sockets: DriverSockets, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:
        """Start rank 0, and wait for what the others leave in the store."""
        own = mp.spawn_all([self._boot], [rank_environment(self._config, self._boot)])
        try:
            followers = self._meet_followers(sockets, is_cancelled)
        except BaseException:
            mp.discard(own)
            raise
        return [*own, *followers]

    def _meet_followers(self, sockets: DriverSockets, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:
        deadline = time.monotonic() + self._config.startup_timeout_s
        store = AgentStore(self._place, self._prefix, self._config.startup_timeout_s, self._secret)
        try:
            records = self._wait_for_followers(store, deadline, is_cancelled)
            if self._place.group_world_size > 1:
                sockets.listen(self._config.address or address_towards(*self._place.master))
            followers = [self._attach(rank, record, sockets.gate) for rank, record in records.items()]
            store.put(_DRIVER, self._record(sockets))
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
            raise _never_came(missing, self._config.startup_timeout_s)
        own = settings_digests(self._boot)
        for rank, record in sorted(records.items()):
            different = sorted(name for name, digest in own.items() if record["settings"].get(name) != digest)
            if different:
                raise _other_settings(rank, different)
        return dict(sorted(records.items()))

    def _attach(self, rank: int, record: Mapping[str, Any], gate: Gate | None) -> WorkerProcess:
        if record["group_rank"] == self._place.group_rank:
            return AttachedProcess(rank, (record["pid"], record["start_time"]))
        assert gate is not None  # noqa: S101 - there is one where torchrun has started more than one agent
        gate.admit(rank, record["public_key"])
        return RemoteProcess(rank, record["pid"], record["host"])

    def _record(self, sockets: DriverSockets) -> dict[str, Any]:
        pid, start_time = self._link.keeper
        return {
            "run_id": self._life.run_id,
            "group_rank": self._place.group_rank,
            "pid": pid,
            "start_time": start_time,
            "ipc": [self._endpoints(rank) for rank in range(1, self._config.world_size)],
            "tcp": (sockets.publisher.tcp_endpoint, sockets.replies.tcp_endpoint),
            "public_key": b"" if sockets.gate is None else sockets.gate.public_key,
        }

    def _endpoints(self, rank: int) -> tuple[str, str]:
        link = rerouted(self._config, rank, self._link)
        return link.publish_endpoint, link.reply_endpoint


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
    secret = shared_secret(config, place)
    prefix = place.prefix(_next_group(config))
    me, meeting = identity(os.getpid()), rendezvous(place, prefix, 1)
    boot = _plan(config, place, Life(b""), Link("", "", meeting, me))
    with _environment(rank_environment(config, boot)):  # before torch is imported, unless the program has
        store = AgentStore(place, prefix, config.startup_timeout_s, secret)
        keys = None if secret is None else KeyPair.make()
        store.put(
            _key(place.rank),
            {
                "pid": me[0],
                "start_time": me[1],
                "host": socket.gethostname(),
                "group_rank": place.group_rank,
                "public_key": b"" if keys is None else keys.public,
                "settings": settings_digests(boot),
            },
        )
        driver = _wait_for_driver(config, place, store)
        del store  # its connection
        boot = _plan(config, place, Life(driver["run_id"]), _link(place, driver, meeting, keys))
        return run_worker(boot, config.worker if isinstance(config.worker, type) else None)


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


def _wait_for_driver(config: ExecutorConfig, place: Place, store: AgentStore) -> dict[str, Any]:
    driver = store.take([_DRIVER], time.monotonic() + config.startup_timeout_s).get(_DRIVER)
    if driver is None:
        limit_s = config.startup_timeout_s
        raise _driver_never_came(place.rank, f"has not come within startup_timeout_s={limit_s:g} s")
    if "failed" in driver:
        raise _driver_never_came(place.rank, f"could not start the group: {driver['failed']}")
    return driver


def _link(place: Place, driver: Mapping[str, Any], meeting: str, keys: KeyPair | None) -> Link:
    if driver["group_rank"] == place.group_rank:
        publish, replies = driver["ipc"][place.rank - 1]
        return Link(publish, replies, meeting, (driver["pid"], driver["start_time"]))
    assert keys is not None  # noqa: S101 - as in the driver
    publish, replies = driver["tcp"]
    # The agent is what lives here as long as the group should.
    return Link(publish, replies, meeting, identity(os.getppid()), RankKeys.of(driver["public_key"], keys))


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
    global _last_group  # noqa: PLW0603 - as long as the process
    if _last_group:
        raise ConfigError(
            "torchrun's other ranks have left with the group before: one process makes one group, unless "
            "followers_return=True lets each rank's program go on to the next"
        )
    _last_group = not config.followers_return
    return next(_groups)


def _never_came(ranks: Sequence[int], limit_s: float) -> StartupError:
    """Ranks that torchrun has started have not built their executor."""
    return StartupError(
        f"rank {', '.join(map(str, ranks))}: not there within startup_timeout_s={limit_s:g} s: torchrun has started "
        "the process, and it has not built its Executor: every rank's program must, with the same settings; look at "
        "its output",
        ranks=ranks,
        phases=dict.fromkeys(ranks, "spawning"),
    )


def _other_settings(rank: int, names: Sequence[str]) -> StartupError:
    """A rank that torchrun has started was given other settings than the driver."""
    return StartupError(
        f"rank {rank} was given other settings than rank 0: {', '.join(names)}: every rank's program must build its "
        "Executor with the same ones",
        ranks=[rank],
        phases={rank: "spawning"},
    )


def _driver_never_came(rank: int, why: str) -> StartupError:
    """The driver of the group that this rank is to serve is not there."""
    return StartupError(
        f"rank {rank} has no group to serve: its driver, rank 0, {why}", ranks=[rank], phases={rank: "spawning"}
    )
