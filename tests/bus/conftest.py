"""Sockets for the bus's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import garbage

from stepcast.bus.endpoints import RunDirectory
from tests.bus.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sockets of one run, closed after the test."""
    directory = RunDirectory()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Rig(context, directory)
    try:
        yield made
    finally:
        made.close()
        context.destroy(linger=0)  # what a test made by itself and failed to close
        garbage.gc.stop()  # pyzmq's thread, which forgets buffers that were sent without a copy
        directory.remove()
