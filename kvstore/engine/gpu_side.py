"""The GPU tier and what belongs to it in the engine: room, moves, announcements, who may read it.

Who owns what: the index says which block has a GPU copy, the tier which slot is free, leases hold
copies in place as they do in host. Clients write nothing here, so there are no grants. A slab group
that changes its shape is not waited for: see `kvstore.tiers.gpu`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.engine.gpu_demand import GpuDemand
from kvstore.engine.gpu_direct import GpuDirect
from kvstore.engine.gpu_mover import GpuMover
from kvstore.engine.gpu_room import GpuRoom
from kvstore.engine.waiting import RunWaiter
from kvstore.prefetch.route import Leg, straight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.attachments import Attachment, Attachments
    from kvstore.engine.counters import Counters
    from kvstore.engine.leases import Lease
    from kvstore.engine.room import HostRoom
    from kvstore.index import Block, BlockIndex
    from kvstore.prefetch.promoter import Promoter
    from kvstore.space import BlockShape
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.gpu_reader import GpuReader
    from kvstore.tiers.host import HostTier

__all__ = ["GpuRunWaiter", "GpuSide"]


class GpuSide:
    """Composition of everything that a GPU tier adds.

    Attributes:
        tier: the tier.
        demand: how often blocks are used by those who can read them there.
        room: who gets its slots.
        mover: what brings blocks there, and hot ones back.
        direct: what reads them from disk past host memory; None without a disk.
    """

    def __init__(
        self,
        tier: GpuTier,
        host: HostTier,
        host_room: HostRoom,
        index: BlockIndex,
        attachments: Attachments,
        counters: Counters,
        *,
        loading: Callable[[], bool],
        on_released: Callable[[], None],
    ) -> None:
        """Compose; see `GpuMover`."""
        self.tier = tier
        self.demand = GpuDemand(tier.usage().capacity_bytes)
        self.room = GpuRoom(tier, host, index, self.demand, counters)
        self.room.on_removed = attachments.gpu_group_gone
        self.mover = GpuMover(
            index,
            host_room,
            tier,
            self.room,
            self.demand,
            counters,
            loading=loading,
            on_released=on_released,
        )
        self.direct: GpuDirect | None = None
        self._promoter: Promoter | None = None
        self._index = index
        self._counters = counters
        tier.on_group = attachments.announce_gpu

    def add_disk(
        self,
        reader: GpuReader,
        promoter: Promoter,
        through_host: Callable[[Sequence[Block], GpuRunWaiter], None],
        on_corrupt: Callable[[Block], None],
    ) -> None:
        """Take in the way from disk; see `GpuDirect`. `promoter` serves the one through host."""
        self._promoter = promoter
        direct = GpuDirect(self._index, reader, self.room, self.mover, self._counters)
        direct.through_host = lambda block, waiter: through_host([block], waiter)
        direct.on_corrupt = on_corrupt
        self.direct = direct

    def start(self) -> None:
        """Begin to move."""
        self.mover.start()
        if self.direct is not None:
            self.direct.start()

    async def stop(self) -> None:
        """Stop when nothing is on the bus any more."""
        if self.direct is not None:
            await self.direct.stop()
        await self.mover.stop()

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way."""
        return bool(len(self.mover) or (self.direct is not None and len(self.direct)))

    def bring(self, run: Sequence[Block], waiter: GpuRunWaiter) -> list[Block]:
        """Bring blocks up by the shortest way; return those that must come to host first."""
        self.mover.request([b for b in run if b.gpu is None and b.readable], waiter)
        cold = [b for b in run if b.gpu is None and not b.readable]
        direct = self.direct
        if direct is None or not direct.usable:
            return cold
        able = [b for b in cold if b.host is None and b.digests is not None]
        straight = able[: self._straight(able, direct)]
        direct.request(straight, waiter)
        taken = set(straight)
        return [b for b in cold if b not in taken]

    def _straight(self, blocks: Sequence[Block], direct: GpuDirect) -> int:
        """Return how many leading blocks go past host memory."""
        if not blocks or self._promoter is None:
            return len(blocks)
        size = blocks[0].space.shape.block_bytes
        stages = (
            Leg(self._promoter.path, self._promoter.ahead_bytes(blocks, 0)),
            Leg(self.mover.path, self.mover.wanted_bytes),
        )
        now = asyncio.get_running_loop().time()
        straight = Leg(direct.path, direct.queued_bytes)
        return -(-straight_bytes(len(blocks) * size, straight, stages, now) // size)

    def may_read(self, attachment: Attachment, shape: BlockShape) -> bool:
        """Return whether a client can open all that it needs of blocks of a shape."""
        devices = attachment.devices
        return (
            bool(devices)
            and self.tier.state == "ok"
            and self.tier.device_uuids(shape, attachment.shards) <= devices
        )

    def lease_ended(self, lease: Lease) -> None:
        """What was read from host may come from the GPU the next time."""
        if self.may_read(lease.attachment, lease.space.shape):
            self.demand.used(lease.run[: lease.count])
            self.mover.used([b for b in lease.run[: lease.count] if b.gpu is None])


class GpuRunWaiter(RunWaiter):
    """Waits until blocks are in the GPU pool; what is on disk comes by way of host."""

    def __init__(self, index: BlockIndex, blocks: Sequence[Block], gpu: GpuSide) -> None:
        """Wait for `blocks`; the caller then requests them."""
        super().__init__(index, blocks, hold=False)
        # Host memory is passed through only: the head of a long chain may leave it for the tail.
        self.holding = True
        self._gpu = gpu

    def landed(self, block: Block) -> None:
        """It is in host: half of the way."""
        if block in self.pending:
            self._gpu.mover.request([block], self)

    def arrived(self, block: Block) -> None:
        """It is there."""
        self.pending.discard(block)
        self._signal.notify()

    def give_up(self) -> None:
        """Ask for no more."""
        left = list(self.pending)
        self._gpu.mover.cancel(left, self)
        if self._gpu.direct is not None:
            self._gpu.direct.cancel(left, self)
