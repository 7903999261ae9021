"""Conformance suites: what every tier must do.

A backend plugs in by subclassing and saying how to make one and how to reach its bytes around it:

    class TestMyTier(TierConformance):
        def make(self, directory, capacity_bytes): return MyTier(directory, capacity_bytes)
        def corrupt(self, tier, slot, shard, offset): ...

The suites share no helper with the code under test: expected bytes come from the standard
library, digests from `xxhash` directly. They need pytest and no plugin.
"""

# ruff: noqa: D102 - a test is named after what it expects
from __future__ import annotations

import asyncio
import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash

from kvstore.errors import TierClosed
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Slot, Tier, Transfer

__all__ = [
    "PersistentTierConformance",
    "TierConformance",
    "contents",
    "transfers_for",
]

Story = Callable[[Any], Awaitable[None]]


def transfers_for(
    slots: Sequence[Slot], shape: BlockShape, lengths: tuple[int, ...], seed: int | None
) -> list[Transfer]:
    """Return one transfer per slot with page-aligned buffers and digests of their content.

    Args:
        slots: where to.
        shape: of the blocks.
        lengths: bytes of each shard that count.
        seed: of random bytes; None for zeros.
    """
    source = random.Random(seed)
    result = []
    for slot in slots:
        memory = memoryview(mmap.mmap(-1, max(1, shape.block_bytes)))
        if seed is not None:
            memory[:] = source.randbytes(len(memory))
        size = shape.slot_bytes
        buffers = tuple(memory[r * size : (r + 1) * size] for r in range(shape.shards))
        digests = tuple(
            xxhash.xxh3_64_intdigest(buffer[:length])
            for buffer, length in zip(buffers, lengths, strict=True)
        )
        result.append(Transfer(slot, buffers, lengths, digests))
    return result


def contents(transfer: Transfer) -> list[bytes]:
    """Return the counted bytes of each shard."""
    pairs = zip(transfer.buffers, transfer.lengths, strict=True)
    return [bytes(buffer[:length]) for buffer, length in pairs]


