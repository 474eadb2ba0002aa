"""What scenarios share."""

from __future__ import annotations

from collections.abc import Callable

from stepcast.runtime.testing.stage import Stage

#: The names of the errors that are expected.
LOST, FAILED, LATE = "WorkerLost", "StepFailed", "StepTimeout"
COLLECTIVE = {"worker": "stepcast.runtime.testing.worker:Collective"}
PARKED = {"worker": "stepcast.runtime.testing.worker:ParkedCollective"}
#: Stacks of a group that ends for a limit are waited for this long.
SHORT = {"step_timeout_s": 0.7, "dump_timeout_s": 0.2}
#: Why a scenario does not apply.
NOT_FORKED = "no rank is forked from the driver there"


def in_step(fault: str, seconds: float = 3600.0, *, count: int = 4, then: bool = False) -> Callable[[Stage], None]:
    """One rank fails in a step; `then`: the group must serve the next ones."""

    def run(stage: Stage) -> None:
        stage.group.in_next_step(stage.victim, fault, seconds)
        stage.fault(lambda: stage.run(1 if then else count))
        if then:
            stage.serve_on()

    return run
