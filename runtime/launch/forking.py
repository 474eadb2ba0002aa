"""What must be seen to in this process before it forks."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from pathlib import Path

from stepcast.bus.errors import ConfigError

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: the threads end, and come back when they are needed


def check_not_daemon(method: str) -> None:
    """See that multiprocessing lets this process have children.

    Args:
        method: the start method.

    Raises:
        ConfigError: it does not.
    """
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            f"start_method={method!r}: this process is a daemon of multiprocessing's, which gives such processes no "
            "children; use start_method='spawn', or start this process with daemon=False"
        )


def release_openmp_threads() -> None:
    """End the threads that GNU's OpenMP keeps for this one; does nothing where the library is not loaded.

    A fork has none of them, but its copy of the library would wait for them in its first parallel region, for good.
    torch's are kept by this library.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for path in set(re.findall(r"/\S*libgomp\S*\.so\S*$", maps, flags=re.MULTILINE)):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # new in GCC 9
        if pause is not None:
            pause(_PAUSE_SOFT)
