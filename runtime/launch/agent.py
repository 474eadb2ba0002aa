"""What torchrun's agent tells the processes that it has started: variables, and a store that they share."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import msgpack

from stepcast.bus.errors import ConfigError, ProtocolError, StartupError
from stepcast.bus.secret import SECRET_VARIABLE, Secret, open_sealed, read_secret, seal
from stepcast.runtime.config import ExecutorConfig

#: How often a key that is not there yet is looked for.
_LOOK_S = 0.01
_MAX_LOOK_S = 0.2
_LOOK_BACKOFF = 1.3


@dataclass(frozen=True)
class Place:
    """One process's place among those that torchrun has started. The names are torchrun's own.

    Attributes:
        rank, world_size: of all.
        local_rank, local_world_size: among those of its agent.
        group_rank, group_world_size: its agent's place among the agents, one for each host.
        run_id: the job's id.
        restart_count: how often its ranks have been restarted. The store survives that, with all that is in it.
        master: host and port of the store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    run_id: str
    restart_count: int
    master: tuple[str, int]

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] | None = None) -> Place:
        """Read this process's place.

        Args:
            environ: the variables; None for this process's own.

        Raises:
            ConfigError: torchrun has not set one of them, or not to a number.
        """
        environ = os.environ if environ is None else environ

        def number(name: str) -> int:
            try:
                return int(environ[name])
            except (KeyError, ValueError):
                raise ConfigError(
                    f"{name}={environ.get(name)!r}: torchrun sets it to a number; start the program by torchrun"
                ) from None

        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            group_rank=number("GROUP_RANK"),
            group_world_size=number("GROUP_WORLD_SIZE"),
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            restart_count=number("TORCHELASTIC_RESTART_COUNT"),
            master=(environ.get("MASTER_ADDR", "localhost"), number("MASTER_PORT")),
        )

    def prefix(self, group: int) -> str:
        """Return what is in front of a group's keys in the store, and in no other group's.

        Args:
            group: the number of the group among those that its program makes, from 1.
        """
        return f"stepcast/{quote(self.run_id, safe='')}/{self.restart_count}/{group}"


def is_follower(config: ExecutorConfig) -> bool:
    """Tell whether torchrun has started this process as another rank than the driver's.

    Args:
        config: the settings.

    Raises:
        ConfigError: the environment does not allow the backend.
    """
    return config.resolved_backend == "torchrun" and Place.of_this_process().rank != 0


def shared_secret(config: ExecutorConfig, place: Place) -> Secret | None:
    """Read the secret that the hosts of a group share.

    Args:
        config: the settings.
        place: this process's place.

    Returns:
        The secret; None for a group of one host, which goes without.

    Raises:
        ConfigError: there is none, or none that will do.
    """
    if place.group_world_size == 1:
        return None
    secret = read_secret(config.secret_file)
    if secret is None:
        raise ConfigError(
            f"torchrun has started ranks on {place.group_world_size} hosts, and whoever reaches its store could pass "
            f"for one of them: give every host the same secret, by secret_file or by {SECRET_VARIABLE}"
        )
    return secret


def address_towards(host: str, port: int) -> str:
    """Find the address of this host from which another one is reached.

    Args:
        host, port: of the other one.

    Returns:
        The address.

    Raises:
        ConfigError: there is no way to it.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: nothing is sent
            address: str = probe.getsockname()[0]
    except OSError as problem:
        raise ConfigError(
            f"no address of this host is known from which {host} is reached: {problem}: set address"
        ) from problem
    return address


class AgentStore:
    """The part of the agent's store that belongs to one group.

    Args:
        place: this process's place.
        prefix: what is in front of each key of the group, by `Place.prefix`.
        timeout_s: the longest that an operation may take, in seconds.
        secret: seals the records, where several hosts share the store; None for a group of one host.

    Raises:
        StartupError: the agent's store can't be reached.
    """

    def __init__(self, place: Place, prefix: str, timeout_s: float, secret: Secret | None = None) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - torch, which a driver goes without else

        self._place = place
        self._prefix = prefix
        self._secret = secret
        with self._reachable():
            store = _connect(place, timeout_s)
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined] # torch's stubs lack it

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Leave a record for the other ranks.

        Args:
            key: its key.
            record: plain MessagePack values.
        """
        sealed = msgpack.packb(record) if self._secret is None else seal(self._secret, key, (self._prefix,), record)
        with self._reachable():
            self._store.set(key, sealed)

    def take(
        self, keys: Sequence[str], deadline: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, dict[str, Any]]:
        """Wait for records of other ranks.

        Args:
            keys: their keys.
            deadline: how long to wait, as a reading of the monotonic clock.
            is_cancelled: asked now and then whether to wait on.

        Returns:
            The records that have come, by key: all of them, unless the wait has ended before.

        Raises:
            ProtocolError: one is none.
        """
        found: dict[str, dict[str, Any]] = {}
        look_s = _LOOK_S
        while True:
            with self._reachable():
                for key in keys:
                    if key not in found and self._store.check([key]):
                        found[key] = self._open(key, self._store.get(key))
            if len(found) == len(keys) or is_cancelled() or time.monotonic() >= deadline:
                return found
            time.sleep(look_s)
            look_s = min(look_s * _LOOK_BACKOFF, _MAX_LOOK_S)

    def _open(self, key: str, data: bytes) -> dict[str, Any]:
        return _unpack(key, data) if self._secret is None else open_sealed(self._secret, key, (self._prefix,), data)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:  # torch's DistError
            rank, (host, port) = self._place.rank, self._place.master
            raise StartupError(
                f"rank {rank} can't use the store of torchrun's agent at {host}:{port}: {problem}",
                ranks=[rank],
                phases={rank: "spawning"},
            ) from problem


def _connect(place: Place, timeout_s: float) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    # The agent serves the store, unless it was told not to: then rank 0 does.
    if place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return _serve(*place.master, timeout_s)
    connect: Any = dist.TCPStore  # type: ignore[attr-defined] # torch's stubs lack it
    return connect(*place.master, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


@functools.cache
def _serve(host: str, port: int, timeout_s: float) -> Any:
    """Serve the store, for as long as this process lives: the ranks' process groups need it, and the next group."""
    import torch.distributed as dist  # noqa: PLC0415

    timeout = timedelta(seconds=timeout_s)
    serve: Any = dist.TCPStore  # type: ignore[attr-defined] # as above
    return serve(host, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=True)


def _unpack(key: str, data: bytes) -> dict[str, Any]:
    try:
        record = msgpack.unpackb(data)
    except (ValueError, TypeError) as problem:
        raise ProtocolError(f"the record {key!r} in the store of torchrun's agent can't be read: {problem}") from None
    if not isinstance(record, dict):
        raise ProtocolError(f"the record {key!r} in the store of torchrun's agent is no record of stepcast's")
    return record
