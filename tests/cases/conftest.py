"""Stories run on the same engine, raw connection and client processes as the other tests."""

import sys
from pathlib import Path

for name in ("engine", "server", "cases"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))

from world_fixture import make_world

__all__ = ["make_world"]
