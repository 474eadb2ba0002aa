"""What holds for every test."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from .leaks import leak_guard, session_guard

__all__ = ["leak_guard", "session_guard"]

# What a shell starts in the background ignores SIGINT, under nohup SIGHUP too, and so would every process below: tests
# send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine slows an example down by more than hypothesis allows for.
hypothesis.settings.register_profile("stepcast", deadline=None, print_blob=True)
hypothesis.settings.load_profile("stepcast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=5.0, help="how long each soak under faults lasts")
    parser.addoption("--long-steps", type=int, default=20_000, help="steps of the endurance run; a million is the aim")
    parser.addoption(
        "--all-chaos", action="store_true", help="each scenario of faults with every world size and start method"
    )
