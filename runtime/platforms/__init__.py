"""Which kinds of device this host has, told from device files, packages and variables.

Nothing is imported and no device is opened: importing torch takes seconds, and asking a device's runtime may acquire
the device, which a driver must leave to its ranks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_INTEL = "0x8086"
_HABANA = "0x1da3"
#: What torch's version.py says of its build, and the kind of device that this is for.
_BUILDS = {"cuda": "cuda", "hip": "rocm", "xpu": "xpu"}
#: Empty or -1, these hide every device; other masks have no such meaning.
_CAN_HIDE_ALL = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _find_module(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin or ""


def package_version(distribution: str) -> str | None:
    """Return an installed package's version; None where it is not installed.

    Args:
        distribution: the name that it is installed by.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where to look; tests put something else in its place.

    Attributes:
        root: the file system's root.
        environ: the environment.
        find_module: returns the file of a top-level module, without importing it; None where there is none.
        version: returns the version of a package; None where it is not installed.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_module: Callable[[str], str | None] = _find_module
    version: Callable[[str], str | None] = package_version


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of device.

    Attributes:
        name: "cuda", "rocm", "hpu", "xpu" or "cpu".
        devices: the device files of this kind, before any mask; none for "cpu".
        masks: the variables that hide some of them or bind them, where set.
        software: what drives them from Python, with its version; None where that is missing.
        problem: why they can't be used; None where nothing speaks against it.
    """

    name: str
    devices: Sequence[str] = ()
    masks: Mapping[str, str] = field(default_factory=dict)
    software: str | None = None
    problem: str | None = None


def detect_platforms(host: Host | None = None) -> list[Platform]:
    """Find the kinds of device that this host has.

    Args:
        host: where to look; None for this host.

    Returns:
        Every kind of which there is a device, in the order of preference; "cpu" stands last, and always.
    """
    host = host or Host()
    builds = torch_builds(host)
    found = [_hpu(host), _cuda(host, builds), _rocm(host, builds), _xpu(host, builds)]
    return [*(each for each in found if each is not None), _cpu(host)]


def choose_platform(platforms: Sequence[Platform]) -> Platform:
    """Return the first kind of device that can be used.

    Args:
        platforms: what `detect_platforms` found.
    """
    return next(each for each in platforms if each.problem is None or each.name == "cpu")


def torch_builds(host: Host) -> frozenset[str]:
    """Tell for which kinds of device the installed torch is built, from the text of its version.py.

    Args:
        host: where to look.

    Returns:
        Some of "cuda", "rocm" and "xpu"; nothing where torch is built for CPUs alone, or not installed.
    """
    origin = host.find_module("torch")
    try:
        text = Path(origin).with_name("version.py").read_text(encoding="utf-8") if origin else ""
    except OSError:
        return frozenset()
    return frozenset(
        platform
        for name, platform in _BUILDS.items()
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", text, flags=re.MULTILINE)
    )


def _hpu(host: Host) -> Platform | None:
    devices = [path for path in _device_files(host, "accel", r"accel\d+") if _vendor(host, "accel", path) == _HABANA]
    devices += _device_files(host, "", r"hl\d+")  # drivers older than 1.11
    if not devices:
        return None
    version = host.version("habana-torch-plugin")
    software = None if host.find_module("habana_frameworks") is None else f"habana-torch-plugin {version or '?'}"
    problem = None
    if software is None:
        problem = (
            "habana_frameworks can't be imported: install the habana-torch-plugin that belongs to the driver's release "
            "(it is not on PyPI)"
        )
    return _platform(
        "hpu", host, devices, ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"), software=software, problem=problem
    )


def _cuda(host: Host, builds: frozenset[str]) -> Platform | None:
    devices = _device_files(host, "", r"nvidia\d+")
    if not devices and (host.root / "dev/dxg").exists():  # the one device of the Windows Subsystem for Linux
        devices = ["/dev/dxg"]
    return _torch_platform("cuda", host, builds, devices, ("CUDA_VISIBLE_DEVICES",))


def _rocm(host: Host, builds: frozenset[str]) -> Platform | None:
    if not (host.root / "dev/kfd").exists():
        return None
    nodes = (host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    gpus = sorted(path.parent.name for path in nodes if _read(path) not in ("", "0"))  # a CPU's node has gpu_id 0
    devices = [f"/dev/kfd node {node}" for node in gpus]
    return _torch_platform(
        "rocm", host, builds, devices, ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    )


def _xpu(host: Host, builds: frozenset[str]) -> Platform | None:
    render_nodes = _device_files(host, "dri", r"renderD\d+")
    devices = [path for path in render_nodes if _vendor(host, "drm", path) == _INTEL]
    return _torch_platform("xpu", host, builds, devices, ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"))


def _cpu(host: Host) -> Platform:
    version = host.version("torch")
    return Platform(
        name="cpu",
        software=version and f"torch {version}",
        problem=None if version else "torch is not installed",
    )


def _torch_platform(
    name: str, host: Host, builds: frozenset[str], devices: Sequence[str], masks: Sequence[str]
) -> Platform | None:
    if not devices:
        return None
    version = host.version("torch")
    software, problem = None, None
    if name in builds:
        software = f"torch {version or '?'}"
    elif version is None:
        problem = "torch is not installed"
    else:
        problem = f"torch {version} is not built for {name}: install the build that is"
    return _platform(name, host, devices, masks, software=software, problem=problem)


def _platform(
    name: str, host: Host, devices: Sequence[str], masks: Sequence[str], *, software: str | None, problem: str | None
) -> Platform:
    present = {mask: host.environ[mask] for mask in masks if mask in host.environ}
    hiding = [mask for mask, value in present.items() if mask in _CAN_HIDE_ALL and value.strip() in ("", "-1")]
    if problem is None and hiding:
        problem = f"{hiding[0]}={present[hiding[0]]!r} hides every device"
    if problem is None and (locked := [path for path in devices if not _is_accessible(host, path)]):
        problem = f"{locked[0]} can't be opened by this user: join the group that it belongs to"
    return Platform(name=name, devices=devices, masks=present, software=software, problem=problem)


def _device_files(host: Host, directory: str, pattern: str) -> list[str]:
    where = host.root / "dev" / directory
    try:
        names = [path.name for path in where.iterdir() if re.fullmatch(pattern, path.name)]
    except OSError:
        return []
    return [str(Path("/dev", directory, name)) for name in sorted(names, key=lambda name: (len(name), name))]


def _vendor(host: Host, kind: str, device: str) -> str:
    return _read(host.root / "sys/class" / kind / Path(device).name / "device/vendor")


def _is_accessible(host: Host, device: str) -> bool:
    return os.access(host.root / device.split(" ", maxsplit=1)[0].lstrip("/"), os.R_OK | os.W_OK)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
