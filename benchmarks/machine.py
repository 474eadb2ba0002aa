"""The machine and the versions that a result was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import zmq

_PACKAGES = ("stepcast", "pyzmq", "msgpack", "numpy")
_GIT_LIMIT_S = 5.0


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, kernel, and how busy the machine is now."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "load_average_1min": os.getloadavg()[0],
    }


def versions() -> dict[str, str | None]:
    """Python, the packages that peers use, and the checkout's commit; None for what is not there."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "libzmq": zmq.zmq_version(), **found, "commit": _commit()}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
