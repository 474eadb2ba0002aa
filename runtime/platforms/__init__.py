"""The kinds of device that a group can run on, from the driver's side: one small file for each.

Device files, packages and variables tell what a host has. Nothing is imported and no device is opened: importing torch
takes seconds, and asking a device's runtime may acquire the device, which a driver must leave to its ranks.

Another kind comes with a package of its own, which registers a subclass of `DeviceKind` under its name as an entry
point of the group "stepcast.platforms".
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from stepcast.bus.errors import ConfigError

from .cpu import CPU
from .cuda import CUDA
from .host import Host, Platform, package_version, torch_builds
from .hpu import HPU
from .kind import DeviceKind, Ruling
from .rocm import ROCm
from .xpu import XPU

__all__ = [
    "AUTO",
    "DeviceKind",
    "Host",
    "Platform",
    "Ruling",
    "check_start_method",
    "choose_platform",
    "detect_platforms",
    "kind_named",
    "kinds",
    "not_inherited",
    "package_version",
    "resolve",
    "torch_builds",
]

#: The device that `resolve` chooses by what the host has.
AUTO = "auto"
#: Where other packages register their kinds.
ENTRY_POINTS = "stepcast.platforms"
#: Where devices are looked for unless told otherwise; tests put something else in its place.
this_host = Host()

_CPU = CPU()
#: In the order of preference.
_ACCELERATORS: tuple[DeviceKind, ...] = (HPU(), CUDA(), ROCm(), XPU())

_log = logging.getLogger("stepcast.runtime")


class _Unloadable(DeviceKind):
    """A registered kind whose package does not load."""

    def __init__(self, name: str, problem: str) -> None:
        self._platform = Platform(name=name, problem=problem)

    def detect(self, host: Host) -> Platform:  # noqa: ARG002
        return self._platform


def kinds() -> dict[str, DeviceKind]:
    """Return every kind of device by its name, in the order of preference; "cpu" stands last."""
    known = {kind.name: kind for kind in _ACCELERATORS}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if entry.name not in (*known, _CPU.name, AUTO):
            known[entry.name] = _load(entry)
    return {**known, _CPU.name: _CPU}


def _load(entry: metadata.EntryPoint) -> DeviceKind:
    try:
        made = entry.load()()
    except Exception as problem:  # noqa: BLE001 - another package's mistake must not keep the others from being used
        return _Unloadable(entry.name, f"{entry.value} can't be loaded: {type(problem).__name__}: {problem}")
    if not isinstance(made, DeviceKind) or made.name != entry.name:
        return _Unloadable(entry.name, f"{entry.value} must be a subclass of DeviceKind with the name {entry.name!r}")
    return made


def kind_named(name: str) -> DeviceKind:
    """Return a kind of device.

    Args:
        name: its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == _CPU.name:  # the rest need not be looked for
        return _CPU
    known = kinds()
    if name not in known:
        allowed = ", ".join(map(repr, (AUTO, *known)))
        raise ConfigError(f"device={name!r}: must be one of {allowed}; {_has(detect_platforms())}")
    return known[name]


def detect_platforms(host: Host | None = None) -> list[Platform]:
    """Find the kinds of device that this host has.

    Args:
        host: where to look; None for this host.

    Returns:
        Every kind of which there is a device, in the order of preference; "cpu" stands last, and always.
    """
    platforms = (kind.detect(host or this_host) for kind in kinds().values())
    return [each for each in platforms if each is not None]


def choose_platform(platforms: Sequence[Platform]) -> Platform:
    """Return the first kind of device that can be used.

    Args:
        platforms: what `detect_platforms` found.
    """
    return next(each for each in platforms if each.problem is None or each.name == _CPU.name)


def resolve(device: str, world_size: int, host: Host | None = None) -> DeviceKind:
    """Find the kind of device that a group shall run on, and see that the host has enough of it.

    Args:
        device: a kind's name, or "auto" for the first that can be used.
        world_size: ranks on this host.
        host: where to look; None for this host.

    Raises:
        ConfigError: there is no such kind, or this host lacks it, or has too few of it, or can't use it.
    """
    host = host or this_host
    if device == AUTO:
        platform: Platform | None = choose_platform(detect_platforms(host))
        assert platform is not None  # noqa: S101 - the CPU is always there
        kind = kind_named(platform.name)
    else:
        kind = kind_named(device)
        if kind is _CPU:  # whose problem, a missing torch, is none of a worker's that does without
            return kind
        platform = kind.detect(host)
    told = f"device={device!r}"
    if platform is None:
        raise ConfigError(f"{told}: {_has(detect_platforms(host))}; use one of these, or device={AUTO!r}")
    if kind is _CPU:
        return kind
    if platform.problem is not None:
        raise ConfigError(f"{told} can't be used: {platform.problem}")
    count = kind.count(platform)
    if count is not None and count < world_size:
        masks = "".join(f" {name}={value!r}" for name, value in platform.masks.items())
        raise ConfigError(
            f"world_size={world_size}: needs as many {platform.name} devices, but {count} can be used of "
            f"{len(platform.devices)}{masks and ' with' + masks}; lower world_size, or make more visible"
        )
    return kind


def not_inherited() -> frozenset[str]:
    """Return the variables with which a process binds itself to a device, and that no child of it must have."""
    return frozenset(name for kind in _ACCELERATORS for name in kind.not_inherited)


def check_start_method(kind: DeviceKind, method: str, modules: Mapping[str, Any] | None = None) -> None:
    """See that processes for a kind of device may be started in a certain way; log what may go wrong.

    Args:
        kind: the kind.
        method: "spawn", "fork" or "forkserver".
        modules: the modules that this process has imported; None for `sys.modules`.

    Raises:
        ConfigError: they may not.
    """
    ruling = kind.start_method(method, sys.modules if modules is None else modules)
    if ruling.refused is not None:
        raise ConfigError(
            f"start_method={method!r} with device={kind.name!r}: {ruling.refused}; use start_method='spawn'"
        )
    if ruling.warning is not None:
        _log.warning(
            "start_method=%r with device=%r, as it was asked for; 'spawn' is safer: %s",
            method,
            kind.name,
            ruling.warning,
        )


def _has(platforms: Sequence[Platform]) -> str:
    return f"this host has {', '.join(each.name for each in platforms)}"
