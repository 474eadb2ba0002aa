"""Run one model on several accelerators: a ZeroMQ message bus with a broadcast loop."""

from __future__ import annotations

from stepcast.bus.errors import (
    Backpressure,
    Closed,
    ConfigError,
    Diverged,
    ProtocolError,
    StartupError,
    StepAborted,
    StepcastError,
    StepFailed,
    StepTimeout,
    WorkerLost,
)
from stepcast.runtime.async_executor import AsyncExecutor
from stepcast.runtime.config import ExecutorConfig
from stepcast.runtime.executor import Executor
from stepcast.runtime.health import GroupHealth, RankHealth
from stepcast.runtime.pending import StepFuture
from stepcast.runtime.state import GroupState
from stepcast.workers.base import RankInfo, Worker

__all__ = [
    "AsyncExecutor",
    "Backpressure",
    "Closed",
    "ConfigError",
    "Diverged",
    "Executor",
    "ExecutorConfig",
    "GroupHealth",
    "GroupState",
    "ProtocolError",
    "RankHealth",
    "RankInfo",
    "StartupError",
    "StepAborted",
    "StepFailed",
    "StepFuture",
    "StepTimeout",
    "StepcastError",
    "Worker",
    "WorkerLost",
]
