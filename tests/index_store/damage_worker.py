"""Opens damaged copies of a store, one after the other, as a daemon would.

A program, because a daemon that dies of its index must fail a test, not end the test run. Reads
one JSON object, {"template": directory, "scratch": directory, "samples": [...]}, and prints a line
for each sample before (its index) and after (what was found).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from kvstore.index.lmdb_store import MetaStore
from kvstore.index.records import BlockRecord
from kvstore.space import SpaceSpec

STORE = b"s" * 16


def main() -> None:
    job = json.loads(sys.stdin.read())
    scratch = Path(job["scratch"])
    for index, sample in enumerate(job["samples"]):
        print(index, flush=True)
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(job["template"], scratch)
        data = bytearray((scratch / sample["file"]).read_bytes())
        if "length" in sample:
            del data[sample["length"] :]
        else:
            data[sample["at"]] ^= sample["xor"]
        (scratch / sample["file"]).write_bytes(data)
        if not sample["sealed"]:
            (scratch / "index.mdb/seal").unlink(missing_ok=True)

        store, note = MetaStore.open_or_reset(scratch)
        store.mark_open()
        loaded = store.load_blocks(STORE)
        spec = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,))
        space = store.put_space(spec)
        # The daemon goes on: pages that look free are taken, pages that look full are split.
        fresh = [
            BlockRecord(space.space_id, b"%016d" % n, None, space.epoch, 0, n, (n,), n)
            for n in range(300)
        ]
        stale = [(r.space_id, r.key) for r in loaded.records]
        store.commit_blocks(STORE, fresh[:150], stale)
        store.commit_blocks(STORE, fresh[150:], [])
        after = store.load_blocks(STORE)
        store.close()
        answer = {
            "note": note,
            "epoch": space.epoch,
            "loaded": [(r.key.hex(), r.slot, r.sequence) for r in loaded.records],
            "goes_on": sorted(after.records, key=lambda r: r.key) == fresh,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
