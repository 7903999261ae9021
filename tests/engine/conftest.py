"""An engine on directories of its own, for every test that asks for one."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_world import World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Return a function that describes a world; worlds of one name share their disk."""
    pools = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))

    def make(**options: Any) -> World:
        return World(tmp_path, pools, **options)

    yield make
    left = [path.name for path in pools.iterdir()]
    shutil.rmtree(pools)
    assert not left, f"pools left behind: {left}"
