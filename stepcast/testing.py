"""Faults for an embedder's own tests: see docs/testing.md."""

from stepcast.runtime.testing import FaultyGroup as FaultyGroup
from stepcast.runtime.testing import FrameFaults as FrameFaults
from stepcast.runtime.testing import InjectedFaultError as InjectedFaultError
from stepcast.runtime.testing import wait_for_ends as wait_for_ends
