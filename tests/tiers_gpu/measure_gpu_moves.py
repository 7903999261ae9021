"""Measures the ways from disk to the GPU pool, on a machine with a GPU. As root: it drops caches.

    python tests/tiers_gpu/measure_gpu_moves.py [--json FILE] [DIR ...]

For each directory: the same blocks by POSIX reads and host memory, and by kvikio with several
settings; then prefetches by a whole engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from gpu_figures import FAILED, FIGURES, Memory, best, check, say

from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, TierName, Transfer
from kvstore.tiers.cuda_device import cuda_devices
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.gpu_reader import DirectRead, GpuReader
from kvstore.tiers.io_engine import DeviceBuffer, IoRequest
from kvstore.tiers.kvikio_engine import KvikioEngine

MIB = 1 << 20
GIB = 1 << 30
COUNT = 512


async def disk(directory: Path, label: str) -> None:
    """The same blocks by every way from disk to the GPU."""
    slot, count = 2 * MIB, COUNT
    shape = BlockShape(slot, 1)
    tier = DiskTier(directory / "tier", 2 * GIB, threads=8)
    await tier.open()
    await tier.finish_recovery()
    tier.want(shape, count)
    while tier.free_blocks(shape) < count and tier.allocating:
        await asyncio.sleep(0.01)
    slots = tier.allocate(shape, count)
    source = mmap.mmap(-1, slot * count)
    view = memoryview(source)
    noise = np.random.default_rng(1).integers(0, 256, slot * count, np.uint8)
    view[:] = noise.data
    digests = [xxhash.xxh3_64_intdigest(view[n * slot : (n + 1) * slot]) for n in range(count)]
    writes = [
        Transfer(s, (view[n * slot : (n + 1) * slot],), (slot,), (digests[n],))
        for n, s in enumerate(slots)
    ]
    assert set(await tier.write(writes)) == {Outcome.OK}
    await tier.sync()
    gpu = GpuTier(Path(tempfile.mkdtemp(dir="/dev/shm")), cuda_devices(["0"]), 3 * GIB)
    await gpu.open()
    gpu.want(shape, count)
    targets = gpu.allocate(shape, count)
    memory = Memory(slot * count, gpu)
    total = slot * count
    await through_host(label, tier, gpu, memory, slots, targets, digests, slot)
    for threads in (1, 4, 8, 16):
        for task in (512 << 10, 2 * MIB):
            engine = KvikioEngine(threads, task_bytes=task)
            reader = GpuReader(tier, gpu, engine)
            await reader.open()
            reads = [
                DirectRead(s, t, slot, (slot,), (d,))
                for s, t, d in zip(slots, targets, digests, strict=True)
            ]

            async def direct(reads: list[DirectRead] = reads, reader: GpuReader = reader) -> None:
                for at in range(0, count, 64):
                    assert set(await reader.read(reads[at : at + 64])) == {Outcome.OK}

            seconds = await best(2, direct)
            name = f"{label}: {engine.name}, {threads} threads, {task >> 10} KiB tasks"
            say(f"{name}, checked", total / seconds / 1e9, "GB/s")
            if threads == 8 and task == 2 * MIB:
                await raw_kvikio(label, engine, tier, gpu, slots, targets, slot)
                wrong = [DirectRead(slots[0], targets[0], slot, (slot,), (digests[0] ^ 1,))]
                check(
                    f"{label}: a wrong digest is found",
                    right=await reader.read(wrong) == [Outcome.CORRUPT],
                )
            await reader.close()
    memory.close()
    await gpu.close()
    await tier.close()


async def raw_kvikio(
    label: str, engine: Any, tier: Any, gpu: Any, slots: Any, targets: Any, slot: int
) -> None:
    requests = [
        IoRequest(tier.place(s)[0], tier.place(s)[1], (DeviceBuffer(gpu.addresses(t)[0], slot),))
        for s, t in zip(slots, targets, strict=True)
    ]

    async def raw() -> None:
        for at in range(0, len(requests), 64):
            assert not any(await engine.read(requests[at : at + 64]))

    seconds = await best(2, raw)
    say(f"{label}: {engine.name}, not checked", slot * len(slots) / seconds / 1e9, "GB/s")


async def through_host(
    label: str,
    tier: Any,
    gpu: Any,
    memory: Memory,
    slots: Any,
    targets: Any,
    digests: Any,
    slot: int,
) -> None:
    def views(n: int) -> tuple[memoryview]:
        return (memory.mapping.view(n * slot, slot),)

    async def part(numbers: range) -> None:
        reads = [Transfer(slots[n], views(n), (slot,), (digests[n],)) for n in numbers]
        assert set(await tier.read(reads)) == {Outcome.OK}
        ups = [Transfer(targets[n], views(n), (slot,), (digests[n],)) for n in numbers]
        assert set(await gpu.write(ups)) == {Outcome.OK}

    async def all_of_it() -> None:
        todo = iter(range(0, len(slots), 16))

        async def worker() -> None:
            for at in todo:
                await part(range(at, at + 16))

        await asyncio.gather(*(worker() for _ in range(3)))

    async def only_disk() -> None:
        for at in range(0, len(slots), 64):
            numbers = range(at, at + 64)
            await tier.read([Transfer(slots[n], views(n), (slot,), None) for n in numbers])

    total = slot * len(slots)
    say(f"{label}: posix to host, not checked", total / await best(2, only_disk) / 1e9, "GB/s")
    say(f"{label}: posix, host, gpu, checked", total / await best(2, all_of_it) / 1e9, "GB/s")


async def moves(directory: Path, *, cufile: bool) -> None:
    """Prefetches by a whole engine: each leg, and from disk to the GPU by one of the ways."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
    from engine_world import World, chain, spec_of

    block, count = 2 * MIB, COUNT
    total = block * count
    state = Path(tempfile.mkdtemp(dir=directory))
    pools = Path(tempfile.mkdtemp(dir="/dev/shm"))
    world = World(
        state,
        pools,
        host_blocks=2 * count,
        disk_blocks=count + 64,
        gpu_blocks=2 * count,
        block_bytes=block,
        gpu_devices=lambda: cuda_devices(["0"]),
        gpu_engine=KvikioEngine if cufile else None,
    )
    async with world.boot():
        world.space = space = await world.engine.open_space(spec_of("wide", (block,)))
        player = world.player()
        player.sees_gpus()
        keys = chain("a", count)
        await player.put(keys, step=32, space=space)
        await world.settle(60)
        await world.engine.removal.evict(space, keys, TierName.HOST)
        numbers = iter(range(1, 100))

        async def prefetch(tier: TierName) -> float:
            begun = time.perf_counter()
            blocks, done, miss = await world.engine.tickets.prefetch(
                space, keys, next(numbers), 0, 0, 100, tier
            )
            seconds = time.perf_counter() - begun
            assert (blocks, done) == (count, True), (blocks, done, miss)
            return total / seconds / 1e9

        async def away(*tiers: TierName) -> None:
            for tier in tiers:
                await world.engine.removal.evict(space, keys, tier)

        rates: dict[str, list[float]] = {"disk to host": [], "disk to gpu": [], "host to gpu": []}
        for _ in range(3):
            await away(TierName.GPU, TierName.HOST)
            rates["disk to host"].append(await prefetch(TierName.HOST))
            rates["host to gpu"].append(await prefetch(TierName.GPU))
            await away(TierName.GPU, TierName.HOST)
            rates["disk to gpu"].append(await prefetch(TierName.GPU))
        reader = world.engine.gpu_reader
        way = "through host" if reader is None else f"by {reader.name}"
        where = f"{directory.name}, {way}"
        for name, found in rates.items():
            say(f"{where}: prefetch {name}", max(found), "GB/s")
        say(
            f"{where}: disk to gpu, of disk to host",
            max(rates["disk to gpu"]) / max(rates["disk to host"]),
        )
        lease, answer = player.acquire(keys, space=space)
        check(
            f"{where}: what came up is right",
            right=player.reads_right(keys[:64], answer.slots.slots[:64], space)
            and set(answer.tiers) == {TierName.GPU},
        )
        player.release(lease)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for directory in options.directories:
        asyncio.run(disk(directory, directory.name))
        for cufile in (False, True):
            asyncio.run(moves(directory, cufile=cufile))
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "figures": FIGURES}, indent=1))
    print("failed:", FAILED or "nothing")
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
