"""Blocks whose bytes follow from what they are blocks of, for tests that must tell them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import SpaceSpec

BLOCK_BYTES = 65536

Blocks = NDArray[np.uint8]


def spec_of(**fields: Any) -> SpaceSpec:
    """Return a spec with blocks of 64 KiB, four tokens each."""
    named: dict[str, Any] = {
        "model": "story",
        "dtype": "d",
        "block_tokens": 4,
        "shard_bytes": (BLOCK_BYTES,),
    }
    return SpaceSpec(**(named | fields))


def bytes_of(tokens: Sequence[int], size: int = BLOCK_BYTES, block_tokens: int = 4) -> Blocks:
    """Return what the full blocks of a prompt hold: it depends on every token before their end."""
    rows = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        said = ",".join(map(str, tokens[:end])).encode()
        seed = int.from_bytes(hashlib.sha256(said).digest()[:8], "little")
        rows.append(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    return np.array(rows, np.uint8).reshape(len(rows), size)
