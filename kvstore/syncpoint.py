"""Named points at which a test can hold this process, to kill or stop it exactly there.

``KVSTORE_SYNC_POINT=name:path`` arms one point: the process that reaches it creates the file
`path` and waits until ``path.go`` exists. Unarmed, a point costs one comparison.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["arm_from_environment", "armed", "reach"]

_POLL_SECONDS = 0.002

_armed: dict[str, Path] = {}


def arm_from_environment() -> None:
    """Read ``KVSTORE_SYNC_POINT``; called when a client is created."""
    name, _, path = os.environ.get("KVSTORE_SYNC_POINT", "").partition(":")
    _armed.clear()
    if name and path:
        _armed[name] = Path(path)


def armed(name: str) -> bool:
    """Return whether somebody waits for this point."""
    return name in _armed


def reach(name: str) -> None:
    """Say that the point is reached and wait for the word to go on. Blocks only when armed."""
    path = _armed.get(name)
    if path is None:
        return
    path.touch()
    go = path.with_name(path.name + ".go")
    while not go.exists():
        time.sleep(_POLL_SECONDS)
