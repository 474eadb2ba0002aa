"""Imported by a worker's interpreter before it runs any of stepcast's code, where PYTHONPATH leads here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import signs

sys.path.pop()
signs.reach("spawning")
