"""What happens to attachments when their process forks or exits."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Final, Protocol

from kvstore.attach.incarnation import fork_guard

__all__ = ["keep_track"]

# An exit waits so long for copies under way.
_EXIT_SECONDS: Final = 1.0


class _Leaving(Protocol):
    def close(self, timeout_s: float) -> None: ...

    def abandon(self) -> None: ...


_living: Final[weakref.WeakSet[_Leaving]] = weakref.WeakSet()
_hooks: Final[list[bool]] = []


def keep_track(attachment: _Leaving) -> None:
    """Have forks and the interpreter's exit find an attachment.

    Hooks are set at the first call, not at import: whoever never attaches is left alone.
    """
    if not _hooks:
        _hooks.append(True)
        os.register_at_fork(
            before=fork_guard.acquire,
            after_in_parent=fork_guard.release,
            after_in_child=_after_fork_in_child,
        )
        atexit.register(_leave_all)
    _living.add(attachment)


def _after_fork_in_child() -> None:
    for attachment in list(_living):
        attachment.abandon()
    _living.clear()
    fork_guard.release()


def _leave_all() -> None:
    for attachment in list(_living):
        attachment.close(_EXIT_SECONDS)
