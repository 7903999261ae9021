"""The engine's world, as in tests/engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from world_fixture import make_world

__all__ = ["make_world"]
