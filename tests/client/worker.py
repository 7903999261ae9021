"""A client in a process of its own, for tests that stop or kill it: worker.py ADDRESS put|get."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray

from kvstore import Client, Keys, SpaceSpec, chain_keys

BLOCK_BYTES = 1 << 20
SPEC = SpaceSpec(model="worker", dtype="d", block_tokens=4, shard_bytes=(BLOCK_BYTES,))


def chain(name: str, count: int) -> tuple[Keys, NDArray[np.uint8]]:
    """Return a chain that every process makes alike, and its bytes."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    blocks = np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    return chain_keys(range(4 * count), 4, salt=name.encode()), blocks


def main() -> None:
    """Do it and print `blocks right`: how many, and whether their bytes are right."""
    address, what, name, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    keys, blocks = chain(name, count)
    with Client(address, name=f"worker {name}", timeout_s=10.0) as client:
        space = client.open_space(SPEC)
        if what == "put":
            print(space.put(keys, blocks, timeout_s=10.0), True, flush=True)
        else:
            got = space.get(keys, timeout_s=10.0)
            print(len(got), np.array_equal(got, blocks[: len(got)]), flush=True)


if __name__ == "__main__":
    main()
