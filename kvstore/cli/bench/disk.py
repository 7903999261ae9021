"""Moves between host memory and disk beside plain direct I/O."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import BLOCK_BYTES, Chains, settle
from kvstore.cli.bench.figure import Figure, rate
from kvstore.cli.bench.raw import RawDisk, at_addresses, huge, pieces, touched
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.client import Client, Space
from kvstore.units import MIB

__all__ = ["measure", "segment_files"]

_BLOCKS: Final = 128
# Twice the measured blocks: whichever slots they get, all have been written before.
_CAPACITY_BLOCKS: Final = 2 * _BLOCKS
_IO_THREADS: Final = 4
_WAIT_S: Final = 60.0


def _syncs(client: Client) -> int:
    """Return how often the daemon has synced so far: each group of blocks, and then its records."""
    return sum(2 * t.count for t in client.stats().timings if t.name == "flush_group")


def segment_files(disk: Path, size: int) -> list[tuple[Path, int]]:
    """Return files of the disk tier, with the bytes to read of each: `size` in all."""
    files, left = [], size
    for path in sorted(p for p in disk.rglob("*") if p.is_file()):
        take = min(left, path.stat().st_size // MIB * MIB)
        if take:
            files.append((path, take))
            left -= take
    if left:
        raise ChildError(f"the disk tier's files lack {left} bytes")
    return files


def _pool_memory(client: Client, space: Space, stack: contextlib.ExitStack) -> list[memoryview]:
    """Borrow slots of the host pool, so that the baseline's memory is the very same kind.

    A grant's slots are ours to write until it is aborted.
    """
    grant = space.reserve(_BLOCKS, deadline_s=_WAIT_S).result(timeout=_WAIT_S)
    attachment = client.attachment
    stack.callback(attachment.abort, grant.owner_id, grant.id, grant.slots, all_shards=True)
    if len(grant.slots) != _BLOCKS:
        raise ChildError(f"only {len(grant.slots)} of {_BLOCKS} slots were granted")
    held = stack.enter_context(
        attachment.using(grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id)
    )
    memory = at_addresses(held.addresses(0).tolist(), BLOCK_BYTES)
    for piece in memory:
        piece[:] = bytes(BLOCK_BYTES)
    return memory


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure flush and promotion of 256 MiB.

    The disk tier is filled once before, so that both sides write to extents that have been
    written and read from extents that hold data: file systems answer reads of never-written
    extents without the disk.
    """
    size = _BLOCKS * BLOCK_BYTES
    disk = directory / "disk"
    memory = touched(_BLOCKS, BLOCK_BYTES)
    memory[:] = np.random.default_rng(2).integers(0, 256, memory.shape, np.uint8)
    out = touched(_BLOCKS, BLOCK_BYTES)
    options = [
        *("--host-pool", str(2 * _CAPACITY_BLOCKS * BLOCK_BYTES)),
        *("--disk", str(disk), "--disk-capacity", str(_CAPACITY_BLOCKS * BLOCK_BYTES)),
        *("--write-policy", "evict", "--io-threads", str(_IO_THREADS)),
    ]
    flushes, writes, promotions, reads = [], [], [], []
    huge_writes, huge_reads = [], []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(ChildDaemon(directory, options))
        client = stack.enter_context(connect(daemon.address))
        chains = Chains(client, "bench-disk")
        chains.ready()
        space = chains.space

        def flush() -> tuple[float, int]:
            before = _syncs(client)
            begin = time.perf_counter()
            done = client.flush(_WAIT_S)
            seconds = time.perf_counter() - begin
            if not done.done:
                raise ChildError(f"flush left {done.skipped} blocks")
            return seconds, _syncs(client) - before

        def put() -> None:
            keys = chains.next(_BLOCKS)
            if space.put(keys, memory, timeout_s=_WAIT_S) != _BLOCKS:
                raise ChildError("put did not store every block")

        for _ in range(_CAPACITY_BLOCKS // _BLOCKS):
            put()
        client.flush(_WAIT_S)
        space.evict()
        raw = RawDisk(_IO_THREADS, _pool_memory(client, space, stack))
        stack.callback(raw.close)
        raw_huge = RawDisk(_IO_THREADS, pieces(huge(_BLOCKS, BLOCK_BYTES)))
        stack.callback(raw_huge.close)
        raw.write_seconds(directory / "raw", size, syncs=1)
        for _ in range(rounds):
            space.evict()
            put()
            settle()
            seconds, syncs = flush()
            flushes.append(seconds)
            settle()
            writes.append(raw.write_seconds(directory / "raw", size, syncs=syncs))
            huge_writes.append(raw_huge.write_seconds(directory / "raw", size, syncs=syncs))
            space.evict(tier="host")
            settle()
            begin = time.perf_counter()
            promoted = space.prefetch(chains.last, deadline_s=_WAIT_S).wait()
            promotions.append(time.perf_counter() - begin)
            if promoted != _BLOCKS:
                raise ChildError(f"promoted {promoted} of {_BLOCKS} blocks")
            settle()
            reads.append(raw.read_seconds(segment_files(disk, size)))
            huge_reads.append(raw_huge.read_seconds(segment_files(disk, size)))
        if space.get(chains.last, out) != _BLOCKS or not np.array_equal(out, memory):
            raise ChildError("what came back from disk is not what was stored")
    return [
        rate("host to disk, synced", size, flushes, writes, "O_DIRECT writes", target=0.8),
        rate("disk to host, with digest", size, promotions, reads, "O_DIRECT reads", target=0.8),
        rate("O_DIRECT writes from huge pages", size, huge_writes),
        rate("O_DIRECT reads into huge pages", size, huge_reads),
    ]
