"""What happens to clients when their process forks or exits.

A forked child inherits open files but no threads. It must drop the lock that says that its parent
is alive, and it must never destroy a gRPC channel: grpc.aio then waits for its poller thread, which
the child has not got, and spins for ever as soon as the garbage collector finds a channel.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Final, Protocol

__all__ = ["fork_guard", "keep_in_children", "leave_with_process"]

# Held while a descriptor that children must close is opened and noted, so that no fork slips
# between the two.
fork_guard: Final = threading.Lock()

# An exit waits so long for copies under way.
_EXIT_SECONDS: Final = 1.0


class _Leaving(Protocol):
    def close(self, timeout_s: float) -> None: ...

    def abandon(self) -> None: ...


_leaving: Final[weakref.WeakSet[_Leaving]] = weakref.WeakSet()
_channels: Final[weakref.WeakSet[object]] = weakref.WeakSet()
_kept: Final[list[object]] = []
_hooks: Final[list[bool]] = []


def leave_with_process(attachment: _Leaving) -> None:
    """Close an attachment at exit, and abandon it in forked children."""
    _set_hooks()
    _leaving.add(attachment)


def keep_in_children(channel: object) -> None:
    """Have forked children never destroy a channel."""
    _set_hooks()
    _channels.add(channel)


def _set_hooks() -> None:
    """Set them at first use, not at import: whoever opens no client is left alone."""
    if _hooks:
        return
    _hooks.append(True)
    os.register_at_fork(
        before=fork_guard.acquire,
        after_in_parent=fork_guard.release,
        after_in_child=_after_fork_in_child,
    )
    atexit.register(_leave_all)


def _after_fork_in_child() -> None:
    for attachment in list(_leaving):
        attachment.abandon()
    _leaving.clear()
    _kept.extend(_channels)
    fork_guard.release()


def _leave_all() -> None:
    for attachment in list(_leaving):
        attachment.close(_EXIT_SECONDS)
