"""Run one model on several accelerators: a ZeroMQ message bus with a broadcast loop.

The public names are imported when they are first used: a worker process needs few of them, and starts sooner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepcast.bus.errors import Backpressure as Backpressure
    from stepcast.bus.errors import Closed as Closed
    from stepcast.bus.errors import ConfigError as ConfigError
    from stepcast.bus.errors import Diverged as Diverged
    from stepcast.bus.errors import ProtocolError as ProtocolError
    from stepcast.bus.errors import StartupError as StartupError
    from stepcast.bus.errors import StepAborted as StepAborted
    from stepcast.bus.errors import StepcastError as StepcastError
    from stepcast.bus.errors import StepFailed as StepFailed
    from stepcast.bus.errors import StepTimeout as StepTimeout
    from stepcast.bus.errors import WorkerLost as WorkerLost
    from stepcast.bus.verdicts import Verdict as Verdict
    from stepcast.runtime.async_executor import AsyncExecutor as AsyncExecutor
    from stepcast.runtime.config import ExecutorConfig as ExecutorConfig
    from stepcast.runtime.executor import Executor as Executor
    from stepcast.runtime.health import GroupHealth as GroupHealth
    from stepcast.runtime.health import RankHealth as RankHealth
    from stepcast.runtime.state import GroupState as GroupState
    from stepcast.runtime.step import StepFuture as StepFuture
    from stepcast.workers.base import RankInfo as RankInfo
    from stepcast.workers.base import Worker as Worker

_HOMES = {
    "stepcast.bus.errors": (
        "Backpressure",
        "Closed",
        "ConfigError",
        "Diverged",
        "ProtocolError",
        "StartupError",
        "StepAborted",
        "StepFailed",
        "StepTimeout",
        "StepcastError",
        "WorkerLost",
    ),
    "stepcast.bus.verdicts": ("Verdict",),
    "stepcast.runtime.async_executor": ("AsyncExecutor",),
    "stepcast.runtime.config": ("ExecutorConfig",),
    "stepcast.runtime.executor": ("Executor",),
    "stepcast.runtime.health": ("GroupHealth", "RankHealth"),
    "stepcast.runtime.step": ("StepFuture",),
    "stepcast.runtime.state": ("GroupState",),
    "stepcast.workers.base": ("RankInfo", "Worker"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - a list of strings, computed


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
