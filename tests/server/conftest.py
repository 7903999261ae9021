"""Raw calls to a daemon of a test's own."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from raw_calls import Raw


@pytest.fixture
def raw(start_daemon: Callable[..., Any]) -> Iterator[Callable[..., Raw]]:
    """Return a function that starts a daemon and connects to it."""
    opened: list[Raw] = []

    def start(*options: str, **kwargs: Any) -> Raw:
        connected = Raw(start_daemon(*options, **kwargs))
        opened.append(connected)
        return connected

    yield start
    for connected in opened:
        connected.close()
