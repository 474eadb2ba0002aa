"""Which scenarios `stepcast chaos` plays, under which backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stepcast.bus.errors import ConfigError
from stepcast.runtime.config import START_METHODS, started_by_torchrun

from .chaos import NotApplicable, Outcome, Scenario, play
from .scenarios import SCENARIOS

#: Those whose ranks are processes of their own.
BACKENDS = ("mp", "torchrun", "ray")
#: What is played everywhere is played with so many ranks.
_SIZES = (2, 4)


def choose(names: Sequence[str], backend: str) -> tuple[list[Scenario], list[NotApplicable]]:
    """Choose the scenarios that apply under a backend.

    Args:
        names: of those that are wanted; none for all of them.
        backend: the backend.

    Returns:
        Those to play, and those that do not apply, with the reason.

    Raises:
        ConfigError: there is no such scenario; or none of them can be played under the backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} has no processes to do a fault to: use {', '.join(BACKENDS)}")
    if started_by_torchrun():
        raise ConfigError("chaos starts torchrun itself: run it without torchrun, with --backend torchrun")
    known = {each.name: each for each in SCENARIOS}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"no scenario {', '.join(unknown)}; --list prints their names")
    wanted = [known[name] for name in names or known]
    return [each for each in wanted if backend not in each.not_under], [
        NotApplicable(each.name, backend, each.not_under[backend]) for each in wanted if backend in each.not_under
    ]


def play_each(
    scenarios: Sequence[Scenario], *, backend: str, start_method: str | None, world_size: int | None, seed: int
) -> list[Outcome]:
    """Play scenarios, one after another.

    Args:
        scenarios: those that apply.
        backend: what runs the ranks.
        start_method: how "mp" starts them; None for every way.
        world_size: how many there are; None for several sizes.
        seed: decides what is drawn.

    Returns:
        What became of each.

    Raises:
        ConfigError: the start method is not the backend's.
    """
    if backend != "mp" and start_method not in (None, "spawn"):
        raise ConfigError(f"start_method={start_method!r} is for backend='mp': with {backend!r} leave it away")
    every_method = START_METHODS if backend == "mp" else ("spawn",)
    sizes = _SIZES if world_size is None else (world_size,)
    methods = every_method if start_method is None else (start_method,)
    return [
        play(each, world_size=size, start_method=method, seed=seed, backend=backend)
        for size, method in itertools.product(sizes, methods)
        for each in scenarios
    ]
