"""The engine's world, as in tests/engine; the stub of kvikio, as in tests/tiers_gpu; ours beside."""

import sys
from pathlib import Path

for name in ("engine", "tiers_gpu", "gpu_engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))

from world_fixture import make_world

__all__ = ["make_world"]
