"""Faults for an embedder's own tests, injected into a live group of the embedder's own worker."""

from .frames import FrameFaults
from .group import FaultyGroup, wait_for_ends
from .worker import InjectedFaultError

__all__ = ["FaultyGroup", "FrameFaults", "InjectedFaultError", "wait_for_ends"]
