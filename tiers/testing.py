"""Conformance suites: what every tier, and every key-value client, must do.

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
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvstore.errors import TierClosed
from kvstore.keys import Keys
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Slot, Tier, Transfer

__all__ = [
    "PersistentTierConformance",
    "Store",
    "StoreConformance",
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


class Store(Protocol):
    """One space of a key-value client, as `StoreConformance` sees it.

    Attributes:
        block_bytes: bytes of one block, all shards.
    """

    block_bytes: int

    def fresh_keys(self, count: int) -> Keys:
        """Return a chain of keys that nobody has used."""

    def put(self, keys: Keys, blocks: NDArray[np.uint8]) -> int:
        """Store blocks, shape (n, block_bytes); return the leading run present afterwards."""

    def get(self, keys: Keys, out: NDArray[np.uint8]) -> int:
        """Read the leading run into ``out``; return its length."""

    def lookup(self, keys: Keys) -> int:
        """Return the length of the leading run that is present."""


class StoreConformance(ABC):
    """What a client must do, over whatever path it moves bytes."""

    @abstractmethod
    def connect(self, shard_bytes: tuple[int, ...]) -> AbstractContextManager[Store]:
        """Yield a store whose blocks have these shards, with room for 64 MiB."""

    @pytest.fixture(
        params=[(1,), (4096,), (4097,), (1, 4097), (65_536, 65_536, 1000)],
        ids=lambda shards: "+".join(map(str, shards)),
    )
    def store(self, request: pytest.FixtureRequest) -> Iterable[Store]:
        """Stores of several block shapes."""
        with self.connect(request.param) as store:
            assert store.block_bytes == sum(request.param)
            yield store

    def blocks(self, store: Store, count: int, seed: int = 0) -> NDArray[np.uint8]:
        """Return random blocks."""
        data = random.Random(seed).randbytes(count * store.block_bytes)
        return np.frombuffer(data, np.uint8).reshape(count, store.block_bytes)

    def fetched(self, store: Store, keys: Keys) -> NDArray[np.uint8]:
        """Return the leading run's blocks."""
        out = np.full((len(keys), store.block_bytes), 0xEE, np.uint8)
        return out[: store.get(keys, out)]

    def test_what_was_put_comes_back(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(5), self.blocks(store, 5)
        assert store.put(keys, blocks) == 5
        assert store.lookup(keys) == 5
        assert np.array_equal(self.fetched(store, keys), blocks)

    def test_nothing_is_found_that_nobody_put(self, store: Store) -> None:
        keys = store.fresh_keys(3)
        assert store.lookup(keys) == 0
        assert len(self.fetched(store, keys)) == 0

    def test_a_hit_is_a_leading_run(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(6), self.blocks(store, 6)
        assert store.put(keys[:4], blocks[:4]) == 4
        assert store.lookup(keys) == 4
        assert np.array_equal(self.fetched(store, keys), blocks[:4])
        assert np.array_equal(self.fetched(store, keys[:2]), blocks[:2])
        assert np.array_equal(self.fetched(store, keys[1:3]), blocks[1:3])

    def test_a_chain_grows_piece_by_piece(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(5), self.blocks(store, 5)
        for start, stop in ((0, 1), (1, 3), (3, 5)):
            count = stop - start
            assert store.put(keys[start:stop], blocks[start:stop]) == count
        assert np.array_equal(self.fetched(store, keys), blocks)

    def test_a_block_without_its_parent_is_not_admitted(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(3), self.blocks(store, 3)
        assert store.put(keys[1:], blocks[1:]) == 0
        assert store.lookup(keys) == 0
        assert store.lookup(keys[1:]) == 0

    def test_the_first_bytes_of_a_key_stay(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(3), self.blocks(store, 3)
        assert store.put(keys, blocks) == 3
        assert store.put(keys, blocks) == 3
        assert store.put(keys, self.blocks(store, 3, seed=1)) == 3
        assert np.array_equal(self.fetched(store, keys), blocks)

    def test_putting_a_longer_chain_adds_its_tail(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(5), self.blocks(store, 5)
        assert store.put(keys[:2], blocks[:2]) == 2
        assert store.put(keys, blocks) == 5
        assert np.array_equal(self.fetched(store, keys), blocks)

    def test_chains_do_not_mix(self, store: Store) -> None:
        chains = [(store.fresh_keys(3), self.blocks(store, 3, seed)) for seed in range(4)]
        for keys, blocks in chains:
            assert store.put(keys, blocks) == 3
        for keys, blocks in reversed(chains):
            assert np.array_equal(self.fetched(store, keys), blocks)

    def test_no_keys(self, store: Store) -> None:
        keys = store.fresh_keys(2)[:0]
        nothing = np.empty((0, store.block_bytes), np.uint8)
        assert store.put(keys, nothing) == 0
        assert store.lookup(keys) == 0
        assert store.get(keys, nothing) == 0

    def test_many_blocks_in_one_call(self, store: Store) -> None:
        keys, blocks = store.fresh_keys(100), self.blocks(store, 100)
        assert store.put(keys, blocks) == 100
        assert np.array_equal(self.fetched(store, keys), blocks)
