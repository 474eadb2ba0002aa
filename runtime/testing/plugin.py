"""The pytest plugin of stepcast: `faulty_group`.

pytest loads this module at each of its starts, wherever stepcast is installed: what is heavy, the fixture imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .group import FaultyGroup

#: How long what the test has started may take to go away after it.
LEAK_GRACE_S = 5.0


@pytest.fixture
def faulty_group() -> Iterator[Callable[..., FaultyGroup]]:
    """Start groups into which faults can be injected; at the test's end they are shut down.

    The test fails where something is left behind then, be it the group's or the test's own: a process, a thread, a
    descriptor, a run directory.

    Yields:
        A function of an `ExecutorConfig` and of `FaultyGroup`'s other arguments, which returns the running group.
    """
    from zmq.utils.garbage import gc as buffers  # noqa: PLC0415 - only where it is used, as above

    from .census import Census  # noqa: PLC0415
    from .group import FaultyGroup  # noqa: PLC0415

    census = Census()
    had_thread = buffers.is_alive()
    with contextlib.ExitStack() as groups:
        yield lambda config, **options: groups.enter_context(FaultyGroup(config, **options))
    if not had_thread:
        buffers.stop()  # pyzmq's thread, which forgets arrays that were sent without a copy, stays otherwise
    left = census.leaks(LEAK_GRACE_S)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
