"""Commits groups of blocks for ever and acknowledges each one, until it is killed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from kvstore.index.lmdb_store import MetaStore
from kvstore.index.records import BlockRecord
from kvstore.space import SpaceSpec

STORE = b"s" * 16
GROUP_BLOCKS = 40


def group(space_id: bytes, number: int) -> list[BlockRecord]:
    """Return the blocks of one group: the same in every process."""
    found = []
    for i in range(GROUP_BLOCKS):
        key = hashlib.sha256(b"%d %d" % (number, i)).digest()[:16]
        found.append(BlockRecord(space_id, key, None, 1, number, i, (number, i), number))
    return found


def main() -> None:
    store, _ = MetaStore.open_or_reset(Path(sys.argv[1]))
    store.mark_open()
    spec = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096, 4096))
    space_id = store.put_space(spec).space_id
    number = int(sys.argv[2])
    while True:
        # Every third group is deleted again by the one after it.
        gone = group(space_id, number - 1) if number % 3 == 2 else []
        puts = group(space_id, number)
        store.commit_blocks(STORE, puts, [(r.space_id, r.key) for r in gone])
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    main()
