"""What holds for every test."""

from __future__ import annotations

import signal

import hypothesis

from .leaks import leak_guard, session_guard

__all__ = ["leak_guard", "session_guard"]

# A shell ignores SIGINT in what it starts in the background, and so would every process below: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine slows an example down by more than hypothesis allows for.
hypothesis.settings.register_profile("stepcast", deadline=None, print_blob=True)
hypothesis.settings.load_profile("stepcast")
