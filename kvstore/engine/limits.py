"""Limits of spaces: quotas in each tier, and how long what nobody uses stays.

Who owns what: `SpaceIndex` holds a space's limits and what follows from them (how many more blocks
may come, and queues that yield its own coldest block); whoever fills a tier asks there first. This
module sets limits, and takes away what is too much, or too old, in the background.

Setting limits

1. The space gets eviction queues of its own, a part of its blocks at a time.
2. One LMDB transaction replaces its limits. If it fails, those of before stay in force.
3. They are in force; only now the caller hears of it, and the background begins.

Killed before 2 the old limits are there, after it the new ones: the next start has them in force
before it serves.

Keeping them, a few hundred blocks at a time, with a turn of the loop between

* A space that has too much in a tier loses its own coldest blocks there, by the eviction rule: what is
  leased, pinned, on its way or kept by its children stays, and is looked at again every second.
* A block whose last use is longer ago than its space's time to live leaves every tier, children
  first, by the same rule. `use_times` knows when that was.

Killed meanwhile: what left is gone from memory in any case; on disk it is there again if the delete
of its record was not durable, with the same last use, and leaves again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.index import Pressure, SpaceLimits
from kvstore.index.limits import NO_QUOTA
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvstore.engine.counters import Counters
    from kvstore.engine.store_thread import StoreThread
    from kvstore.engine.use_times import UseTimes
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Limits"]

log = logging.getLogger(__name__)

_INTERVAL_SECONDS: Final = 1.0
# Blocks that leave, or are offered, in one go: a few milliseconds.
_AT_ONCE: Final = 500
_OFFERED_AT_ONCE: Final = 2000
_SPACES_AT_ONCE: Final = 500


class Limits:
    """Sets and keeps the limits of all spaces.

    Attributes:
        defaults: stand in for what is not set for a space.
        times: when blocks were used.
        shrink: per tier, drops a space's coldest blocks for its quota.
        on_room: called when blocks may go to disk that could not before.
    """

    def __init__(
        self,
        index: BlockIndex,
        store: StoreThread,
        counters: Counters,
        times: UseTimes,
        defaults: SpaceLimits,
    ) -> None:
        """Compose; `shrink` is filled by whoever has the tiers."""
        self.defaults = defaults
        self.times = times
        self.shrink: dict[TierName, Callable[[SpaceIndex, int], int]] = {}
        self.on_room: Callable[[], None] = lambda: None
        self._index = index
        self._store = store
        self._counters = counters
        self._drop: dict[TierName, Callable[[Block, Pressure], None]] = {
            TierName.GPU: lambda block, _: index.drop_gpu(block),
            TierName.HOST: index.drop_host,
            TierName.DISK: index.drop_disk,
        }
        self._turn = asyncio.Lock()
        self._work = asyncio.Event()
        self._setting: set[asyncio.Task[SpaceLimits]] = set()
        self._task: asyncio.Task[None] | None = None

    def adopt(self, space: SpaceIndex, limits: SpaceLimits | None = None) -> None:
        """Put a space's limits in force, none or the stored ones. Before it is used: it blocks."""
        space.limit(limits or SpaceLimits(), self.defaults)
        if space.in_force:
            space.open_own()
            assert space.own is not None
            for queue in space.own.values():
                queue.offer_all(space.blocks.values())
        self._note_disk_quota(space)

    def restore(self) -> None:
        """Put the stored limits in force, of spaces that are in the index. Before serving: it blocks."""
        stored = self._store.store.limits()
        for space in self._index.spaces.values():
            self.adopt(space, stored.get(space.id))
        self.times.restore(self._store.store.uses())

    def start(self) -> None:
        """Begin to keep them."""
        self._task = asyncio.create_task(self._run(), name="limits")

    async def stop(self) -> None:
        """End; what is being set is set first. Idempotent."""
        while self._setting:
            await asyncio.wait(self._setting)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def change(
        self, space: SpaceIndex, changes: Mapping[str, int], cleared: Iterable[str] = ()
    ) -> SpaceLimits:
        """Set some limits of a space and clear others, durably; return what is in force.

        Once begun it runs to its end, also when the caller is cancelled: limits must not be durable
        and unknown.

        Raises:
            StoreDamaged: nothing has changed.
        """
        task = asyncio.create_task(self._change(space, changes, tuple(cleared)), name="set-limits")
        self._setting.add(task)
        task.add_done_callback(self._setting.discard)
        return await asyncio.shield(task)

    async def _change(
        self, space: SpaceIndex, changes: Mapping[str, int], cleared: Iterable[str]
    ) -> SpaceLimits:
        async with self._turn:
            limits = space.limits.changed(changes, cleared)
            if limits.over(self.defaults) and space.own is None:
                space.open_own()
                # What comes meanwhile is offered by who brings it.
                blocks = list(space.blocks.values())
                for at in range(0, len(blocks), _OFFERED_AT_ONCE):
                    for block in blocks[at : at + _OFFERED_AT_ONCE]:
                        self._index.offer(block)
                    await asyncio.sleep(0)
            await self._store.run(self._store.store.put_limits, space.id, limits)
            room = space.disk_room
            space.limit(limits, self.defaults)
            self._note_disk_quota(space)
        if space.disk_room > room:
            self.on_room()
        self._work.set()
        return space.in_force

    def _note_disk_quota(self, space: SpaceIndex) -> None:
        self._index.disk_quotas = self._index.disk_quotas or space.disk_quota < NO_QUOTA

    async def save_times(self) -> None:
        """Save when blocks were used, and what time it is, if that matters to any space or pin."""
        living = any(s.in_force.ttl_seconds is not None for s in self._index.spaces.values())
        if not living and not self.times.needed:
            return
        record = self.times.record()
        if record is None:
            return
        try:
            await self._store.run(self._store.store.put_uses, record)
        except KVStoreError as error:
            self.times.unsaved()
            log.warning("when blocks were used is not saved: %s; it is tried again", error)

    async def _run(self) -> None:
        while True:
            self._work.clear()
            try:
                await self._keep()
            except Exception:
                # The boundary of the task: one fault must not end it for all spaces.
                log.exception("keeping the limits of spaces failed; it goes on")
            try:
                async with asyncio.timeout(_INTERVAL_SECONDS):
                    await self._work.wait()
            except TimeoutError:
                continue

    async def _keep(self) -> None:
        """Look at every space that has limits once."""
        self.times.mark()
        for at, space in enumerate(list(self._index.spaces.values())):
            if at % _SPACES_AT_ONCE == _SPACES_AT_ONCE - 1:
                await asyncio.sleep(0)
            if space.own is not None and space.blocks:
                for tier in TierName:
                    await self._fit(space, tier)
                    await self._expire(space, tier)

    async def _fit(self, space: SpaceIndex, tier: TierName) -> None:
        """Drop what is too much in a tier, as far as it may leave now."""
        shrink = self.shrink.get(tier)
        while shrink is not None and (excess := space.excess(tier)) > 0:
            await self._settle(space, tier)
            if not shrink(space, min(excess, _AT_ONCE)):
                break
            await asyncio.sleep(0)

    async def _expire(self, space: SpaceIndex, tier: TierName) -> None:
        """Drop what was not used for too long from a tier, as far as it may leave now."""
        gone = 0
        while True:
            await self._settle(space, tier)
            ttl = space.in_force.ttl_seconds
            if ttl is None or space.own is None:
                return
            block = space.own[tier].peek()
            if block is None or block.sequence > self.times.unused_for(ttl):
                return
            self._drop[tier](block, Pressure.EXPIRED)
            self._counters.counts[f"expired_blocks_{tier.name.lower()}"] += 1
            gone += 1
            if gone % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _settle(self, space: SpaceIndex, tier: TierName) -> None:
        """Bring a space's coldest block to the front of its queue, in small steps."""
        assert space.own is not None
        while not space.own[tier].settle(_OFFERED_AT_ONCE):
            await asyncio.sleep(0)
