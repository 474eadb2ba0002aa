"""The driver is killed, ended, frozen or interrupted, or its files are; the ranks have to follow it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable

from stepcast.runtime.testing.chaos import NO_ERROR
from stepcast.runtime.testing.driver_stage import DriverScenario, DriverStage

from .common import COLLECTIVE, LOST, NOT_FORKED

_QUICK = {"stop_timeout_s": 0.5, "terminate_timeout_s": 0.5}
_FROZEN_S = 1.0
#: More than sockets hold that nobody reads.
_LARGE_BYTES = 16 << 20
_STEPS = 20

Act = Callable[[DriverStage], None]


def _start(stage: DriverStage) -> None:
    stage.start_and_stay()


def _idle(stage: DriverStage) -> None:
    stage.start()
    stage.serve_on()


def _step(stage: DriverStage) -> None:
    stage.start()
    stage.be_in_step()


def _collective(stage: DriverStage) -> None:
    stage.start()
    stage.be_in_step(others="collective")


def _end_by(number: signal.Signals, phase: Act) -> Act:
    """A signal that the driver does not handle: the ranks go by themselves."""

    def run(stage: DriverStage) -> None:
        phase(stage)
        stage.fault(lambda: stage.signal(number))
        stage.end(-number)

    return run


def _running(stage: DriverStage) -> None:
    stage.start()
    stage.ask("run")
    stage.wait_until(lambda: stage.ask("answered") >= _STEPS, "the first steps")


def _go_on_running(stage: DriverStage) -> None:
    before = stage.ask("answered")
    stage.wait_until(lambda: stage.ask("answered") >= before + _STEPS, "more steps")
    told = stage.ask("halt")
    if told["problem"] is not None:
        raise AssertionError(f"after {told['answered']} steps: {told['problem']}")
    stage.serve_on()
    stage.tell("leave")
    stage.end(0)
    stage.record.released_at = None  # in good order, and not for the fault


def _freeze_and_resume(stage: DriverStage) -> None:
    """The ranks wait for it, and no step is lost."""
    _running(stage)

    def freeze() -> None:
        stage.signal(signal.SIGSTOP)
        time.sleep(_FROZEN_S)
        stage.signal(signal.SIGCONT)

    stage.fault(freeze)
    _go_on_running(stage)


def _freeze_past_reply_limit(stage: DriverStage) -> None:
    """A rank whose answer nobody reads ends by itself; the others when the driver is killed."""
    stage.start()
    stage.be_in_step(seconds=1.0, size=_LARGE_BYTES)
    stage.fault(lambda: stage.signal(signal.SIGSTOP))
    victim = stage.workers[stage.victim]
    stage.wait_until(lambda: victim not in stage.left(), "the end of the rank that can't answer")
    stage.record.detect()
    stage.signal(signal.SIGKILL)
    stage.end(-signal.SIGKILL)


def _freeze_for_good(stage: DriverStage) -> None:
    _running(stage)
    stage.signal(signal.SIGSTOP)
    stage.fault(lambda: stage.signal(signal.SIGKILL))
    stage.end(-signal.SIGKILL)


def _interrupt_twice(stage: DriverStage) -> None:
    """The first Ctrl-C would wait for a rank that takes no notice; the second ends the patience."""
    stage.start()
    stage.ask("tell_state")
    stage.be_in_step(fault="sleep_ignoring_sigterm")
    stage.tell("step", "never answered")
    stage.fault(lambda: stage.signal(signal.SIGINT))
    if (state := stage.read()) != "stopping":
        raise AssertionError(f"after a Ctrl-C the group is {state!r}")
    stage.signal(signal.SIGINT)
    stage.end(-signal.SIGINT)


def _lose_run_directory(stage: DriverStage) -> None:
    """The sockets are connected already: steps go on, and the shutdown finds nothing to remove."""
    _running(stage)
    stage.fault(lambda: shutil.rmtree(stage.run_directory))
    _go_on_running(stage)


def _kill_front_end(phase: Act) -> Act:
    """The driver's parent dies, as by the kernel's lack of memory; it follows, with its ranks."""

    def run(stage: DriverStage) -> None:
        stage.start(front_end=True)
        phase(stage)
        stage.fault(stage.kill_front_end)
        stage.end(-signal.SIGKILL, agents=-signal.SIGKILL)

    return run


def _kill_driver_of_front_end(stage: DriverStage) -> None:
    stage.start(front_end=True)
    stage.fault(lambda: stage.signal(signal.SIGKILL))
    stage.end(0, agents=1)


def _kill_rank_below_front_end(stage: DriverStage) -> None:
    stage.start(front_end=True, outlives_sigterm=True)  # which torchrun's agent sends as soon as a rank has died
    stage.fault(lambda: os.kill(stage.workers[stage.victim], signal.SIGKILL))
    stage.await_failure()
    stage.tell("leave")
    stage.end(0, agents=int(stage.victim != 0))  # which does not know of rank 0's child


def _fork_with_threads(stage: DriverStage) -> None:
    """The threads of torch are there before the forks, and nothing waits for them at the exit."""
    stage.start(computes=True)
    stage.fault(lambda: None)
    for number in range(4):
        if (answer := stage.ask("step", number)) != [number * stage.config.world_size] * stage.config.world_size:
            raise AssertionError(f"step {number} was answered {answer!r}")
    stage.tell("leave")
    stage.end(0)


_WATCHED = {**_QUICK, "watch_parent": True}
_KILL, _TERM, _INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT

SCENARIOS = (
    DriverScenario("kill-driver-in-start", NO_ERROR, _end_by(_KILL, _start), sweeps=True),
    DriverScenario("kill-driver-idle", NO_ERROR, _end_by(_KILL, _idle), sweeps=True),
    DriverScenario("kill-driver-in-step", NO_ERROR, _end_by(_KILL, _step), sweeps=True),
    DriverScenario(
        "kill-driver-in-collective", NO_ERROR, _end_by(_KILL, _collective), settings=COLLECTIVE, sweeps=True
    ),
    DriverScenario("terminate-driver-in-start", NO_ERROR, _end_by(_TERM, _start), sweeps=True),
    DriverScenario("terminate-driver-idle", NO_ERROR, _end_by(_TERM, _idle), sweeps=True),
    DriverScenario("terminate-driver-in-step", NO_ERROR, _end_by(_TERM, _step), sweeps=True),
    DriverScenario("interrupt-driver-in-start", NO_ERROR, _end_by(_INT, _start), settings=_QUICK),
    DriverScenario("interrupt-driver-idle", NO_ERROR, _end_by(_INT, _idle), settings=_QUICK),
    DriverScenario("interrupt-driver-in-step", NO_ERROR, _end_by(_INT, _step), settings=_QUICK),
    DriverScenario(
        "interrupt-driver-twice",
        NO_ERROR,
        _interrupt_twice,
        settings={"stop_timeout_s": 60.0},
        not_under={"torchrun": "its agent ends the driver by SIGTERM while that clears up: the next start sweeps"},
    ),
    DriverScenario("freeze-driver-and-resume", NO_ERROR, _freeze_and_resume),
    DriverScenario(
        "freeze-driver-past-reply-limit",
        NO_ERROR,
        _freeze_past_reply_limit,
        settings={"reply_timeout_s": 0.5},
        sweeps=True,
    ),
    DriverScenario("freeze-driver-and-kill", NO_ERROR, _freeze_for_good, sweeps=True),
    DriverScenario("lose-run-directory", NO_ERROR, _lose_run_directory),
    DriverScenario("kill-front-end", NO_ERROR, _kill_front_end(lambda _: None), settings=_WATCHED, sweeps=True),
    DriverScenario(
        "kill-front-end-in-step", NO_ERROR, _kill_front_end(DriverStage.be_in_step), settings=_WATCHED, sweeps=True
    ),
    DriverScenario("kill-driver-below-front-end", NO_ERROR, _kill_driver_of_front_end, settings=_WATCHED, sweeps=True),
    DriverScenario("kill-rank-below-front-end", LOST, _kill_rank_below_front_end, settings=_WATCHED),
    DriverScenario(
        "fork-with-threads-then-exit",
        NO_ERROR,
        _fork_with_threads,
        settings=COLLECTIVE,
        start_method="fork",
        not_under={"torchrun": NOT_FORKED, "ray": NOT_FORKED},
    ),
)
