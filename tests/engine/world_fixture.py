"""The fixture `make_world`, for every directory whose tests run a real engine."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
