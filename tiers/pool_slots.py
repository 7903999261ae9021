"""The slots of a pool: groups in service, which of their slots are free, and who has the next one.

Groups come by `_add`, when their slabs are there, and go by `_drop`, when nobody maps them any more.
Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.base import Slot
from kvstore.tiers.kept_pool import kept_group
from kvstore.tiers.slab import Slab, SlabGroup
from kvstore.tiers.slots import GroupSlots

if TYPE_CHECKING:
    from kvstore.space import BlockShape
    from kvstore.tiers.slab import KeptGroup

__all__ = ["PoolSlots"]

_Group = GroupSlots[SlabGroup, Slab]


class PoolSlots:
    """The slot side of a host pool."""

    def __init__(self, capacity_bytes: int) -> None:
        """Start without a group.

        Args:
            capacity_bytes: limit of all slots together.
        """
        self._capacity_bytes = capacity_bytes
        self._groups: dict[int, _Group] = {}
        # Groups with free slots, per shape, in the order in which they are filled.
        self._ready: dict[BlockShape, dict[int, _Group]] = {}
        self._used_bytes = 0

    def _add(self, group: _Group) -> None:
        """Take a group into service, all of whose slots are free."""
        self._groups[group.info.group] = group
        self._ready.setdefault(group.info.shape, {})[group.info.group] = group

    def _drop(self, group: int) -> _Group:
        """Forget a retired group.

        Raises:
            ValueError: there is no such group, it is not retired, or slots of it are in use.
        """
        leaving = self._group(group)
        if not leaving.retired or leaving.used_count:
            raise ValueError(
                f"slab group {group} is in service: {leaving.used_count} slots are in use"
                if leaving.retired
                else f"slab group {group} is not retired"
            )
        del self._groups[group]
        return leaving

    def claim(self, slot: Slot, shape: BlockShape) -> bool:
        """Take one certain slot of an adopted group as it is, without a new generation.

        Returns:
            False when it is taken already, or there is no such slot of this shape.
        """
        group = self._groups.get(slot.group)
        if group is None or group.info.shape != shape or not group.claim(slot.index):
            return False
        self._used_bytes += shape.block_bytes
        return True

    def claimed(self) -> None:
        """Everything that was not claimed is free."""
        for number, group in self._groups.items():
            group.claimed()
            if group.free_count:
                self._ready.setdefault(group.info.shape, {})[number] = group

    def kept_groups(self) -> list[KeptGroup]:
        """Return what the next daemon needs to know of the groups in service."""
        return [kept_group(group) for group in self._groups.values() if not group.retired]

    def groups(self) -> list[SlabGroup]:
        """Return the groups in service: ready and not retired."""
        return [group.info for group in self._groups.values() if not group.retired]

    @property
    def retired_bytes(self) -> int:
        """Bytes of retired groups that are not removed yet."""
        return sum(g.info.capacity_bytes for g in self._groups.values() if g.retired)

    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots of ready groups and raise the generation of each.

        Groups are filled one after the other, so that others run empty and can be retired. No
        generation is ever seen twice for a slot; the first is 1.
        """
        within = (self._capacity_bytes - self._used_bytes) // shape.block_bytes
        return self._take(shape, min(count, within))

    def relocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots of ready groups for blocks that leave a retired one.

        Beyond the capacity for as long as they have two: it may have been lowered to what is used.
        """
        return self._take(shape, count)

    def spare_slots(self, shape: BlockShape) -> int:
        """Return how many slots `relocate` could give."""
        return sum(group.free_count for group in self._ready.get(shape, {}).values())

    def free_blocks(self, shape: BlockShape) -> int:
        """Return how many slots of a shape are free in ready groups."""
        free = sum(group.free_count for group in self._ready.get(shape, {}).values())
        return min(free, max(self._capacity_bytes - self._used_bytes, 0) // shape.block_bytes)

    def _take(self, shape: BlockShape, left: int) -> list[Slot]:
        ready = self._ready.get(shape, {})
        slots: list[Slot] = []
        while left > 0 and ready:
            number, group = next(iter(ready.items()))
            indices = group.take(left)
            if group.free_count == 0:
                del ready[number]
            left -= len(indices)
            slots += [Slot(number, index) for index in indices]
        self._used_bytes += len(slots) * shape.block_bytes
        return slots

    def generations(self, slots: Sequence[Slot]) -> NDArray[np.uint64]:
        """Return the current generation of each slot, shape (n,), from the daemon's own copy."""
        groups = self._groups
        return np.fromiter(
            (groups[group].generation(index) for group, index in slots), np.uint64, len(slots)
        )

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back.

        Raises:
            ValueError: a slot is not allocated, or named twice; no slot was freed.
        """
        by_group: dict[int, list[int]] = {}
        for group, index in slots:
            by_group.setdefault(group, []).append(index)
        for number, indices in by_group.items():
            self._group(number).check_taken(indices)
        for number, indices in by_group.items():
            owner = self._groups[number]
            owner.give_back(indices)
            self._used_bytes -= len(indices) * owner.info.shape.block_bytes
            if not owner.retired:
                self._ready.setdefault(owner.info.shape, {}).setdefault(number, owner)

    def _group(self, number: int) -> _Group:
        group = self._groups.get(number)
        if group is None:
            raise ValueError(f"there is no slab group {number}")
        return group

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return the slot's memory, one view of `slot_bytes` per shard. Drop it before `free`.

        Raises:
            ValueError: there is no such slot.
        """
        group = self._group(slot.group)
        group.check_index(slot.index)
        return tuple(slab.view(slot.index) for slab in group.headers)

    def addresses(self, slot: Slot) -> tuple[int, ...]:
        """Return the address of the slot in this process, one per shard.

        Raises:
            ValueError: there is no such slot.
        """
        group = self._group(slot.group)
        group.check_index(slot.index)
        return tuple(slab.address(slot.index) for slab in group.headers)

    def slots_in_use(self, group: int) -> int:
        """Return how many slots of a group are allocated.

        Raises:
            ValueError: there is no such group.
        """
        return self._group(group).used_count

    def retire(self, group: int) -> None:
        """Withdraw a group's free slots; those in use stay valid until they are freed. Idempotent.

        Raises:
            ValueError: there is no such group.
        """
        leaving = self._group(group)
        leaving.retired = True
        self._ready.get(leaving.info.shape, {}).pop(group, None)

    def readmit(self, group: int) -> None:
        """Take a retired group into service again; nobody was told to unmap it.

        Raises:
            ValueError: there is no such group.
        """
        coming = self._group(group)
        coming.retired = False
        if coming.free_count:
            self._ready.setdefault(coming.info.shape, {})[group] = coming
