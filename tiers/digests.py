"""Digests of blocks: XXH3-64 over each shard's counted bytes, never over the slot's padding.

A digest proves that bytes are unchanged since it was taken. It is no proof of origin: whoever can
write the files can forge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

__all__ = ["digest_shard", "digest_shards"]

# From here on a hash object's `update` is used: it releases the GIL in every xxhash release since
# 3.0, one-shot calls only in recent ones. Below, making the object costs more than it frees.
_RELEASE_BYTES: Final = 128 << 10


def digest_shard(buffer: memoryview, length: int) -> int:
    """Return the XXH3-64 of the first ``length`` bytes; releases the GIL for large ones.

    Args:
        buffer: contiguous bytes, at least ``length`` of them.
        length: bytes that count.
    """
    counted = buffer if len(buffer) == length else buffer[:length]
    if length < _RELEASE_BYTES:
        return int(xxhash.xxh3_64_intdigest(counted))
    state = xxhash.xxh3_64()
    state.update(counted)
    return int(state.intdigest())


def digest_shards(buffers: Sequence[memoryview], lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one digest per shard.

    Blocks for about 35 µs per MiB: call it on a worker thread for anything large.

    Args:
        buffers: one per shard.
        lengths: bytes of each shard that count.

    Raises:
        ValueError: a shard's buffer is shorter than its length, or the counts differ.
    """
    for buffer, length in zip(buffers, lengths, strict=True):
        if len(buffer) < length:
            raise ValueError(f"a shard of {length} bytes in a buffer of {len(buffer)}")
    return tuple(map(digest_shard, buffers, lengths))
