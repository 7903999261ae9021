"""An audit: do index, records, slots and files tell the same story?

For when nothing moves: no lease, no grant, nothing on its way to the disk, from it, or off it. Then,
block by block:

* a slot, of either tier, has one owner;
* a slot on disk is allocated exactly if a block lies in it, and exactly if a record names it;
* a record says of its block what the index says;
* a block on disk has its parent there;
* the bytes that the tiers count are those of the slots, and the files are those of the segments.

So nothing is owned twice and nothing is leaked. Bytes are not read: digests are the scrubber's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.tiers.base import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.engine.engine import Engine
    from kvstore.index import Block
    from kvstore.index.records import BlockRecord
    from kvstore.tiers.disk import DiskTier

__all__ = ["audit"]


async def audit(engine: Engine) -> list[str]:
    """Return one line for each thing that does not fit; an empty list if everything does."""
    problems = [*_host_problems(engine), *_gpu_problems(engine)]
    if engine.disk is not None:
        found = await asyncio.to_thread(engine.store.load_blocks, engine.disk.store_id)
        if found.damaged:
            problems.append(f"{found.damaged} damaged records")
        problems += _disk_problems(engine, engine.disk)
        problems += _record_problems(engine, found.records)
        problems += await asyncio.to_thread(engine.disk.misfits)
    return problems


def _blocks(engine: Engine) -> Iterator[Block]:
    for space in engine.index.spaces.values():
        yield from space.blocks.values()


def _host_problems(engine: Engine) -> Iterator[str]:
    busy = engine.leases.count + len(engine.grants) + len(engine.quarantine)
    if busy:
        yield f"{busy} leases, grants and slots of earlier writers are open"
    owners: Counter[Slot] = Counter()
    owned_bytes = 0
    for block in _blocks(engine):
        if block.host is not None:
            owners[block.host] += 1
            owned_bytes += block.space.shape.block_bytes
    yield from (f"host slot {slot} has {n} owners" for slot, n in owners.items() if n > 1)
    used = engine.host.usage().used_bytes
    if used != owned_bytes:
        yield f"host: {used} bytes are taken, {owned_bytes} have an owner"


def _gpu_problems(engine: Engine) -> Iterator[str]:
    if engine.gpu is None:
        return
    owners = Counter(block.gpu for block in _blocks(engine) if block.gpu is not None)
    yield from (f"gpu slot {slot} has {n} owners" for slot, n in owners.items() if n > 1)
    owned = sum(b.space.shape.block_bytes for b in _blocks(engine) if b.gpu is not None)
    used = engine.gpu.usage().used_bytes
    if used != owned:
        yield f"gpu: {used} bytes are taken, {owned} have an owner"
    for block in _blocks(engine):
        if block.gpu is not None and block.host is None and block.disk is None:
            yield f"{block} has a GPU copy only"


def _disk_problems(engine: Engine, disk: DiskTier) -> Iterator[str]:
    owners = Counter(block.disk for block in _blocks(engine) if block.disk is not None)
    taken = {slot for group, *_ in disk.segments() for slot in disk.allocated_slots(group)}
    yield from (f"disk slot {slot} has {n} owners" for slot, n in owners.items() if n > 1)
    yield from (f"disk slot {slot} is taken by nobody" for slot in taken - owners.keys())
    yield from (f"disk slot {slot} holds a block and is free" for slot in owners.keys() - taken)
    for block in _blocks(engine):
        if block.disk is not None and block.parent is not None and block.parent.disk is None:
            yield f"{block} is on disk without its parent"


def _record_problems(engine: Engine, records: list[BlockRecord]) -> Iterator[str]:
    recorded: set[Block] = set()
    for record in records:
        space = engine.index.spaces.get(record.space_id)
        block = None if space is None else space.blocks.get(record.key)
        if block is None or block.disk is None:
            yield f"a record names {record.key.hex()[:8]}, which is not on disk"
            continue
        recorded.add(block)
        parent = None if block.parent is None else block.parent.key
        said = (record.segment, record.slot, record.epoch, record.digests, record.parent)
        if said != (*block.disk, block.space.epoch, block.digests, parent):
            yield f"the record of {block} says {said}"
    for block in _blocks(engine):
        if block.disk is not None and block not in recorded:
            yield f"{block} is on disk without a record"
