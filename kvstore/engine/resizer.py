"""Growing and shrinking tiers while they serve.

Growing asks first whether the machine has it; the tier then takes it as it needs it. Shrinking
sets the limit at once, so that nothing is allocated beyond it, and empties what is too much in the
background: callers wait for it as long as they like. A later call replaces an earlier one. A
daemon that is started with less disk than the one before does the same from its start on.

Nothing of a capacity is durable: the next start has the configured one. What a crash leaves of the
work under way is in `disk_shrinker`; memory is gone with the process.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import Busy, ConfigError, InvalidRequest
from kvstore.tiers.base import TierName
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import BlockIndex
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier

__all__ = ["Resized", "Resizer", "Shrinker"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resized:
    """How far a change of capacity has got.

    Attributes:
        capacity_bytes: what the tier keeps to by now: more than was asked for until `done`.
        done: the tier fits.
        evicted: copies that left for it.
    """

    capacity_bytes: int
    done: bool
    evicted: int


class Shrinker(Protocol):
    """What makes one tier smaller."""

    evicted: int

    @property
    def capacity_bytes(self) -> int:
        """What the tier keeps to by now."""

    @property
    def done(self) -> bool:
        """Whether it fits its capacity."""

    def relent(self) -> None:
        """Undo what is not done yet: the capacity was changed."""

    async def run(self) -> None:
        """Work until the tier fits."""


class Resizer:
    """Changes capacities."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        host_shrinker: Shrinker,
        on_host: Callable[[], None],
    ) -> None:
        """Compose; `add_disk` follows when there is a disk tier.

        Args:
            index: knows which blocks there are.
            host: the host tier.
            host_shrinker: makes it smaller.
            on_host: called when its capacity was changed.
        """
        self._index = index
        self._host = host
        self._on_host = on_host
        self._disk: DiskTier | None = None
        self._on_disk: Callable[[], None] = lambda: None
        self._shrinkers: dict[TierName, Shrinker] = {TierName.HOST: host_shrinker}
        self._tasks: dict[TierName, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._closed = False

    def add_disk(self, disk: DiskTier, shrinker: Shrinker, on_disk: Callable[[], None]) -> None:
        """Take in the disk tier; see `__init__`."""
        self._disk = disk
        self._on_disk = on_disk
        self._shrinkers[TierName.DISK] = shrinker

    def start(self) -> None:
        """Begin to empty what was found at the start and is more than the capacity by now."""
        for tier, shrinker in self._shrinkers.items():
            if not shrinker.done and tier not in self._tasks:
                self._work(tier, shrinker)

    async def stop(self) -> None:
        """Break off what is under way, and take no more."""
        self._closed = True
        await self.break_off()

    async def break_off(self) -> None:
        """Break off what is under way; wait until it has let go of everything."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for shrinker in self._shrinkers.values():
            shrinker.relent()

    async def resize(self, tier: TierName, capacity_bytes: int, timeout: float) -> Resized:
        """Change a tier's capacity; return when it fits, or after `timeout` seconds.

        Raises:
            InvalidRequest: there is no such tier.
            ConfigError: the machine cannot give that much, or a block would not fit any more;
                nothing was changed.
            Busy: the daemon is stopping.
        """
        shrinker = self._shrinkers.get(tier)
        if shrinker is None:
            raise InvalidRequest("tier", f"this daemon has no {tier.name.lower()} tier")
        async with self._turn:
            if self._closed:
                raise Busy("the daemon is stopping")
            before = shrinker.evicted
            await self._check(tier, capacity_bytes)
            await self._set(tier, capacity_bytes, shrinker)
            task = self._tasks[tier]
        await asyncio.wait({task}, timeout=timeout)
        return Resized(shrinker.capacity_bytes, shrinker.done, shrinker.evicted - before)

    async def _check(self, tier: TierName, capacity_bytes: int) -> None:
        for space in self._index.spaces.values():
            if space.blocks and space.shape.block_bytes > capacity_bytes:
                raise ConfigError(
                    f"{tier.name.lower()} capacity {format_bytes(capacity_bytes)}: a block of space "
                    f"{space.id.hex()[:12]} takes {format_bytes(space.shape.block_bytes)}"
                )
        if tier is TierName.DISK:
            assert self._disk is not None
            if capacity_bytes > self._disk.capacity_bytes:
                await asyncio.to_thread(self._disk.check_room, capacity_bytes)

    async def _set(self, tier: TierName, capacity_bytes: int, shrinker: Shrinker) -> None:
        """Set the limit and begin to work towards it, in the place of an earlier call."""
        changed: HostTier | DiskTier | None = self._host if tier is TierName.HOST else self._disk
        assert changed is not None
        # Refused before anything is touched.
        changed.set_capacity(capacity_bytes)
        earlier = self._tasks.get(tier)
        if earlier is not None:
            earlier.cancel()
            await asyncio.gather(earlier, return_exceptions=True)
        shrinker.relent()
        log.info("%s capacity is %s now", tier.name.lower(), format_bytes(capacity_bytes))
        (self._on_host if tier is TierName.HOST else self._on_disk)()
        self._work(tier, shrinker)

    def _work(self, tier: TierName, shrinker: Shrinker) -> None:
        self._tasks[tier] = asyncio.create_task(
            self._run(shrinker), name=f"shrink-{tier.name.lower()}"
        )

    async def _run(self, shrinker: Shrinker) -> None:
        try:
            await shrinker.run()
        except Exception:
            # The boundary of a task that nobody may be waiting for.
            log.exception("changing a capacity failed")