def _empty(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return transfers that read the same blocks, with the same digests, into zeros."""
    result = []
    for transfer in transfers:
        buffers = tuple(memoryview(mmap.mmap(-1, len(buffer))) for buffer in transfer.buffers)
        result.append(replace(transfer, buffers=buffers))
    return result


class TierConformance(ABC):
    """The contract of `Tier`.

    Attributes:
        shape: of most tests' blocks.
        lengths: odd ones, so that padding and counted bytes differ.
        capacity_blocks: blocks of `shape` that the tier under test holds.
    """

    shape: ClassVar = BlockShape(8192, 2)
    lengths: ClassVar[tuple[int, ...]] = (5001, 8191)
    capacity_blocks: ClassVar = 16

    @abstractmethod
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        """Return an unopened tier; everything that it leaves behind lies in ``directory``."""

    @abstractmethod
    def corrupt(self, tier: Any, slot: Slot, shard: int, offset: int) -> None:
        """Change one byte of a stored shard, around the tier."""

    async def opened(self, tier: Any) -> None:
        """Open a new tier so that it allocates."""
        await tier.open()
        if hasattr(tier, "finish_recovery"):
            await tier.finish_recovery()

    async def room(self, tier: Any, shape: BlockShape, blocks: int) -> None:
        """Wait until ``blocks`` slots are free, or no more are coming."""
        if hasattr(tier, "want"):
            tier.want(shape, blocks)
            while tier.free_blocks(shape) < blocks and tier.allocating:
                await asyncio.sleep(0.001)

    def play(self, directory: Path, story: Story) -> None:
        """Run a story with an open tier."""

        async def run() -> None:
            tier = self.make(directory, self.capacity_blocks * self.shape.block_bytes)
            await self.opened(tier)
            try:
                await story(tier)
            finally:
                await tier.close()

        asyncio.run(run())

    async def stored(self, tier: Any, count: int, seed: int = 1) -> list[Transfer]:
        """Allocate and write ``count`` blocks; return what was written."""
        await self.room(tier, self.shape, count)
        slots = tier.allocate(self.shape, count)
        assert len(slots) == count
        written = transfers_for(slots, self.shape, self.lengths, seed)
        assert await tier.write(written) == [Outcome.OK] * count
        return written

    async def check(self, tier: Any, written: Sequence[Transfer]) -> None:
        """Read blocks back in one batch and compare."""
        got = _empty(written)
        assert await tier.read(got) == [Outcome.OK] * len(written)
        assert [contents(t) for t in got] == [contents(t) for t in written]

    def test_no_slot_is_given_twice_and_capacity_holds(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            other = BlockShape(4096, 1)
            limit = self.capacity_blocks * self.shape.block_bytes
            seen: set[Slot] = set()
            asked = 0
            while True:
                for shape in (self.shape, other):
                    await self.room(tier, shape, 3)
                    free = tier.free_blocks(shape)
                    slots = tier.allocate(shape, 3)
                    assert len(slots) == min(3, free)
                    assert not seen.intersection(slots)
                    assert len(set(slots)) == len(slots)
                    seen.update(slots)
                    usage = tier.usage()
                    assert usage.capacity_bytes == limit
                    assert usage.used_bytes <= usage.allocated_bytes <= limit
                asked += 1
                if not slots:
                    break
            assert 1 < asked < 1000
            assert tier.usage().used_bytes > 0

        self.play(tmp_path, story)

    def test_a_full_tier_gives_less_then_nothing(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            taken: list[Slot] = []
            while True:
                await self.room(tier, self.shape, self.capacity_blocks)
                slots = tier.allocate(self.shape, self.capacity_blocks + 1)
                if not slots:
                    break
                taken += slots
            assert len(taken) == len(set(taken)) == self.capacity_blocks
            assert tier.free_blocks(self.shape) == 0
            tier.free(taken[3:5])
            assert tier.free_blocks(self.shape) == 2
            assert set(tier.allocate(self.shape, 9)) == set(taken[3:5])
            assert tier.usage().used_bytes == self.capacity_blocks * self.shape.block_bytes

        self.play(tmp_path, story)

    def test_freeing_what_is_not_allocated_changes_nothing(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            await self.room(tier, self.shape, 4)
            first, second, third = tier.allocate(self.shape, 3)
            tier.free([third])
            before = (tier.usage(), tier.free_blocks(self.shape))
            wrong: list[list[Slot]] = [
                [third],
                [first, third],
                [first, second, first],
                [first, Slot(first.group + 1000, 0)],
                [second, Slot(second.group, 1 << 30)],
            ]
            for slots in wrong:
                with pytest.raises(ValueError, match=r"\d|twice"):
                    tier.free(slots)
                assert (tier.usage(), tier.free_blocks(self.shape)) == before
            tier.free([first, second])
            assert tier.usage().used_bytes == 0

        self.play(tmp_path, story)

    def test_bytes_come_back_whatever_the_order_of_the_batch(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 4)
            mixed = [written[i] for i in (2, 0, 3, 1)]
            await self.check(tier, written)
            await self.check(tier, mixed)
            # Written in another order than they lie in.
            again = transfers_for([t.slot for t in mixed], self.shape, self.lengths, 2)
            assert await tier.write(again) == [Outcome.OK] * 4
            await self.check(tier, again[::-1])
            await self.check(tier, again[1:2])

        self.play(tmp_path, story)

    @pytest.mark.parametrize(
        ("slot_bytes", "lengths"),
        [(4096, (1,)), (8192, (4097,)), (4096, (4096, 1, 4095)), (8192, (0, 8192))],
    )
    def test_odd_lengths_and_shards(
        self, tmp_path: Path, slot_bytes: int, lengths: tuple[int, ...]
    ) -> None:
        async def story(tier: Any) -> None:
            shape = BlockShape(slot_bytes, len(lengths))
            await self.room(tier, shape, 3)
            written = transfers_for(tier.allocate(shape, 3), shape, lengths, 3)
            assert len(written) == 3
            assert await tier.write(written) == [Outcome.OK] * 3
            await self.check(tier, written)

        self.play(tmp_path, story)

    def test_one_flipped_byte_spoils_one_block_only(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 4)
            shard = self.shape.shards - 1
            self.corrupt(tier, written[1].slot, shard, self.lengths[shard] - 1)
            got = _empty(written)
            outcomes = await tier.read(got)
            assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
            for position in (0, 2, 3):
                assert contents(got[position]) == contents(written[position])
            # Without digests nobody can tell; with a wrong one the right bytes are refused.
            blind = replace(_empty(written)[1], digests=None)
            assert await tier.read([blind]) == [Outcome.OK]
            assert contents(blind) != contents(written[1])
            other = replace(_empty(written)[0], digests=written[2].digests)
            assert await tier.read([other]) == [Outcome.CORRUPT]

        self.play(tmp_path, story)

    def test_padding_does_not_count(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 1)
            self.corrupt(tier, written[0].slot, 0, self.lengths[0])
            await self.check(tier, written)

        self.play(tmp_path, story)

    def test_batches_at_once_do_not_mix(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            await self.room(tier, self.shape, 3)
            batches = []
            for seed in range(3):
                slots = tier.allocate(self.shape, 1)
                batches.append(transfers_for(slots, self.shape, self.lengths, seed))
            results = await asyncio.gather(*(tier.write(batch) for batch in batches))
            assert results == [[Outcome.OK]] * 3
            await asyncio.gather(*(self.check(tier, batch) for batch in batches * 3))

        self.play(tmp_path, story)

    def test_a_cancelled_read_leaves_the_buffers_alone_afterwards(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 4)
            for turns in range(4):
                got = _empty(written)
                reading = asyncio.ensure_future(tier.read(got))
                for _ in range(turns):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.wait([reading])
                for transfer in got:
                    for buffer in transfer.buffers:
                        buffer[:] = b"\xaa" * len(buffer)
                # Whatever the tier still did, it did before this.
                await self.check(tier, written)
                for transfer in got:
                    assert all(bytes(b) == b"\xaa" * len(b) for b in transfer.buffers)

        self.play(tmp_path, story)

    def test_wrong_buffers_are_refused_before_anything_moves(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 2)
            good = transfers_for([written[0].slot], self.shape, self.lengths, 9)[0]
            short = replace(good, buffers=good.buffers[:-1])
            free = transfers_for(
                [Slot(written[0].slot.group, 1 << 30)], self.shape, good.lengths, 9
            )
            for wrong in (short, free[0]):
                with pytest.raises(ValueError, match=r".+"):
                    await tier.write([good, wrong])
                with pytest.raises(ValueError, match=r".+"):
                    await tier.read([wrong])
            await self.check(tier, written)

        self.play(tmp_path, story)

    def test_empty_batches(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            assert await tier.read([]) == []
            assert await tier.write([]) == []
            assert tier.allocate(self.shape, 0) == []
            tier.free([])
            await tier.sync()

        self.play(tmp_path, story)

    def test_closing_twice_and_using_it_afterwards(self, tmp_path: Path) -> None:
        async def story(tier: Any) -> None:
            written = await self.stored(tier, 1)
            await asyncio.gather(tier.close(), tier.close())
            await tier.close()
            with pytest.raises(TierClosed):
                await tier.read(_empty(written))
            with pytest.raises(TierClosed):
                await tier.write(written)
            with pytest.raises(TierClosed):
                await tier.sync()

        self.play(tmp_path, story)


class PersistentTierConformance(TierConformance):
    """The contract of a tier whose `capabilities.persistent` is set."""

    def test_what_was_synced_is_there_after_reopening(self, tmp_path: Path) -> None:
        async def run() -> None:
            capacity = self.capacity_blocks * self.shape.block_bytes
            tier: Any = self.make(tmp_path, capacity)
            assert tier.capabilities.persistent
            await self.opened(tier)
            written = await self.stored(tier, 4)
            await tier.sync()
            store_id = tier.store_id
            tier.free([written[1].slot])
            await tier.close()

            tier = self.make(tmp_path, capacity)
            await tier.open()
            assert tier.store_id == store_id
            kept = [written[0], written[2], written[3]]
            claims = [(t.slot, self.shape) for t in kept]
            wrong = [
                (kept[0].slot, self.shape),
                (written[1].slot, BlockShape(4096, 1)),
                (Slot(999, 0), self.shape),
                (Slot(kept[0].slot.group, 1 << 30), self.shape),
            ]
            assert tier.allocate(self.shape, 1) == []
            assert tier.adopt(claims + wrong) == [True] * 3 + [False] * 4
            await tier.finish_recovery()
            assert tier.usage().used_bytes == 3 * self.shape.block_bytes
            await self.check(tier, kept)
            # What was not adopted is free, what was is not.
            await self.room(tier, self.shape, self.capacity_blocks - 3)
            fresh: list[Slot] = tier.allocate(self.shape, self.capacity_blocks)
            assert written[1].slot in fresh
            assert not {t.slot for t in kept}.intersection(fresh)
            await self.check(tier, kept)
            await tier.close()

        asyncio.run(run())
