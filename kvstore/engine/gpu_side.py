"""The GPU tier and what belongs to it in the engine: room, moves, announcements, who may read it.

Who owns what: the index says which block has a GPU copy, the tier which slot is free, leases hold
copies in place as they do in host. Clients write nothing here, so there are no grants. A slab group
that changes its shape is not waited for: see `kvstore.tiers.gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.gpu_mover import GpuMover
from kvstore.engine.gpu_room import GpuRoom
from kvstore.engine.waiting import RunWaiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.attachments import Attachment, Attachments
    from kvstore.engine.counters import Counters
    from kvstore.engine.leases import Lease
    from kvstore.engine.room import HostRoom
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.host import HostTier

__all__ = ["GpuRunWaiter", "GpuSide"]


class GpuSide:
    """Composition of everything that a GPU tier adds.

    Attributes:
        tier: the tier.
        room: who gets its slots.
        mover: what brings blocks there, and hot ones back.
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
        self.room = GpuRoom(tier, host, index, counters)
        self.room.on_removed = attachments.gpu_group_gone
        self.mover = GpuMover(
            index,
            host_room,
            tier,
            self.room,
            counters,
            loading=loading,
            on_released=on_released,
        )
        tier.on_group = attachments.announce_gpu

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
            self.mover.used([b for b in lease.run[: lease.count] if b.gpu is None])


class GpuRunWaiter(RunWaiter):
    """Waits until blocks are in the GPU pool; what is on disk comes by way of host."""

    def __init__(self, index: BlockIndex, blocks: Sequence[Block], mover: GpuMover) -> None:
        """Wait for `blocks`; the caller then requests them."""
        super().__init__(index, blocks, hold=False)
        # Host memory is passed through only: the head of a long chain may leave it for the tail.
        self.holding = True
        self._mover = mover

    def landed(self, block: Block) -> None:
        """It is in host: half of the way."""
        if block in self.pending:
            self._mover.request([block], self)

    def arrived(self, block: Block) -> None:
        """It is there."""
        self.pending.discard(block)
        self._signal.notify()

    def give_up(self) -> None:
        """Ask for no more."""
        self._mover.cancel(list(self.pending), self)
