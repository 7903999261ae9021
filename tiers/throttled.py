"""A tier as slow as one wants: one serial device in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.tiers.base import Outcome, Tier, Transfer
from kvstore.tiers.wrapper import TierWrapper

__all__ = ["Throttled"]


class Throttled(TierWrapper):
    """Delays the end of `read` and `write` to a bandwidth and a latency.

    All transfers queue, in the order of their calls, at one device that takes ``latency_seconds``
    per call plus the time of its bytes, padding included: however many calls run at once, their
    bandwidth together is exact. The wrapped tier works meanwhile; being slower than the throttle
    it shows through.

    Attributes:
        bytes_per_second: changes apply to later calls.
        latency_seconds: likewise.
        busy_until: loop time at which the device will have done everything asked so far.
    """

    own = TierWrapper.own | {"bytes_per_second", "latency_seconds", "busy_until"}

    def __init__(self, inner: Tier, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Throttle a tier.

        Args:
            inner: the tier.
            bytes_per_second: above 0, ``math.inf`` for no limit.
            latency_seconds: per call, at least 0.
        """
        super().__init__(inner)
        if bytes_per_second <= 0 or latency_seconds < 0:
            raise ValueError("bytes_per_second must be above 0, latency_seconds not below")
        self.bytes_per_second = bytes_per_second
        self.latency_seconds = latency_seconds
        self.busy_until = 0.0

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read, ending when the device would."""
        end = self._queue(transfers)
        outcomes = await self.inner.read(transfers)
        await self._wait(end)
        return outcomes

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write, ending when the device would."""
        end = self._queue(transfers)
        outcomes = await self.inner.write(transfers)
        await self._wait(end)
        return outcomes

    def _queue(self, transfers: Sequence[Transfer]) -> float:
        """Take the device's time for a call; return when it ends."""
        moved = sum(len(buffer) for transfer in transfers for buffer in transfer.buffers)
        begin = max(self.busy_until, asyncio.get_running_loop().time())
        self.busy_until = begin + self.latency_seconds + moved / self.bytes_per_second
        return self.busy_until

    async def _wait(self, end: float) -> None:
        # The loop's timers are coarse: one that fires early is waited for again.
        loop = asyncio.get_running_loop()
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(left)
