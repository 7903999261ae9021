"""The host tier: blocks in shared memory that engines on this machine map.

A pool directory (`pool_directory`) holds slab files (`slab`), made in the background as shapes
ask for room. The tier hands out slots (`pool_slots`) and raises their generations; clients move the
bytes.
Memory changes from one shape to another by whole groups: `retire`, wait until nobody maps it,
`remove`, and the capacity is free for whoever wants it next.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError, TierClosed
from kvstore.memory import Hurry
from kvstore.tiers.base import Capabilities, Outcome, Tier, TierName, TierUsage, Transfer
from kvstore.tiers.kept_pool import map_group, taken_bytes
from kvstore.tiers.pool_copy import check_fits, copy_transfers, undisturbed
from kvstore.tiers.pool_directory import (
    create_pool,
    remove_pool,
    remove_stale_pools,
    remove_strays,
)
from kvstore.tiers.pool_limits import check_capacity
from kvstore.tiers.pool_slots import PoolSlots
from kvstore.tiers.slab import MIN_GROUP_BYTES, Slab, SlabGroup, group_slots
from kvstore.tiers.slab_making import discard_slabs, make_slabs, pin_slabs
from kvstore.tiers.slots import GroupSlots
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.space import BlockShape
    from kvstore.tiers.slab import KeptGroup, Pinner

__all__ = ["HostTier", "remove_stale_pools"]

_log = logging.getLogger(__name__)

_Group = GroupSlots[SlabGroup, Slab]

_NO_ROOM: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


def _ignore(*_: SlabGroup) -> None:
    """Nobody listens."""


class HostTier(PoolSlots, Tier):
    """A pool of shared memory.

    Attributes:
        on_group: called on the event loop's thread with each group that becomes ready, before
            anybody else can allocate from it. Set by the owner before `want`.
        keep: `close` leaves files and directory where they are, for the next daemon.
        on_no_room: called on the event loop's thread when growth ends short of what was wanted:
            who waits for it should free slots instead.
    """

    name = TierName.HOST
    capabilities = Capabilities(mappable=True)

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        populate_threads: int | None = None,
        copy_threads: int = 2,
        min_slab_bytes: int = MIN_GROUP_BYTES,
        retry_seconds: float = 1.0,
        pinner: Pinner | None = None,
    ) -> None:
        """Describe a pool; nothing is taken before `open`.

        Args:
            directory: made by `open`, in a tmpfs or hugetlbfs; removed by `close`. Or what an
                earlier daemon left there: see `open_kept`.
            capacity_bytes: limit of all slots together. Slab headers come on top (8 bytes a slot).
            populate_threads: threads that fault in the pages of a new slab, half a second a GiB
                each; by default half of the CPUs, 2 to 8: an engine with a GPU fills 5 GB/s.
            copy_threads: threads for `read` and `write`.
            min_slab_bytes: least size of a slab group.
            retry_seconds: after the system had no memory, `want` asks again no sooner.
            pinner: locks each slab's memory for the DMA of a GPU.
        """
        super().__init__(capacity_bytes)
        self.on_group: Callable[[SlabGroup], None] = _ignore
        self.on_no_room: Callable[[], None] = _ignore
        self.keep = False
        self._directory = directory
        if populate_threads is None:
            populate_threads = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
        self._populate_threads = populate_threads
        self._copy_threads = copy_threads
        self._min_group_bytes = min_slab_bytes
        self._retry_seconds = retry_seconds
        self._pinner = pinner
        self._open = False
        self._created = False
        self._closing = asyncio.Lock()
        self._last_group = 0
        self._allocated_bytes = 0  # of slots in groups, and in the one that is being made
        # Blocks promised by `want` whose group is not begun yet; shapes take turns.
        self._owed: dict[BlockShape, int] = {}
        # Of those, shapes that somebody waits for: their next group is made without giving way, and so
        # is the rest of one that is being made before it.
        self._urgent: set[BlockShape] = set()
        self._hurry = Hurry()
        self._arriving: tuple[BlockShape, int] | None = None
        self._grower: asyncio.Task[None] | None = None
        self._degraded = ""
        self._retry_at = 0.0
        self._builder: ThreadPoolExecutor | None = None
        self._copier: ThreadPoolExecutor | None = None

    @property
    def directory(self) -> Path:
        """The pool's directory."""
        return self._directory

    @property
    def state(self) -> str:
        """``ok``, or ``degraded: `` and why: the system has no memory to let the pool grow."""
        return f"degraded: {self._degraded}" if self._degraded else "ok"

    @property
    def allocating(self) -> bool:
        """Whether more slots are on their way, of any shape."""
        return self._grower is not None

    async def open(self) -> None:
        """Create the pool directory and check that the capacity is possible.

        Raises:
            ConfigError: it is not, or the directory cannot be made; nothing is left behind.
        """
        if self._capacity_bytes <= 0:
            raise ConfigError(f"host pool of {self._capacity_bytes} bytes is not possible")
        create_pool(self._directory)
        try:
            check_capacity(self._directory, self._capacity_bytes)
        except BaseException:
            remove_pool(self._directory)
            raise
        self._start()

    async def open_kept(self, groups: Sequence[KeptGroup], last_group: int) -> None:
        """Open, in place of `open`, what an earlier daemon closed with `keep` set.

        Groups whose files are not as they were are left out. Of the others, the owner says which
        slots are in use with `claim`, until `claimed`; and, once it is sure to go on with this
        pool, removes the rest with `remove_strays`. Until then nothing is changed but the
        generations in the headers, and `keep` is set.

        Args:
            groups: what is left; within the capacity.
            last_group: the highest number that was ever used.

        Raises:
            ConfigError: the capacity is not possible; nothing is changed.
        """
        if self._capacity_bytes <= 0:
            raise ConfigError(f"host pool of {self._capacity_bytes} bytes is not possible")
        check_capacity(self._directory, self._capacity_bytes, taken_bytes(self._directory))
        self.keep = True
        for kept in groups:
            group = await asyncio.to_thread(map_group, self._directory, kept)
            if group is not None:
                self._groups[kept.group] = group
                self._allocated_bytes += group.info.capacity_bytes
        self._last_group = last_group
        self._start()
        if self._pinner is not None:
            assert self._builder is not None
            for group in self._groups.values():
                self._builder.submit(pin_slabs, group.headers, self._pinner)

    def remove_strays(self) -> None:
        """Remove slab files of no group, in the background; `close` removes the others again."""
        assert self._builder is not None
        self.keep = False
        ours = {slab.info.path for group in self._groups.values() for slab in group.headers}
        # Before the next group is made: the same thread does both.
        self._builder.submit(remove_strays, self._directory, ours)

    @property
    def last_group(self) -> int:
        """The highest group number that was ever used in this directory."""
        return self._last_group

    def _start(self) -> None:
        self._created = True
        # One group at a time: its own threads populate it, and capacity is never planned twice.
        self._builder = ThreadPoolExecutor(1, "host-slabs")
        self._copier = ThreadPoolExecutor(self._copy_threads, "host-copy")
        self._open = True

    async def close(self) -> None:
        """Wait for transfers and the group being made; unmap; remove files and directory.

        With `keep` set the files stay.
        """
        self._open = False
        self.stop_growing()
        async with self._closing:
            await self._give_back()

    async def _give_back(self) -> None:
        if self._grower is not None:
            await undisturbed(asyncio.ensure_future(asyncio.wait([self._grower])))
        for executor in (self._copier, self._builder):
            if executor is not None:
                await asyncio.to_thread(executor.shutdown)
        self._copier = self._builder = None
        groups = list(self._groups.values())
        self._groups.clear()
        self._ready.clear()
        self._allocated_bytes = self._used_bytes = 0
        slabs = [slab for group in groups for slab in group.headers]
        if self.keep:
            await asyncio.to_thread(lambda: [slab.close() for slab in slabs])
            return
        await asyncio.to_thread(discard_slabs, slabs)
        if self._created:  # otherwise the directory, if there is one, is somebody else's
            self._created = False
            remove_pool(self._directory)

    def usage(self) -> TierUsage:
        """Return the pool's bytes; while it is degraded, its capacity is what it has."""
        capacity = self._allocated_bytes if self._degraded else self._capacity_bytes
        return TierUsage(capacity, self._allocated_bytes, self._used_bytes)

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change the limit while serving.

        When it falls below what is allocated, nothing is taken away: no slot is given out beyond
        it, and the owner retires groups until the allocated bytes fit.

        Raises:
            ConfigError: there is not that much memory; the limit stays as it was.
        """
        if capacity_bytes <= 0:
            raise ConfigError(f"host pool of {capacity_bytes} bytes is not possible")
        if capacity_bytes > self._capacity_bytes:
            check_capacity(self._directory, capacity_bytes, self._allocated_bytes)
        self._capacity_bytes = capacity_bytes

    @property
    def capacity_bytes(self) -> int:
        """The limit, as configured or last changed."""
        return self._capacity_bytes

    @property
    def untaken_bytes(self) -> int:
        """Bytes of the capacity that no group takes."""
        return max(0, self._capacity_bytes - self._allocated_bytes)

    @property
    def excess_bytes(self) -> int:
        """Bytes that groups take beyond the capacity, after it was lowered."""
        return max(0, self._allocated_bytes - self._capacity_bytes)

    def room_blocks(self, shape: BlockShape) -> int:
        """Return how many more slots memory that is not taken yet could hold.

        Slots of a group that is being made are in neither count: see `allocating`. While the
        system has no memory for the pool there is no room.
        """
        if self._degraded and time.monotonic() < self._retry_at:
            return 0
        return max(self._capacity_bytes - self._allocated_bytes, 0) // shape.block_bytes

    def want(self, shape: BlockShape, blocks: int, *, urgent: bool = False) -> None:
        """Ensure that, capacity allowing, `blocks` slots are free or on their way.

        Returns at once; `on_group` tells of each group. Asking again for the same adds nothing.
        Making memory gives way to whatever else needs the processors, unless it is `urgent`:
        somebody waits. That holds for the group that is being made and the next one of this shape; who
        still waits then asks again.
        """
        if not self._open:
            return
        missing = blocks - self.free_blocks(shape) - self._coming(shape)
        missing = min(missing, self.room_blocks(shape) - self._owed.get(shape, 0))
        if urgent and (missing > 0 or shape in self._owed):
            self._urgent.add(shape)
        if urgent and self._arriving is not None:
            self._hurry.set()
        if missing <= 0:
            return
        self._owed[shape] = self._owed.get(shape, 0) + missing
        if self._grower is None:
            self._grower = asyncio.get_running_loop().create_task(self._grow())

    def stop_growing(self) -> None:
        """Owe nobody anything any more: a group that is being made is the last, until `want`.

        Its end is waited for, so it does not give way any more.
        """
        self._owed.clear()
        self._hurry.set()

    def coming_blocks(self, shape: BlockShape) -> int:
        """Return how many slots are on their way, as far as there is room for them."""
        owed = self._owed.get(shape, 0)
        return self.arriving_blocks(shape) + min(owed, self.room_blocks(shape))

    def arriving_blocks(self, shape: BlockShape) -> int:
        """Return how many slots the group has that is being made, if it is of this shape."""
        arriving = self._arriving
        return arriving[1] if arriving is not None and arriving[0] == shape else 0

    def _coming(self, shape: BlockShape) -> int:
        return self.arriving_blocks(shape) + self._owed.get(shape, 0)

    async def _grow(self) -> None:
        """Make groups, one after the other, until nothing is owed."""
        try:
            while self._owed:
                shape = next(iter(self._owed))
                owed = self._owed.pop(shape)
                self._hurry = Hurry(now=bool(self._urgent))
                self._urgent.discard(shape)
                remaining = self._capacity_bytes - self._allocated_bytes
                slots = group_slots(shape, self._capacity_bytes, remaining, self._min_group_bytes)
                if slots == 0:
                    self._tell(self.on_no_room)
                    continue
                if owed > slots:
                    self._owed[shape] = owed - slots  # at the end: the other shapes first
                await self._make_group(shape, slots)
        finally:
            self._arriving = None
            self._grower = None
            self._urgent.clear()

    async def _make_group(self, shape: BlockShape, slots: int) -> None:
        """Make one group and announce it. Without memory for it, nothing is owed any more."""
        assert self._builder is not None
        taken = slots * shape.block_bytes
        self._last_group += 1
        number = self._last_group
        self._arriving = (shape, slots)
        self._allocated_bytes += taken
        building = asyncio.get_running_loop().run_in_executor(
            self._builder,
            make_slabs,
            self._directory,
            number,
            shape,
            slots,
            self._populate_threads,
            self._pinner,
            self._hurry,
        )
        try:
            slabs = await undisturbed(building)
        except asyncio.CancelledError:
            self._allocated_bytes -= taken
            if building.exception() is None:
                discard_slabs(building.result())
            raise
        except Exception as error:  # noqa: BLE001 the builder thread ends here, whatever it met
            self._allocated_bytes -= taken
            self._arriving = None
            self._owed.clear()
            self._degrade(shape, taken, error)
            self._tell(self.on_no_room)
            return
        self._arriving = None
        if not self._open:
            self._allocated_bytes -= taken
            await asyncio.to_thread(discard_slabs, slabs)
            return
        if self._degraded:
            _log.info("host pool grows again")
            self._degraded = ""
        group = GroupSlots(SlabGroup(number, shape, slots, tuple(s.info for s in slabs)), slabs)
        self._add(group)
        self._tell(self.on_group, group.info)

    def _tell(self, listener: Callable[..., None], *arguments: SlabGroup) -> None:
        try:
            listener(*arguments)
        except Exception:  # noqa: BLE001 the listener's fault must not end the pool's growth
            _log.exception("a listener of the host pool failed")

    def _degrade(self, shape: BlockShape, wanted_bytes: int, error: Exception) -> None:
        self._retry_at = time.monotonic() + self._retry_seconds
        number = error.errno if isinstance(error, OSError) else None
        what = "no memory" if number in _NO_ROOM else str(error)
        reason = (
            f"{what} for {format_bytes(wanted_bytes)} of {format_bytes(shape.slot_bytes)} slots, "
            f"the pool stays at {format_bytes(self._allocated_bytes)}"
        )
        if not self._degraded:
            _log.warning("host pool cannot grow: %s (%s)", reason, error)
        self._degraded = reason

    def remove(self, group: int) -> None:
        """Give a retired group's memory back. Nobody maps it any more: the owner has asked.

        Raises:
            ValueError: there is no such group, it is not retired, or slots of it are in use.
        """
        leaving = self._drop(group)
        assert self._builder is not None
        self._allocated_bytes -= leaving.info.capacity_bytes
        for slab in leaving.headers:
            slab.unlink()
        # Before the next group is made: the same thread does both.
        self._builder.submit(discard_slabs, leaving.headers)

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks into buffers and check their digests.

        Raises:
            TierClosed: the tier is closed.
            ValueError: a slot is not allocated, or a buffer does not fit; nothing was copied.
        """
        return await self._copy(transfers, to_pool=False)

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks from buffers into the pool.

        Raises:
            TierClosed: the tier is closed.
            ValueError: a slot is not allocated, or a buffer does not fit; nothing was copied.
        """
        return await self._copy(transfers, to_pool=True)

    async def sync(self) -> None:
        """Return at once: memory is as durable as it can be.

        Raises:
            TierClosed: the tier is closed.
        """
        if not self._open:
            raise TierClosed("host", "the pool is closed")

    async def _copy(self, transfers: Sequence[Transfer], *, to_pool: bool) -> list[Outcome]:
        if not self._open or self._copier is None:
            raise TierClosed("host", "the pool is closed")
        inside: list[int] = []
        for transfer in transfers:
            group = self._group(transfer.slot.group)
            group.check_taken([transfer.slot.index])
            check_fits(transfer, group.info.shape)
            inside += self.addresses(transfer.slot)
        copying = asyncio.get_running_loop().run_in_executor(
            self._copier, copy_transfers, inside, transfers, to_pool
        )
        return await undisturbed(copying)
