"""Faults for an embedder's own tests: see docs/testing.md."""

from stepcast.runtime.testing import FaultyGroup, FrameFaults, InjectedFaultError, wait_for_ends

__all__ = ["FaultyGroup", "FrameFaults", "InjectedFaultError", "wait_for_ends"]
