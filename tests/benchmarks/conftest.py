"""Makes `benchmarks` importable, which is run from the checkout and never installed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # last: an installed stepcast must not be shadowed by the checkout's folder
