"""Programs that torchrun starts as each rank: `programs.py NAME DIRECTORY SETTINGS`.

They leave notes by `signs`, as the workers do, and findings: JSON, in a file of its own for each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepcast import ConfigError, Executor, ExecutorConfig, StartupError, StepFailed, WorkerLost
from stepcast.runtime.launch import torchrun

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "faults"))
import signs  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
VICTIM = f"{HERE.parent / 'faults' / 'victims.py'}:Victim"

_POLL_INTERVAL_S = 0.005
_WAIT_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("a program waits for nothing")
        time.sleep(_POLL_INTERVAL_S)


class Program:
    """What a program is told, and where it tells."""

    def __init__(self, directory: str, settings: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._settings = settings

    def config(self, **settings: Any) -> ExecutorConfig:
        plan = {"dir": str(self.directory), "world_size": 0}
        return ExecutorConfig(
            **{
                "worker": VICTIM,
                "worker_options": {"dir": str(self.directory)},
                "worker_env": {signs.PLAN: json.dumps(plan)},
                "startup_timeout_s": 60.0,
                "step_timeout_s": 60.0,
                **self._settings,
                **settings,
            }
        )

    def note(self, name: str) -> None:
        signs.note(self.directory, f"{name}-{RANK}")

    def there(self, *names: str) -> bool:
        return all((self.directory / name).exists() for name in names)

    def tell(self, name: str, value: Any) -> None:
        draft = self.directory / f".{name}-{os.getpid()}"
        draft.write_text(json.dumps(value), encoding="utf-8")
        draft.rename(self.directory / name)


# --- That work ------------------------------------------------------------------------------------------------------


def exercise(executor: Executor) -> dict[str, Any]:
    """What every backend must answer alike, of a group of three."""
    found: dict[str, Any] = {
        "step": executor.step("a step"),
        "gather": executor.step({}, gather=True),
        "collective": executor.step(["collective"], gather=True),
        "futures": [executor.submit(number) for number in range(20)],
        "call": executor.call("act", "collective"),
    }
    found["futures"] = [future.result(_WAIT_S) for future in found["futures"]]
    try:
        executor.step({"1": "raise"}, gather=True)
    except StepFailed as error:
        found["failed"] = [error.rank, error.exception_type, list(error.failed_ranks), error.epoch_ended]
    found["after"] = executor.step(["collective"])
    return found


def two_groups(program: Program) -> None:
    """Two groups in a row, in which every rank's program goes on after each; the second's is built in a thread."""
    config = program.config(followers_return=True, heartbeat_interval_s=0.2)
    with Executor(config) as executor:
        if executor.is_driver:
            program.tell("first", exercise(executor))
            program.tell("stopped", stop_and_look(executor))
    program.note("between")
    os.environ["KEPT"] = "mine"
    with built_in_a_thread(config) as executor:
        if executor.is_driver:
            program.tell("second", exercise(executor))
    program.tell(
        f"after-{RANK}",
        {
            "plan": signs.PLAN in os.environ,
            "kept": os.environ["KEPT"],
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "state": executor.state.value,
        },
    )


def built_in_a_thread(config: ExecutorConfig) -> Executor:
    built: list[Executor] = []
    builder = threading.Thread(target=lambda: built.append(Executor(config)))
    builder.start()
    builder.join()
    return built[0]


def stop_and_look(executor: Executor) -> Any:
    """Stop rank 2 by SIGSTOP, until `health` tells; then a step, with all of them."""
    os.kill(executor.worker_pids[2], signal.SIGSTOP)
    wait_until(lambda: not executor.health().ok)
    verdicts = [rank.verdict for rank in executor.health().ranks]
    os.kill(executor.worker_pids[2], signal.SIGCONT)
    wait_until(lambda: executor.health().ok)
    return [verdicts, executor.step({}, gather=True)]


def once(program: Program) -> None:
    """A group built in a thread. Nobody but the driver goes on after it."""
    executor = built_in_a_thread(program.config())
    program.note("on")
    with executor:
        program.tell("step", executor.step({}, gather=True))
    try:
        Executor(program.config())
    except ConfigError as error:
        program.tell("second", str(error))
    program.note("end")


# --- That do not come up --------------------------------------------------------------------------------------------


def bad_starts(program: Program) -> None:
    """One start after another that fails."""
    program.tell(f"settings-{RANK}", start(program, max_message_bytes=1 << (20 + (RANK == 2))))

    if RANK == 2:
        wait_until(lambda: program.there("absent-0", "absent-1"))
    else:
        program.tell(f"absent-{RANK}", start(program, startup_timeout_s=3.0))

    if RANK == 0:
        threading.Thread(target=interrupt_the_start).start()
    if RANK == 2:  # in the place of the two starts that it has missed
        wait_until(lambda: program.there("interrupted-0", "interrupted-1"))
        skip_groups(2)
    else:
        program.tell(f"interrupted-{RANK}", start(program))

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the driver: the agent sends it when a rank has failed
    plan = {"dir": str(program.directory), "at": "loading", "do": "raise", "ranks": [1], "others": "go on"}
    program.tell(f"raised-{RANK}", start(program, worker_env={signs.PLAN: json.dumps(plan)}))


def start(program: Program, **settings: Any) -> str:
    try:
        Executor(program.config(followers_return=True, **settings))
    except (StartupError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def interrupt_the_start() -> None:
    wait_until(lambda: any(thread.name == "stepcast-monitor" for thread in threading.enumerate()))
    os.kill(os.getpid(), signal.SIGINT)


def skip_groups(number: int) -> None:
    for _ in range(number):
        next(torchrun._groups)


# --- To be killed ---------------------------------------------------------------------------------------------------


def step(program: Program) -> None:
    """Run a step that never ends; on another attempt, one that does."""
    program.note("program")
    with Executor(program.config()) as executor:
        program.tell(f"pids-{ATTEMPT}", executor.worker_pids)
        if ATTEMPT != "0":
            program.tell("again", executor.step(["collective"], gather=True))
            return
        began = time.monotonic()
        try:
            executor.step(json.loads(os.environ["STEP"]))
        except WorkerLost as error:
            program.tell("lost", [error.rank, error.exit_code, str(error), time.monotonic() - began])
            raise


def drain(program: Program) -> None:
    """Finish what is under way when SIGTERM comes."""
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    program.note("program")
    with Executor(program.config()) as executor:
        future = executor.submit(["wait_for_go"])
        wait_until(leaving.is_set)
        program.note("leaving")
        program.tell("drained", [future.result(_WAIT_S), executor.step({}, gather=True)])
    program.note("end")


PROGRAMS = {program.__name__: program for program in (bad_starts, drain, once, step, two_groups)}


def main() -> None:
    name, directory, settings = sys.argv[1:]
    PROGRAMS[name](Program(directory, json.loads(settings)))


if __name__ == "__main__":
    main()
