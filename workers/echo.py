"""Workers without a model, for tests, benchmarks and trying things out."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from .base import RankInfo, Worker


class Echo(Worker):
    """Answers each step with the step itself."""

    def setup(self, rank: RankInfo) -> None:
        """Remember the rank."""
        self.rank = rank.rank

    def execute(self, step: Any) -> Any:
        """Return the step."""
        return step

    def whoami(self) -> int:
        """Return this rank."""
        return self.rank

    def sleep(self, seconds: float) -> int:
        """Sleep, then return this rank.

        Args:
            seconds: how long.
        """
        time.sleep(seconds)
        return self.rank


class Digest(Echo):
    """Answers each step, which must be bytes, with its length and SHA-256 digest, and counts the steps."""

    def setup(self, rank: RankInfo) -> None:
        """Start counting."""
        super().setup(rank)
        self.count = 0

    def execute(self, step: Any) -> Any:
        """Digest a step.

        Args:
            step: bytes, or any buffer of bytes.

        Returns:
            The number of steps so far, the length in bytes, and the digest.
        """
        self.count += 1
        return [self.count, len(step), hashlib.sha256(step).digest()]
