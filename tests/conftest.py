"""What holds for every test."""

from __future__ import annotations

import hypothesis

from .leaks import leak_guard, session_guard

__all__ = ["leak_guard", "session_guard"]

# A busy machine slows an example down by more than hypothesis allows for.
hypothesis.settings.register_profile("stepcast", deadline=None, print_blob=True)
hypothesis.settings.load_profile("stepcast")
