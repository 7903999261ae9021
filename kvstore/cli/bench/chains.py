"""The chains of blocks that the bench stores."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kvstore.client import Client, Space
from kvstore.keys import Keys, chain_keys
from kvstore.space import SpaceSpec
from kvstore.units import MIB

__all__ = ["BLOCK_BYTES", "Chains", "settle"]

# What 16 tokens of Llama-3-8B take in bf16.
BLOCK_BYTES: Final = 2 * MIB
_BLOCK_TOKENS: Final = 16
_SETTLE_SECONDS: Final = 0.25


def settle() -> None:
    """Let background work of the daemon (digests, eviction) come to rest."""
    time.sleep(_SETTLE_SECONDS)


class Chains:
    """New chains in one space, as many as are asked for.

    Attributes:
        space: the open space.
        last: the keys of the last chain made.
    """

    def __init__(self, client: Client, name: str, block_bytes: int = BLOCK_BYTES) -> None:
        """Open the space."""
        spec = SpaceSpec(
            model=name, dtype="bfloat16", block_tokens=_BLOCK_TOKENS, shard_bytes=(block_bytes,)
        )
        self.space: Space = client.open_space(spec)
        self.last: Keys = chain_keys([], _BLOCK_TOKENS)
        self._count = 0

    def next(self, blocks: int) -> Keys:
        """Return the keys of a chain that was never stored."""
        self._count += 1
        tokens = np.full(blocks * _BLOCK_TOKENS, self._count, np.uint32)
        self.last = chain_keys(tokens, _BLOCK_TOKENS)
        return self.last

    def ready(self) -> None:
        """Store one block and drop it: the pool is mapped and slabs are there."""
        self.space.put(self.next(1), np.zeros((1, self.space.spec.block_bytes), np.uint8))
        self.space.evict()
        settle()
