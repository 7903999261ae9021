"""Which blocks of which segments are taken: the disk tier's accounts, without any I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvstore.space import BlockShape
from kvstore.tiers.base import Slot
from kvstore.tiers.segment import Segment
from kvstore.units import GIB, MIB

__all__ = ["SegmentSet"]

_MIN_SEGMENT_BYTES: Final = 64 * MIB
_MAX_SEGMENT_BYTES: Final = 1 * GIB
_MIN_SEGMENT_BLOCKS: Final = 8


class SegmentSet:
    """Segments, their free places per shape, and bytes against a capacity.

    Attributes:
        capacity_bytes: limit; may be lowered below what is allocated.
        allocated_bytes: of all segments, those being made or deleted included.
        used_bytes: of all allocated blocks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Start empty."""
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.used_bytes = 0
        self._segments: dict[int, Segment] = {}
        self._roomy: dict[BlockShape, dict[int, Segment]] = {}
        self._free_blocks: dict[BlockShape, int] = {}

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over the segments of this moment."""
        return iter(list(self._segments.values()))

    def __getitem__(self, group: int) -> Segment:
        """Return a segment by number."""
        return self._segments[group]

    def get(self, group: int) -> Segment | None:
        """Return a segment by number, None when there is none."""
        return self._segments.get(group)

    @property
    def excess_bytes(self) -> int:
        """Allocated bytes beyond the capacity."""
        return max(0, self.allocated_bytes - self.capacity_bytes)

    def add(self, segment: Segment) -> None:
        """Take in a segment whose bytes are counted already, and offer its free places."""
        self._segments[segment.id] = segment
        self.used_bytes += segment.used_bytes
        if segment.available:
            self._roomy.setdefault(segment.shape, {})[segment.id] = segment
            free = self._free_blocks.get(segment.shape, 0)
            self._free_blocks[segment.shape] = free + segment.available

    def withdraw(self, segment: Segment) -> None:
        """Stop allocating from a segment; called before it is marked retired or broken."""
        if self._roomy.get(segment.shape, {}).pop(segment.id, None) is not None:
            self._free_blocks[segment.shape] -= segment.available

    def readmit(self, segment: Segment) -> None:
        """Allocate from a retired segment again."""
        if not segment.retired:
            return
        segment.retired = False
        if segment.available:
            self._roomy.setdefault(segment.shape, {})[segment.id] = segment
            free = self._free_blocks.get(segment.shape, 0)
            self._free_blocks[segment.shape] = free + segment.available

    def discard(self, segment: Segment) -> None:
        """Take an empty segment out; its bytes stay counted until the file is deleted."""
        self.withdraw(segment)
        del self._segments[segment.id]

    def holder(self, slot: Slot) -> Segment:
        """Return the segment of an allocated slot.

        Raises:
            ValueError: the slot is not allocated.
        """
        segment = self._segments.get(slot.group)
        if segment is None or not segment.holds(slot.index):
            raise ValueError(f"disk slot {slot.group}:{slot.index} is not allocated")
        return segment

    def free_blocks(self, shape: BlockShape) -> int:
        """Return how many blocks `allocate` could give."""
        within = (self.capacity_bytes - self.used_bytes) // shape.block_bytes
        return max(0, min(self._free_blocks.get(shape, 0), within))

    def spare_slots(self, shape: BlockShape) -> int:
        """Return how many places there are, whatever the capacity."""
        return self._free_blocks.get(shape, 0)

    def allocate(self, shape: BlockShape, count: int, *, beyond: bool = False) -> list[Slot]:
        """Take up to ``count`` slots, adjacent ones where possible; `beyond` the capacity, too."""
        count = min(count, self.spare_slots(shape) if beyond else self.free_blocks(shape))
        slots: list[Slot] = []
        roomy = self._roomy.get(shape, {})
        while len(slots) < count:
            segment = next(iter(roomy.values()))
            slots += [Slot(segment.id, index) for index in segment.take(count - len(slots))]
            if not segment.available:
                del roomy[segment.id]
        if slots:
            self._free_blocks[shape] -= len(slots)
            self.used_bytes += len(slots) * shape.block_bytes
        return slots

    def free(self, slots: Sequence[Slot]) -> list[Segment]:
        """Give slots back.

        Returns:
            Broken segments that are empty now, other than retired ones.

        Raises:
            ValueError: a slot is not allocated, or named twice; no slot was freed.
        """
        if len(set(slots)) != len(slots):
            raise ValueError("a disk slot is freed twice in one call")
        holders = [self.holder(slot) for slot in slots]
        for slot, segment in zip(slots, holders, strict=True):
            segment.give(slot.index)
            self.used_bytes -= segment.shape.block_bytes
            if segment.available:
                self._free_blocks[segment.shape] = self._free_blocks.get(segment.shape, 0) + 1
                self._roomy.setdefault(segment.shape, {})[segment.id] = segment
        emptied = (s for s in dict.fromkeys(holders) if not s.used_blocks)
        return [s for s in emptied if s.broken and not s.retired]

    def misfits(self) -> Iterator[str]:
        """Yield one line for each count that the segments do not bear out; nothing may move."""
        used = sum(segment.shape.block_bytes * sum(segment.used) for segment in self)
        if used != self.used_bytes:
            yield f"disk: {self.used_bytes} bytes are counted as used, {used} are"
        allocated = sum(segment.data_bytes for segment in self)
        if allocated != self.allocated_bytes:
            yield f"disk: {self.allocated_bytes} bytes are counted as allocated, {allocated} are"
        free: dict[BlockShape, int] = {}
        for segment in self:
            if segment.available:
                free[segment.shape] = free.get(segment.shape, 0) + segment.available
            if segment.used_blocks + len(set(segment.offered)) != segment.blocks:
                yield f"disk segment {segment.id}: a place is neither used nor free, or both"
        if free != {shape: count for shape, count in self._free_blocks.items() if count}:
            yield f"disk: {self._free_blocks} are counted as free, {free} are"

    def spare(self, shape: BlockShape) -> Iterable[Segment]:
        """Return empty segments of other shapes; a retired one is its owner's to remove."""
        return (s for s in self if s.shape != shape and not s.used_blocks and not s.retired)

    def room_blocks(self, shape: BlockShape) -> int:
        """Return how many blocks new segments could hold, spare ones of other shapes deleted."""
        room = self.capacity_bytes - self.allocated_bytes
        room += sum(segment.data_bytes for segment in self.spare(shape))
        return max(0, room) // shape.block_bytes

    def next_segment_blocks(self, shape: BlockShape) -> int:
        """Return the blocks of the next segment to make; 0 when there is no room for one.

        A 64th of the capacity within 64 MiB … 1 GiB, at least 8 blocks, at most a quarter of the
        capacity, at least one block; the last one takes exactly what is left.
        """
        size = min(max(self.capacity_bytes // 64, _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)
        size = max(size, _MIN_SEGMENT_BLOCKS * shape.block_bytes)
        size = max(min(size, self.capacity_bytes // 4), shape.block_bytes)
        size = min(size, self.capacity_bytes - self.allocated_bytes)
        return max(0, size) // shape.block_bytes
