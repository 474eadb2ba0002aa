"""`DeviceKind`: what a driver must know of a kind of device. A platform is one subclass, in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .host import Host, Platform


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """Whether processes for a kind of device may be started in a certain way.

    Attributes:
        refused: why they may not; None where they may.
        warning: what may go wrong all the same.
    """

    refused: str | None = None
    warning: str | None = None


ALLOWED = Ruling()


class DeviceKind:
    """One kind of device, from the driver's side. Stateless; nothing here imports torch or opens a device.

    What a rank does with its device is `device_class`'s business, in the rank's own process.

    Attributes:
        name: what `ExecutorConfig.device` calls it.
        device_class: the subclass of `stepcast.workers.devices.Device` for it, as ``module:Class``.
        masks: the variables that hide some of the devices or bind them.
        not_inherited: variables with which a process binds itself to one device, and that its children must not have.
        ray_resource: what Ray counts such devices as.
    """

    name: ClassVar[str]
    device_class: ClassVar[str]
    masks: ClassVar[tuple[str, ...]] = ()
    not_inherited: ClassVar[tuple[str, ...]] = ()
    ray_resource: ClassVar[str] = "GPU"

    def detect(self, host: Host) -> Platform | None:
        """Look for devices of this kind, without opening one.

        Args:
            host: where to look.

        Returns:
            What there is; None where there is none.
        """
        raise NotImplementedError

    def count(self, platform: Platform) -> int | None:
        """Count the devices that ranks may use, masks considered.

        Args:
            platform: what `detect` has found.

        Returns:
            The number; None where ranks may share them.
        """
        raise NotImplementedError

    def device(self, local_rank: int) -> str:
        """Name a rank's device, as torch does in that rank's process.

        Args:
            local_rank: its index among the ranks of its host.
        """
        return f"{self.name}:{local_rank}"

    def environment(self) -> Mapping[str, str]:
        """Return variables that a rank needs before it imports torch, beside its place in the group.

        Where the embedder has set one, its value holds.
        """
        return {}

    def visible(self, devices: Sequence[str]) -> Mapping[str, str | None]:  # noqa: ARG002
        """Return the variables with which a process sees certain devices of its host, and numbers them from 0.

        Where somebody else hands devices out, as Ray does, it gives a rank its own alone. But a rank's place among the
        ranks of its host is its device's index: so each must see those of all.

        Args:
            devices: the ids of the devices, in the order of the local ranks.

        Returns:
            The variables; None for one that must not be set.
        """
        return {}

    def start_method(self, method: str, modules: Mapping[str, Any]) -> Ruling:
        """Judge a way of starting processes.

        Args:
            method: "spawn", "fork" or "forkserver".
            modules: this process's `sys.modules`: a device that is in use here can't be used in a fork.
        """
        raise NotImplementedError
