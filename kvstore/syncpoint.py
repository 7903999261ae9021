"""Named points at which a test can hold this process, to kill or stop it exactly there.

``KVSTORE_SYNC_POINT=name:path`` arms one point: the process that reaches it creates the file
`path` and waits until ``path.go`` exists. A test that lives in the process arms with `arm`.
Unarmed, a point costs one look into an empty dictionary.

Points stand between the steps of the numbered protocols, at the head of the module that owns one.
`tests/crash/crash_points.py` lists those of the daemon, and what a crash there must leave behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["arm", "arm_from_environment", "armed", "reach"]

_POLL_SECONDS = 0.002

_armed: dict[str, Callable[[], None]] = {}


def arm_from_environment() -> None:
    """Read ``KVSTORE_SYNC_POINT``; called when a client is created, and when a daemon starts."""
    name, _, path = os.environ.get("KVSTORE_SYNC_POINT", "").partition(":")
    _armed.clear()
    if name and path:
        _armed[name] = lambda: _hold(Path(path))


def arm(name: str, action: Callable[[], None]) -> None:
    """Call `action` whenever the point is reached, on the thread that reaches it."""
    _armed[name] = action


def armed(name: str) -> bool:
    """Return whether somebody waits for this point."""
    return name in _armed


def reach(name: str) -> None:
    """Say that the point is reached and wait for the word to go on. Blocks only when armed."""
    action = _armed.get(name)
    if action is not None:
        action()


def _hold(path: Path) -> None:
    path.touch()
    go = path.with_name(path.name + ".go")
    while not go.exists():
        time.sleep(_POLL_SECONDS)
