"""The boundary to the engine: nothing of ours is raised into vLLM.

vLLM treats an exception in a connector's hook as fatal for the whole engine, so every hook is
wrapped: what goes wrong is logged once per hook, counted, and answered like a cache that misses.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvstore.errors import KVStoreError

__all__ = ["Unsafe", "failures", "guarded", "log_once", "logger", "take_failures", "tell_failed"]

# Under vLLM's own logger, so that its handlers and level apply.
logger: Final = logging.getLogger("vllm.kvstore")

# Hooks that failed, by name, in this process.
failures: Final[Counter[str]] = Counter()
_said: set[str] = set()
_taken = 0
_lock = threading.Lock()

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Unsafe(BaseException):
    """Going on could give a wrong token. No hook swallows it: the engine stops."""


def log_once(level: int, message: str, *args: object, exc_info: bool = False) -> None:
    """Log a line the first time that this process says it."""
    text = message % args if args else message
    with _lock:
        if text in _said:
            return
        _said.add(text)
    logger.log(level, "kvstore: %s", text, exc_info=exc_info)


def tell_failed(what: str, error: BaseException) -> None:
    """Log that a load or a store failed: what may happen as a warning, a fault as an error."""
    if isinstance(error, KVStoreError):
        log_once(logging.WARNING, "a %s could not be done: %s", what, error)
    else:
        log_once(logging.ERROR, "a %s failed: %r", what, error, exc_info=True)


def take_failures() -> int:
    """Return how many hooks have failed in this process since the last call."""
    global _taken
    if not failures and not _taken:
        return 0
    with _lock:
        total = sum(failures.values())
        fresh, _taken = total - _taken, total
    return max(0, fresh)


def guarded(answer: Callable[[], Any]) -> Callable[[_Hook], _Hook]:
    """Wrap a hook: on any exception log once, count, and return `answer()`."""

    def wrap(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the boundary
                with _lock:
                    failures[hook.__name__] += 1
                log_once(
                    logging.ERROR,
                    "%s failed, the engine goes on without it: %s: %s",
                    hook.__name__,
                    type(error).__name__,
                    error,
                    exc_info=True,
                )
                return answer()

        return call  # type: ignore[return-value]

    return wrap
