"""Faults for an embedder's own tests, injected into a live group of the embedder's own worker."""

from .frames import FrameFaults as FrameFaults
from .group import FaultyGroup as FaultyGroup
from .group import wait_for_ends as wait_for_ends
from .worker import InjectedFaultError as InjectedFaultError
