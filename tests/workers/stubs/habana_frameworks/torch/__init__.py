"""Importing any module of the package imports all of these, registers "hpu" and "hccl", and binds the process."""

import os

# Set by the real one as well: it does not compile in processes of its own.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from . import core, hpu
from .distributed import hccl

__all__ = ["autoload", "core", "hccl", "hpu"]


def autoload() -> None:
    """What torch calls when it is imported: so `import torch` alone may bind the process by its environment."""
