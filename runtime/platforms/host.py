"""What a host's files, packages and variables tell of its devices.

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

    def device_files(self, directory: str, pattern: str) -> list[str]:
        """Find device files.

        Args:
            directory: a directory under /dev.
            pattern: a regular expression for their names.

        Returns:
            Their paths, in the order of their numbers.
        """
        try:
            names = [
                path.name for path in (self.root / "dev" / directory).iterdir() if re.fullmatch(pattern, path.name)
            ]
        except OSError:
            return []
        return [str(Path("/dev", directory, name)) for name in sorted(names, key=lambda name: (len(name), name))]

    def vendor(self, kind: str, device: str) -> str:
        """Return the PCI vendor of a device, such as "0x8086".

        Args:
            kind: its directory under /sys/class.
            device: its device file.
        """
        return read(self.root / "sys/class" / kind / Path(device).name / "device/vendor")

    def may_open(self, device: str) -> bool:
        """Tell whether this user may open a device.

        Args:
            device: its device file; what follows a space only says which of several it is.
        """
        return os.access(self.root / device.split(" ", maxsplit=1)[0].lstrip("/"), os.R_OK | os.W_OK)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The devices of one kind that a host has.

    Attributes:
        name: "cuda", "rocm", "hpu", "xpu" or "cpu", or the name of a registered kind.
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


def found(
    name: str, host: Host, devices: Sequence[str], masks: Sequence[str], *, software: str | None, problem: str | None
) -> Platform:
    """Describe devices that were found, with what keeps them from being used.

    Args:
        name: the kind's name.
        host: where they are.
        devices: their device files.
        masks: the names of the variables that hide some of them.
        software: as in `Platform`.
        problem: what is wrong already; else masks and permissions are looked at.
    """
    present = {mask: host.environ[mask] for mask in masks if mask in host.environ}
    hiding = [mask for mask, value in present.items() if mask in _CAN_HIDE_ALL and value.strip() in ("", "-1")]
    if problem is None and hiding:
        problem = f"{hiding[0]}={present[hiding[0]]!r} hides every device"
    if problem is None and (locked := [path for path in devices if not host.may_open(path)]):
        problem = f"{locked[0]} can't be opened by this user: join the group that it belongs to"
    return Platform(name=name, devices=devices, masks=present, software=software, problem=problem)


def found_by_torch(name: str, host: Host, devices: Sequence[str], masks: Sequence[str]) -> Platform | None:
    """Describe devices that torch itself drives, where it is built for them.

    Args:
        name: the kind's name.
        host: where they are.
        devices: their device files.
        masks: the names of the variables that hide some of them.

    Returns:
        As `found`; None where there is no device.
    """
    if not devices:
        return None
    version = host.version("torch")
    software, problem = None, None
    if name in torch_builds(host):
        software = f"torch {version or '?'}"
    elif version is None:
        problem = "torch is not installed"
    else:
        problem = f"torch {version} is not built for {name}: install the build that is"
    return found(name, host, devices, masks, software=software, problem=problem)


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


def count_masked(devices: int, mask: str | None) -> int:
    """Count the devices that a mask leaves.

    Args:
        devices: how many there are.
        mask: numbers or names with commas between them; None where there is no mask. As the devices' runtimes do, what
            follows a number that there is not is left out.
    """
    if mask is None:
        return devices
    count = 0
    for entry in filter(None, (each.strip() for each in mask.split(","))):
        if entry.lstrip("-").isdigit() and not 0 <= int(entry) < devices:
            break
        count += 1
    return count


def read(path: Path) -> str:
    """Return a small file's text; nothing where it can't be read.

    Args:
        path: the file.
    """
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
