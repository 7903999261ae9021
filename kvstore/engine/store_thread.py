"""The one thread on which the daemon uses its store."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index.lmdb_store import MetaStore

__all__ = ["StoreThread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StoreThread:
    """Runs store methods, which block on the disk, in the order in which they are asked for.

    Attributes:
        store: may be used directly only before serving.
    """

    def __init__(self, store: MetaStore) -> None:
        """Wrap an open store."""
        self.store = store
        self._thread = ThreadPoolExecutor(1, "store")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `function` on the thread. A cancelled call still runs to its end."""
        future = self._thread.submit(function, *args, **kwargs)
        # Cancelling the wrapped future would take a call that has not begun off the queue.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Wait for what was asked for."""
        self._thread.shutdown()
