"""Memory that moves from one block size to another, a slab group at a time.

A full pool serves several block sizes in the order of use, as one: a shape that needs room takes a
slab group of another when all blocks in that are colder than its own coldest one, and evicts its
own otherwise. So traffic that changes from one size to another gets the pool within as many
evictions as the groups of the old size hold, and two sizes in use share it. A shape that has
nothing of its own to evict takes the coldest group there is.

Groups in question are found by a look at all blocks, from time to time and in steps. Blocks only
ever become hotter, so what the look found is a lower bound until the next one: a group that comes
first is looked at again when its turn comes.

Groups that hold nothing are the coldest there are. A shape whose memory is made ahead of need gets
such groups at once (`share`), but not more than its equal part: the others' memory was made for
somebody who may be about to need it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.index import Flush, Pressure
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.flusher import Flusher
    from kvstore.engine.retirement import Retirement
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.host import HostTier

__all__ = ["Reclaimer"]

# Groups that may be on their way out at once: what is lost in vain if nobody unmaps them.
_MOST_AT_ONCE: Final = 4
# Blocks looked at in one go; so many steps are taken at once before others have their turn.
_STEP: Final = 2000
_STEPS_AT_ONCE: Final = 4
# How often to look at most, for who has nothing and for who has something of his own.
_LOOK_SECONDS: Final = 0.1
_LEISURELY_LOOK_SECONDS: Final = 1.0


class Reclaimer:
    """Gives up slab groups for blocks of other shapes."""

    def __init__(
        self,
        host: HostTier,
        index: BlockIndex,
        counters: Counters,
        retirement: Retirement,
        notify: Callable[[], None],
    ) -> None:
        """Compose; `flusher` is set afterwards when there is a disk tier.

        Args:
            host: whose groups are given up.
            index: of the blocks in them.
            counters: of the engine.
            retirement: takes groups out of service.
            notify: called when asking again may help.
        """
        self._host = host
        self._index = index
        self._counters = counters
        self._retirement = retirement
        self._notify = notify
        self.flusher: Flusher | None = None
        self.flush_on_evict = False
        # Called with each block whose last copy leaves.
        self.on_lost: Callable[[Block], None] = lambda _: None
        # What the last look found: hottest sequence and number of each group, and its blocks.
        self._found: list[tuple[int, int]] = []
        self._members: dict[int, list[Block]] = {}
        self._looking: Iterator[bool] | None = None
        self._looked_at = -1e9
        self._took = 0.0
        # Shapes that have nothing, and for which a look is due.
        self._waiting: set[BlockShape] = set()

    def coming_blocks(self, shape: BlockShape) -> int:
        """Return for how many more blocks of a shape there is room with what is on its way out."""
        untaken = self._host.untaken_bytes
        room = untaken + sum(self._retirement.coming())
        return room // shape.block_bytes - untaken // shape.block_bytes

    def may_come(self, shape: BlockShape) -> bool:
        """Return whether a group may be given up for a shape in a moment."""
        return bool(shape in self._waiting or self._retirement.coming())

    def reclaim(
        self, shape: BlockShape, count: int, colder_than: int | None, *, lossless: bool = False
    ) -> None:
        """Give up groups of other shapes until there is, or will be, room for `count` blocks.

        Args:
            shape: of the blocks to come.
            count: how many.
            colder_than: only groups all of whose blocks have a lower sequence number; None: any.
            lossless: only groups that can be given up without the loss of a last copy.
        """
        self._waiting.discard(shape)
        groups = self._host.groups()
        if not any(group.shape != shape for group in groups):
            return
        most = max(1, min(_MOST_AT_ONCE, len(groups) // 2))
        while True:
            coming = self._retirement.coming()
            room = self._host.untaken_bytes + sum(coming)
            if room >= count * shape.block_bytes or len(coming) >= most:
                return
            if self._give_up_coldest(shape, colder_than, lossless=lossless):
                continue
            if not self._look(shape, urgent=colder_than is None):
                return

    def share(self, shape: BlockShape) -> None:
        """Give up empty groups of shapes that have more than their equal part of the pool.

        Args:
            shape: gets what they lose, up to its own part.
        """
        host, groups = self._host, self._host.groups()
        taken: Counter[BlockShape] = Counter()
        for group in groups:
            taken[group.shape] += group.capacity_bytes
        part = host.capacity_bytes // len({*taken, shape})
        coming = self._retirement.coming()
        arriving = host.arriving_blocks(shape) * shape.block_bytes
        has = taken[shape] + arriving + host.untaken_bytes + sum(coming)
        slow, left = self._retirement.slow(), _MOST_AT_ONCE - len(coming)
        # Groups are filled in the order in which they were made.
        for group in reversed(groups):
            bytes_ = group.capacity_bytes
            if left <= 0 or has + bytes_ > part:
                return
            if (
                group.shape != shape
                and taken[group.shape] - bytes_ >= part
                and not host.slots_in_use(group.group)
                and not self._retirement.maps(group.group, slow)
            ):
                self._retirement.begin(group.group)
                taken[group.shape] -= bytes_
                has += bytes_
                left -= 1

    def _give_up_coldest(
        self, shape: BlockShape, colder_than: int | None, *, lossless: bool
    ) -> bool:
        in_service = {g.group: g.shape for g in self._host.groups()}
        slow = self._retirement.slow()
        kept: list[tuple[int, int]] = []
        found = False
        while self._found and not found:
            hottest, number = self._found[0]
            if colder_than is not None and hottest >= colder_than:
                break
            heapq.heappop(self._found)
            if number not in in_service:
                self._members.pop(number, None)
                continue
            if in_service[number] == shape or self._retirement.maps(number, slow):
                kept.append((hottest, number))
                continue
            blocks = [b for b in self._members[number] if _lies_in(b, number)]
            now = max((block.sequence for block in blocks), default=-1)
            if now > hottest:
                heapq.heappush(self._found, (now, number))
            elif lossless and not self.flush_on_evict and any(b.disk is None for b in blocks):
                kept.append((hottest, number))
            elif self._host.slots_in_use(number) == len(blocks) and self._empty(
                blocks, lossless=lossless
            ):
                self._retirement.begin(number)
                found = True
        for entry in kept:
            heapq.heappush(self._found, entry)
        return found

    def _empty(self, blocks: Sequence[Block], *, lossless: bool) -> bool:
        """Drop the host copies of a slab group's blocks; False, and none dropped, if one is held.

        Blocks below them that lie in other groups go first, so that no child outlives its parent.
        """
        below = [b for b in self._index.descendants(blocks) if b.host is not None]
        doomed = [*blocks, *below]
        if not all(map(_may_be_dropped, doomed)):
            return False
        if self.flusher is not None and self.flush_on_evict:
            dirty = [b for b in doomed if b.disk is None and b.flush is Flush.NONE]
            for block in dirty:
                self.flusher.enqueue(block)
            if dirty:
                return False
        if lossless and any(block.disk is None for block in doomed):
            return False
        for block in doomed:
            if block.disk is None:
                self.on_lost(block)
        gone = self._index.evict_all(doomed, TierName.HOST, Pressure.OTHER_SIZE)
        self._counters.evicted(TierName.HOST, gone, Pressure.OTHER_SIZE)
        return all(block.host is None for block in blocks)

    def _look(self, shape: BlockShape, *, urgent: bool) -> bool:
        """Look at all blocks, unless that is going on or was just done.

        Returns:
            Whether the look is over. Otherwise asking again may help when `notify` is called.
        """
        if urgent:
            self._waiting.add(shape)
        if self._looking is not None:
            return False
        loop = asyncio.get_running_loop()
        if urgent:
            due = self._looked_at + max(_LOOK_SECONDS, 10 * self._took)
        else:
            due = self._looked_at + max(_LEISURELY_LOOK_SECONDS, 50 * self._took)
        if loop.time() >= due:
            self._took = 0.0
            self._looking = self._steps()
            if self._go_on():
                self._waiting.discard(shape)
                return True
            loop.call_soon(self._finish_look)
        elif urgent:
            loop.call_at(due, self._notify)
        return False

    def _finish_look(self) -> None:
        if self._go_on():
            self._notify()
        else:
            asyncio.get_running_loop().call_soon(self._finish_look)

    def _go_on(self) -> bool:
        """Go on looking for a few steps; return whether the look is over."""
        assert self._looking is not None
        loop = asyncio.get_running_loop()
        begun = loop.time()
        over = False
        for _ in range(_STEPS_AT_ONCE):
            over = next(self._looking, True) is True
            if over:
                self._looking = None
                break
        now = loop.time()
        self._took += now - begun
        self._looked_at = now
        return over

    def _steps(self) -> Iterator[bool]:
        """Find the blocks of every group and the hottest of each, a step at a time."""
        members: dict[int, list[Block]] = {g.group: [] for g in self._host.groups()}
        for space in list(self._index.spaces.values()):
            blocks = list(space.blocks.values())
            for at in range(0, len(blocks), _STEP):
                for block in blocks[at : at + _STEP]:
                    if block.host is not None and block.host.group in members:
                        members[block.host.group].append(block)
                yield False
        self._members = members
        self._found = [
            (max((b.sequence for b in blocks), default=-1), number)
            for number, blocks in members.items()
        ]
        heapq.heapify(self._found)


def _lies_in(block: Block, number: int) -> bool:
    return not block.dead and block.host is not None and block.host.group == number


def _may_be_dropped(block: Block) -> bool:
    """Return whether only children stand between the block and the end of its host copy."""
    if block.host_refs or block.flush in (Flush.QUEUED, Flush.WRITING):
        return False
    if block.key in block.space.pending_children:
        return False
    return block.disk is not None or not (block.pinned_until or block.gpu_refs)
