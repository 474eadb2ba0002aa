"""The "ray" backend: ranks that Ray has placed, and its actors have started.

Ray chooses nodes and devices, and holds the ranks' processes. Everything else is as under "mp": the bus, the monitor,
the errors. A process of its own speaks with Ray (`ray_broker`): this one never imports it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import msgpack

from stepcast.bus.endpoints import MAX_SOCKET_PATH_BYTES, RunDirectory
from stepcast.bus.errors import ConfigError, StartupError
from stepcast.bus.gate import Gate
from stepcast.bus.keys import KeyPair, RankKeys
from stepcast.runtime import platforms
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.sockets import DriverSockets
from stepcast.runtime.state import Life
from stepcast.workers.death_watch import DriverWatch

from .agent import address_towards
from .attached import AttachedProcess, RemoteProcess
from .interpreter import run_main
from .launcher import Launcher
from .plan import Link, Variables, identity, plan_rank, rank_variables
from .process import EXIT_CODE_UNKNOWN, WorkerProcess
from .ray_order import Order
from .seats import Seat, Spot, seat

#: How often a start that waits looks whether it is to end already.
_LOOK_S = 0.1
#: How long the broker may take to give everything back, and to end a Ray that was started for the group.
_RELEASE_TIMEOUT_S = 10.0
#: The same for one that has not told of any place yet: it may be waiting for a cluster, deaf to signals.
_GIVE_UP_TIMEOUT_S = 2.0
#: How long an actor that is being killed may outlive its rank.
_ACTOR_END_S = 0.02
#: How long the actors' processes may take to end after that.
_ACTORS_TIMEOUT_S = 5.0
#: What Ray appends to its directory's path, at most, to name a socket.
_RAY_SOCKET_NAME = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LOG_TAIL_LINES = 20
_STREAMS = ("stdout", "stderr")


class RayProcess(AttachedProcess):
    """A rank's process that an actor on this host has started.

    Args:
        rank: the rank.
        identity: its id and start time.
        actor: the actor's process.
        outputs: the read ends of its stdout and stderr.
    """

    def __init__(self, rank: int, identity: tuple[int, int], actor: DriverWatch, outputs: Sequence[IO[bytes]]) -> None:
        super().__init__(rank, identity)
        self.outputs = outputs
        self._actor = actor

    def circumstances(self) -> str:
        """As `WorkerProcess.circumstances`: the kernel has ended it, if its actor ends."""
        if self.exit_code() in (-signal.SIGKILL, EXIT_CODE_UNKNOWN) and self._actor.fd is not None:
            select.select([self._actor.fd], [], [], _ACTOR_END_S)  # it has many threads
        return ", with its Ray actor, which has ended: Ray's logs may tell why" if self._actor.is_dead() else ""

    def said_bye(self) -> None:
        """As `WorkerProcess.said_bye`: the process is the group's own, and its end is waited for."""


class _Node:
    """The driver's node, as the ranks reach it: those on it by ipc, those on others by tcp with keys of their own.

    Args:
        here: the link of ranks on it.
        sockets: the driver's, which listen.
        gate: theirs.
        rendezvous: where ranks of several nodes meet.
        first: rank 0's spot, whose rank serves that.
    """

    def __init__(
        self,
        here: Link,
        sockets: DriverSockets | None = None,
        gate: Gate | None = None,
        rendezvous: str = "",
        first: Spot | None = None,
    ) -> None:
        self._here = here
        self._sockets = sockets
        self._gate = gate
        self._rendezvous = rendezvous
        self._first = first

    @property
    def is_shared(self) -> bool:
        """Whether there are ranks on other nodes."""
        return self._gate is not None

    def link(self, rank: int, spot: Spot) -> Link:
        """Link a rank to the driver and to the others.

        Args:
            rank: the rank.
            spot: where it is.
        """
        if self._sockets is None or self._gate is None or self._first is None:
            return self._here
        serves = f"?listen_fd={self._first.listening[1]}" if rank == 0 else ""
        link = self._here._replace(rendezvous=f"{self._rendezvous}{serves}")
        if spot.sees_driver:
            return link
        own = KeyPair.make()
        self._gate.admit(rank, own.public)
        return link._replace(
            publish_endpoint=str(self._sockets.publisher.tcp_endpoint),
            reply_endpoint=str(self._sockets.replies.tcp_endpoint),
            keeper=(spot.pid, spot.start_time),
            keys=RankKeys.of(self._gate.public_key, own),
        )


