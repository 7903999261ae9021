"""An engine on directories of its own, for every test that asks for one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world_fixture import make_world

__all__ = ["make_world"]
