"""Emptying slab groups until the host pool fits a capacity that was lowered.

1. Withdraw as many groups as take more than there may be: nothing is allocated from them any more.
2. Make room for their blocks in the groups that stay: the coldest blocks of the shape leave, as the
   rule allows. What is needed by nobody else is copied over, a batch at a time; a block that
   somebody begins to read meanwhile stays where it is for now.
3. Leases, grants and transfers end by themselves; look again.
4. A group that is empty retires: clients unmap it, and its memory is given back.

So what is lost is what does not fit, coldest first, to the nearest slab group.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.engine.shrinking import Part, next_to_leave
from kvstore.tiers.base import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.room import HostRoom
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.host import HostTier

__all__ = ["HostShrinker"]

_BATCH_BYTES: Final = 16 << 20
_BATCH_BLOCKS: Final = 64
_LOOK_AGAIN_SECONDS: Final = 0.02
# Blocks looked at in one go.
_CHUNK: Final = 4000


class HostShrinker:
    """Makes the host pool smaller.

    Attributes:
        evicted: copies that left for it.
    """

    def __init__(self, host: HostTier, index: BlockIndex, room: HostRoom) -> None:
        """Compose."""
        self._host = host
        self._index = index
        self._room = room
        self._leaving: set[int] = set()
        self.evicted = 0

    @property
    def capacity_bytes(self) -> int:
        """What the pool keeps to by now."""
        return self._host.capacity_bytes + self._host.excess_bytes

    @property
    def done(self) -> bool:
        """Whether the pool fits its capacity."""
        return not self._host.excess_bytes

    def relent(self) -> None:
        """Take groups into service again that are not empty yet: the capacity was changed."""
        for number in self._leaving:
            self._host.readmit(number)
        self._leaving.clear()

    async def run(self) -> None:
        """Work until the pool fits."""
        loop = asyncio.get_running_loop()
        while not self.done:
            begun = loop.time()
            members = await self._members()
            self._withdraw(members)
            for number in list(self._leaving):
                await self._empty(number, members.get(number, []))
            took = loop.time() - begun
            await asyncio.sleep(max(_LOOK_AGAIN_SECONDS, 5 * took))
        self.relent()

    async def _members(self) -> dict[int, list[Block]]:
        """Return the blocks of every group."""
        members: dict[int, list[Block]] = {}
        for space in list(self._index.spaces.values()):
            for at, block in enumerate(list(space.blocks.values())):
                if block.host is not None:
                    members.setdefault(block.host.group, []).append(block)
                if at % _CHUNK == _CHUNK - 1:
                    await asyncio.sleep(0)
        return members

    def _withdraw(self, members: dict[int, list[Block]]) -> None:
        host = self._host
        leaving: Counter[BlockShape] = Counter()
        for number in self._leaving:
            for block in members.get(number, ()):
                leaving[block.space.shape] += 1
        parts = {}
        for group in host.groups():
            used = host.slots_in_use(group.group)
            idle = sum(not b.host_refs for b in members.get(group.group, ()))
            held = max(0, used - idle)
            parts[group.group] = Part(group.group, group.shape, group.slots, used, held)
        excess = host.excess_bytes - host.retired_bytes
        while excess > 0:
            part = next_to_leave(parts.values(), leaving, self._coldest)
            if part is None:
                return
            host.retire(part.number)
            self._leaving.add(part.number)
            del parts[part.number]
            leaving[part.shape] += part.used
            excess -= part.slots * part.shape.block_bytes

    def _coldest(self, shape: BlockShape) -> float:
        block = self._index.host_queue(shape).peek()
        return math.inf if block is None else block.sequence

    async def _empty(self, number: int, members: Sequence[Block]) -> None:
        """Move a group's blocks to others as far as that goes now; retire it when it is empty."""
        blocks = [b for b in members if _lies_in(b, number)]
        if blocks:
            shape = blocks[0].space.shape
            missing = len(blocks) - self._host.spare_slots(shape)
            if missing > 0:
                self.evicted += self._room.shrink(shape, missing)
            size = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // shape.block_bytes))
            for at in range(0, len(blocks), size):
                batch = blocks[at : at + size]
                await self._move([b for b in batch if _lies_in(b, number) and not b.host_refs])
        if number in self._leaving and not self._host.slots_in_use(number):
            self._leaving.discard(number)
            self._room.retire(number)

    async def _move(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        slots = self._host.relocate(blocks[0].space.shape, len(blocks))
        moving = list(zip(blocks, slots, strict=False))
        transfers = [
            Transfer(slot, self._host.views(block.host), block.space.spec.shard_bytes)
            for block, slot in moving
            if block.host is not None
        ]
        for block, _ in moving:
            self._index.hold_host(block)
        copied = False
        try:
            await self._host.write(transfers)
            copied = True
        finally:
            # Also when cancelled: by then nothing is copied any more.
            transfers.clear()
            for block, slot in moving:
                self._land(block, slot, copied=copied)

    def _land(self, block: Block, slot: Slot, *, copied: bool) -> None:
        self._index.release_host(block)
        # Whoever leases it by now was told the old slot.
        if copied and block.host is not None and not block.dead and not block.host_refs:
            self._index.move_host(block, slot)
        else:
            self._room.free(slot)


def _lies_in(block: Block, number: int) -> bool:
    return not block.dead and block.host is not None and block.host.group == number
