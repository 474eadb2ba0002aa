"""Programs that embed an executor, and end it, or themselves, in all the wrong ways: `embedders.py SCENARIO SETTINGS`.

Each runs in a process of its own, started by a test. It leaves notes by `signs`, as the workers do.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepcast import Executor, ExecutorConfig
from stepcast.runtime.launch import mp

sys.path.append(str(Path(__file__).parent))
import signs  # noqa: E402 - its folder had to be found first

Scenario = Callable[[ExecutorConfig, Any], object]


def start(config: ExecutorConfig, argument: Any) -> None:
    """Start, and come no further."""
    if config.start_method == "fork" and "spawning" in config.worker_env[signs.PLAN]:
        run_worker = mp.run_worker

        def run_worker_late(*arguments: Any) -> int:
            signs.reach("spawning")
            return run_worker(*arguments)

        mp.run_worker = run_worker_late
    Executor(config)


def idle(config: ExecutorConfig, argument: Any) -> None:
    """Start, and do nothing with it."""
    executor = Executor(config)
    signs.note(config.worker_options["dir"], "ready")
    signs.block(executor)


def step(config: ExecutorConfig, argument: Any) -> None:
    """Run a step that never ends."""
    Executor(config).step(argument)


def stop(config: ExecutorConfig, argument: Any) -> None:
    """Shut down, which never ends."""
    Executor(config).shutdown()


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (start, idle, step, stop)
}


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    name, settings, argument = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    SCENARIOS[name](ExecutorConfig(**settings), argument)


if __name__ == "__main__":
    main()
