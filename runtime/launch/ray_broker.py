"""The process that speaks with Ray for a driver: it asks for places, has the ranks started, and gives all of it back.

It is one of its own, because Ray ends a process that has lost its connection to the cluster, sets signal handlers and
variables, and keeps threads: nothing that a library may do to the program that uses it. When it ends, by whatever, Ray
ends the actors, and these their ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgpack
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stepcast.workers.boot import read_stdin
from stepcast.workers.death_watch import die_with_parent_thread

from .ray_actor import RankActor
from .ray_order import Order

#: How long Ray gets to place a group that it can place: it may have been told of resources that were given back only
#: now.
_PLACEMENT_GRACE_S = 3.0
#: How long the actors may take to end their ranks.
_END_TIMEOUT_S = 2.0
#: How long all of the release may take; past it this process is killed, and Ray finds out by itself.
_RELEASE_TIMEOUT_S = 8
#: The least that Ray takes; nothing is kept in it.
_OBJECT_STORE_BYTES = 80 << 20


class Unfit(Exception):
    """Ray can't do what is wanted, and the driver is told why."""


def main() -> NoReturn:
    """Do what the order over stdin says, until SIGTERM, or the end of the driver."""
    die_with_parent_thread(signal.SIGTERM)
    order = Order.from_bytes(read_stdin())
    if os.getppid() != order.driver[0]:  # it died before that was armed
        sys.exit(1)
    with Connection(order.descriptor) as driver:
        broker = Broker(order)
        try:
            driver.send_bytes(msgpack.packb(broker.place()))
            starts = msgpack.unpackb(driver.recv_bytes(), unicode_errors="surrogateescape")
            driver.send_bytes(msgpack.packb(broker.start(starts)))
            driver.recv_bytes()  # nothing comes: SIGTERM ends this
        except (EOFError, BrokenPipeError):  # the driver has died
            pass
        except Unfit as refusal:
            driver.send_bytes(msgpack.packb({"refusal": str(refusal)}))
        except Exception as problem:  # noqa: BLE001 - whatever it is, the driver is told
            traceback.print_exc()
            told = f"{type(problem).__name__}: {problem}"
            driver.send_bytes(msgpack.packb({"problem": told}, unicode_errors="replace"))
        finally:
            signal.alarm(_RELEASE_TIMEOUT_S)
            broker.release()
    sys.exit(0)


class Broker:
    """One group's dealings with Ray.

    Args:
        order: what is wanted.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._deadline = time.monotonic() + order.timeout_s
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    def place(self) -> dict[str, Any]:
        """Get a place for each rank.

        Returns:
            "node": the driver's; "spots": what each actor has told of its place.

        Raises:
            Unfit: there is no room for them.
        """
        order = self._order
        self._connect()
        node = ray.get_runtime_context().get_node_id()
        self._check_capacity()
        self._group = self._place_group(node)
        devices: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        amounts: dict[str, dict[str, Any]] = {"CPU": {"num_cpus": 1}, "GPU": {"num_gpus": 1}}
        devices.update(amounts.get(order.resource, {"resources": {order.resource: 1}}))
        for index in range(order.world_size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = ray.remote(RankActor).options(max_restarts=0, scheduling_strategy=strategy, **devices)
            self._actors.append(actor.remote())
        told = (order.resource, order.driver, order.run_directory, order.niceness)
        return {"node": node, "spots": self._get([actor.place.remote(*told) for actor in self._actors])}

    def start(self, starts: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Have the ranks started.

        Args:
            starts: for each rank its actor's number, and what `RankActor.start` is told.

        Returns:
            "started": for each rank its process id and start time.
        """
        return {"started": self._get([self._actors[index].start.remote(*told) for index, *told in starts])}

    def release(self) -> None:
        """Give everything back to Ray, and end one that was started for this."""
        if not ray.is_initialized():
            return
        if self._actors:
            ended = [actor.end.remote() for actor in self._actors]
            ray.wait(ended, num_returns=len(ended), timeout=_END_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _connect(self) -> None:
        order = self._order
        quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "logging_level": logging.ERROR}
        if order.address is not None:
            ray.init(address=order.address, **quiet)
            return
        cores = os.cpu_count() or 1
        ray.init(
            address="local",
            # Ranks may share cores, as they do without Ray.
            num_cpus=max(cores, order.world_size) if order.resource == "CPU" else cores,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=order.temporary,
            **quiet,
        )

    def _check_capacity(self) -> None:
        there = ray.cluster_resources().get(self._order.resource, 0.0)
        if there < self._order.world_size:
            raise Unfit(self._too_few(there, f"has {there:g} in all"))

    def _place_group(self, driver_node: str) -> PlacementGroup:
        """Reserve the ranks' resources: on the driver's node if they can be there, else on as few as possible."""
        size, resource = self._order.world_size, self._order.resource
        bundles = [{resource: 1.0}] * size
        on_node = {each["NodeID"]: each["Resources"].get(resource, 0.0) for each in ray.nodes() if each["Alive"]}
        if on_node.get(driver_node, 0.0) >= size and ray.available_resources().get(resource, 0.0) >= size:
            group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=driver_node)
            if group.wait(_PLACEMENT_GRACE_S):
                return group
            remove_placement_group(group)
        self._group = group = placement_group(bundles, strategy="PACK")
        if group.wait(_PLACEMENT_GRACE_S):
            return group
        free = ray.available_resources().get(resource, 0.0)
        if free < size:
            there = ray.cluster_resources().get(resource, 0.0)
            raise Unfit(self._too_few(free, f"has {free:g} free of {there:g}: others use the rest"))
        if not group.wait(max(0.0, self._deadline - time.monotonic())):
            raise Unfit(f"Ray has not placed the group within startup_timeout_s={self._order.timeout_s:g} s")
        return group

    def _too_few(self, there: float, what: str) -> str:
        order = self._order
        return (
            f"world_size={order.world_size} needs {order.world_size} {order.resource} of the cluster, which {what}: "
            f"{order.world_size - there:g} {order.resource} missing; lower world_size, or add nodes"
        )

    def _get(self, references: Sequence[Any]) -> list[Any]:
        """Wait for all answers of the actors, or for the first that fails."""
        left = list(references)
        while left:
            ready, left = ray.wait(left, timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise Unfit(
                    f"{len(left)} of {len(references)} actors have not answered within "
                    f"startup_timeout_s={self._order.timeout_s:g} s: see `ray status` and Ray's logs"
                )
            ray.get(ready)
        answers: list[Any] = ray.get(list(references))
        return answers
