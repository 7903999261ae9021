"""What every key-value client must do, over whatever path it moves bytes.

A client plugs in by subclassing `StoreConformance` and saying how to connect. The suite needs pytest
and no plugin.
"""

# ruff: noqa: D102 - a test is named after what it expects
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.keys import Keys

__all__ = ["Store", "StoreConformance"]


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
