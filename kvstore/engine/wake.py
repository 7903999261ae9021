"""Waking tasks that wait for something to change."""

from __future__ import annotations

import asyncio

__all__ = ["Signal"]


class Signal:
    """Wakes everybody who waits now, who came first first; who comes later waits for the next one.

    So of those who look for something, find nothing, and wait again, each is the first one in turn.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wake the waiters."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float) -> bool:
        """Wait for the next `notify`; False when `timeout` seconds pass first."""
        if timeout <= 0:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout)
            return bool(done)
        finally:
            self._waiters.pop(waiter, None)
