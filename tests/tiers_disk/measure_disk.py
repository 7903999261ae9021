"""Measure the disk tier against bare system calls on the same file, both sides in turn.

    python tests/tiers_disk/measure_disk.py DIRECTORY [block size, e.g. 2MiB] [shards]

The bare side does the same bytes with the same number of threads, in calls of 8 MiB, without
digests, outcomes or a loop; for writes with as many syncs. The file's extents are written before.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Transfer
from kvstore.tiers.digests import digest_shards
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.posix_engine import PosixEngine
from kvstore.units import GIB, MIB, parse_bytes

THREADS = 4
ROUNDS = 11
BATCH_BYTES = 128 * MIB
CALL_BYTES = 8 * MIB


def bare(call: Callable[[int, Sequence[memoryview], int], int], fd: int, view: memoryview) -> float:
    """Move a batch with `THREADS` threads; return seconds."""
    pieces = [(view[at : at + CALL_BYTES], 4096 + at) for at in range(0, len(view), CALL_BYTES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: None, range(THREADS)))
        begun = time.perf_counter()
        moved = pool.map(lambda piece: call(fd, [piece[0]], piece[1]), pieces)
        assert sum(moved) == len(view)
        if call is os.pwritev:
            os.fdatasync(fd)
        return time.perf_counter() - begun


async def measure(directory: Path, shape: BlockShape, run_bytes: int) -> None:
    engine = PosixEngine(THREADS, max_run_bytes=run_bytes)
    tier = DiskTier(directory, 64 * BATCH_BYTES, engine=engine)
    await tier.open()
    await tier.finish_recovery()
    count = BATCH_BYTES // shape.block_bytes
    while tier.free_blocks(shape) < count:
        tier.want(shape, count)
        await asyncio.sleep(0.01)
    slots = tier.allocate(shape, count)
    memory = mmap.mmap(-1, count * shape.block_bytes)
    view = memoryview(memory)
    for at in range(0, len(view), MIB):
        view[at : at + MIB] = os.urandom(MIB)
    size = shape.slot_bytes
    transfers = []
    for number, slot in enumerate(slots):
        at = number * shape.block_bytes
        buffers = tuple(view[at + s * size : at + (s + 1) * size] for s in range(shape.shards))
        lengths = (size,) * shape.shards
        transfers.append(Transfer(slot, buffers, lengths, digest_shards(buffers, lengths)))
    fd = os.open(directory / "seg-000000.kvs", os.O_RDWR | os.O_DIRECT)
    bare(os.pwritev, fd, view)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        assert set(await tier.write(transfers)) == {Outcome.OK}
        await tier.sync()
        times.setdefault("write", []).append(time.perf_counter() - begun)
        times.setdefault("bare write", []).append(bare(os.pwritev, fd, view))
        assert set(await tier.write(transfers)) == {Outcome.OK}
        begun = time.perf_counter()
        assert set(await tier.read(transfers)) == {Outcome.OK}
        times.setdefault("read", []).append(time.perf_counter() - begun)
        times.setdefault("bare read", []).append(bare(os.preadv, fd, view))
    os.close(fd)
    await tier.close()
    rate = {name: len(view) / statistics.median(seconds) / GIB for name, seconds in times.items()}
    print(
        f"runs of {run_bytes // MIB:2} MiB: "
        + "  ".join(f"{name} {value:5.2f} GiB/s" for name, value in rate.items())
        + f"  ratios: read {rate['read'] / rate['bare read']:.2f}"
        + f" write {rate['write'] / rate['bare write']:.2f}"
    )


def main() -> None:
    block = parse_bytes(sys.argv[2]) if len(sys.argv) > 2 else 2 * MIB
    shards = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    shape = BlockShape(block // shards, shards)
    for run_mib in (2, 8, 16):
        directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
        try:
            asyncio.run(measure(directory, shape, run_mib * MIB))
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