class RayLauncher(Launcher):
    """Has Ray's actors start a process for each rank.

    Args:
        config: the settings, with the device resolved.
        directory: the run's private directory.
        life: run id and epoch.

    Raises:
        ConfigError: Ray is not installed, or can't be used from here.
    """

    def __init__(self, config: ExecutorConfig, directory: RunDirectory, life: Life) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("backend='ray': Ray is not installed: pip install 'stepcast[ray]', or use backend='mp'")
        self._config = config
        self._kind = platforms.kind_named(config.device)
        self._directory = directory
        self._life = life
        self._address = cluster_address(os.environ, sys.modules)
        self._log_path = directory.path / "ray.log"
        self._broker: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._placed = False
        self._actors: dict[int, DriverWatch] = {}
        self._outputs: dict[int, list[IO[bytes]]] = {}

    def launch(self, sockets: DriverSockets, is_cancelled: Callable[[], bool]) -> list[WorkerProcess]:
        """Have Ray place the ranks, and start them where it has. There are none where that is cancelled."""
        deadline = time.monotonic() + self._config.startup_timeout_s
        self._connection = connection = self._start_broker()
        placed = self._hear(connection, deadline, is_cancelled)
        if placed is None:
            return []
        self._placed = True
        spots = [Spot.from_report(index, report) for index, report in enumerate(placed["spots"])]
        seats = seat(spots, placed["node"])
        node = self._listen(sockets, seats)
        self._actors = {
            rank: DriverWatch(each.spot.pid, each.spot.start_time)
            for rank, each in enumerate(seats)
            if each.spot.sees_driver
        }
        connection.send_bytes(_pack([self._start(rank, each, node) for rank, each in enumerate(seats)]))
        started = self._hear(connection, deadline, is_cancelled)
        if started is None:
            return []
        outputs, self._outputs = self._outputs, {}
        return [
            RayProcess(rank, (pid, start_time), self._actors[rank], outputs[rank])
            if rank in self._actors
            else RemoteProcess(rank, pid, seats[rank].spot.address)
            for rank, (pid, start_time) in enumerate(started["started"])
        ]

    def _listen(self, sockets: DriverSockets, seats: Sequence[Seat]) -> _Node:
        """Let ranks of other nodes reach the driver, if there are any."""
        here = Link.on_this_host(self._directory, self._life)
        far = [each.spot for each in seats if not each.spot.sees_driver]
        if not far:
            return _Node(here)
        first = seats[0].spot
        gate = sockets.listen(self._config.address or address_towards(far[0].address, far[0].listening[0]))
        return _Node(here, sockets, gate, f"stepcast://{first.address}:{first.listening[0]}/{self._life.epoch}", first)

    def close(self) -> None:
        """Have the broker give everything back. One that takes too long is killed: then Ray takes it back."""
        if self._broker is not None:
            _end_session(self._broker, _RELEASE_TIMEOUT_S if self._placed else _GIVE_UP_TIMEOUT_S)
        if self._connection is not None:
            self._connection.close()
        deadline = time.monotonic() + _ACTORS_TIMEOUT_S
        for actor in self._actors.values():
            if actor.fd is not None:
                select.select([actor.fd], [], [], max(0.0, deadline - time.monotonic()))
            actor.close()
        for files in self._outputs.values():  # of ranks that have not come to be
            for file in files:
                file.close()

    def _start_broker(self) -> Connection:
        here, there = Pipe()
        order = Order(
            descriptor=there.fileno(),
            driver=identity(os.getpid()),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            run_directory=str(self._directory.path),
            address=self._address,
            temporary=_directory_for_ray(self._directory),
            world_size=self._config.world_size,
            resource=self._kind.ray_resource,
            timeout_s=self._config.startup_timeout_s,
        )
        with there, self._log_path.open("wb") as log:
            self._broker = run_main(
                "stepcast.runtime.launch.ray_broker",
                order.to_bytes(),
                broker_environment(os.environ, self._address),
                stdout=log,
                stderr=log,
                inherited=[order.descriptor],
            )
        return here

    def _hear(self, connection: Connection, deadline: float, is_cancelled: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for what the broker has to tell; None where the start is cancelled."""
        try:
            while not connection.poll(_LOOK_S):
                if is_cancelled():
                    return None
                if time.monotonic() >= deadline:
                    raise self._failed(
                        f"it has not answered within startup_timeout_s={self._config.startup_timeout_s:g} s"
                    )
            answer: dict[str, Any] = msgpack.unpackb(connection.recv_bytes())
        except (EOFError, OSError):
            raise self._failed("the process that speaks with it has ended") from None
        if "refusal" in answer:
            raise self._refused(answer["refusal"])
        if "problem" in answer:
            raise self._failed(answer["problem"])
        return answer

    def _refused(self, why: str) -> StartupError:
        ranks = range(self._config.world_size)
        where = "a Ray on this host" if self._address is None else f"the Ray cluster at {self._address}"
        return StartupError(
            f"the ranks can't be started by {where}: {why}", ranks=ranks, phases=dict.fromkeys(ranks, "spawning")
        )

    def _failed(self, why: str) -> StartupError:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return self._refused("\n".join([why, *(["", "what it had to say:", *lines] if lines else [])]))

    def _start(self, rank: int, place: Seat, node: _Node) -> list[Any]:
        """Tell a rank's actor how to start it."""
        spot = place.spot
        boot = plan_rank(
            self._config,
            self._life,
            node.link(rank, spot),
            rank=rank,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            die_with_driver=True,  # the kernel kills it when its actor ends
        )
        variables = on_node(rank_variables(self._config, boot), self._kind.visible(place.devices))
        outputs = self._make_outputs(rank) if spot.sees_driver else []
        inherited = [spot.listening[1]] if rank == 0 and node.is_shared else []
        return [spot.index, boot.to_bytes(), variables, sys.path, os.path.realpath("."), outputs, inherited]

    def _make_outputs(self, rank: int) -> list[str]:
        """Make pipes with names for a rank's output, and open the read ends."""
        paths = [str(self._directory.path / f"{name}-{rank}") for name in _STREAMS]
        files: list[IO[bytes]] = self._outputs.setdefault(rank, [])
        for path in paths:
            os.mkfifo(path, 0o600)
            # Else it would wait for the writer.
            files.append(open(path, "rb", buffering=0, opener=_open_without_waiting))  # noqa: SIM115
        return paths


def _end_session(leader: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Let a process end in good order, then kill what is left of its session."""
    with contextlib.suppress(ProcessLookupError):  # somebody else reaps this program's children
        watch = DriverWatch(*identity(leader.pid))
        os.kill(leader.pid, signal.SIGTERM)
        if watch.fd is not None:
            select.select([watch.fd], [], [], timeout_s)
        watch.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def cluster_address(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str | None:
    """Tell which Ray cluster to use: the one that this program is connected to, or RAY_ADDRESS names.

    Args:
        environ: the variables.
        modules: the modules that this program has imported.

    Returns:
        Its address, as Ray understands it; None where there is none, so that one must be started.

    Raises:
        ConfigError: it is reached by Ray Client, whose program is not on a node of the cluster.
    """
    address = environ.get("RAY_ADDRESS") or "local"
    ray = modules.get("ray")
    if ray is not None and ray.is_initialized():
        client = ray.util.client.ray.is_connected()
        address = "ray://" if client else ray.get_runtime_context().gcs_address
    if address.startswith("ray://"):
        raise ConfigError(
            f"backend='ray': the cluster is reached by Ray Client ({address}): run the program on a node of the "
            "cluster, with RAY_ADDRESS=auto"
        )
    return None if address == "local" else address


def broker_environment(environ: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Put together the environment of the process that speaks with Ray, and of a Ray that it starts.

    Args:
        environ: this process's variables.
        address: the cluster's address; None where Ray is started.

    Returns:
        The whole environment.
    """
    if address is not None:
        return dict(environ)
    started = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),  # its own default is to be nice to all others
    }
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(environ):
        # Without a token of its own, Ray leaves one in the home directory.
        started |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**started, **environ}


def on_node(variables: Variables, visible: Mapping[str, str | None]) -> Variables:
    """Add to a rank's variables which devices it sees.

    Args:
        variables: those that it has on any node.
        visible: as `DeviceKind.visible` gives them.

    Returns:
        Those that it has on its node. What the settings' `worker_env` says holds.
    """
    removed = [*variables.removed, *(name for name, value in visible.items() if value is None)]
    values = {name: value for name, value in visible.items() if value is not None}
    return variables._replace(removed=removed, values={**values, **variables.values})


def _directory_for_ray(directory: RunDirectory) -> str | None:
    """Where a Ray that is started keeps its files: with the run's, unless the paths of sockets would be too long."""
    path = directory.path / "ray"
    fits = len(os.fsencode(path)) + len(_RAY_SOCKET_NAME) <= MAX_SOCKET_PATH_BYTES
    return str(path) if fits else None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogateescape", default=_as_list)
    return packed


def _as_list(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)
