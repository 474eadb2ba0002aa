"""Faults for an embedder's own tests: see docs/testing.md."""

from stepcast.runtime.testing.frames import FrameFaults
from stepcast.runtime.testing.group import FaultyGroup, wait_for_ends
from stepcast.runtime.testing.worker import InjectedFaultError

__all__ = ["FaultyGroup", "FrameFaults", "InjectedFaultError", "wait_for_ends"]
