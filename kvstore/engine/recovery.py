"""Recovery: the index of the disk tier from its records.

Recovery protocol

1. Take the records of the disk store. Those of an earlier epoch, of a space that is gone, or with
   digests for another number of shards are dropped.
2. The disk tier adopts the slots that are left; a slot that is claimed twice, or that the segment
   files do not have, is refused.
3. Blocks enter the index parents first. What has no ancestor chain up to a root, because a record
   was damaged or a slot refused, is dropped: the disk tier stays prefix-closed.
4. The records of everything dropped are deleted, durably, and only then are adopted slots among
   them free.

Nothing is allocated before 4. Killed at any moment, the next start finds the same records, or fewer
that are void: it drops what is left of them. Bytes are not read: a record is right because its
block's bytes were durable before it (`flusher`), and what was damaged since fails its digest.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.syncpoint import reach
from kvstore.tiers.base import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.counters import Counters
    from kvstore.index import BlockIndex, SpaceIndex
    from kvstore.index.lmdb_store import MetaStore
    from kvstore.index.records import BlockRecord
    from kvstore.tiers.disk import DiskTier

__all__ = ["Recovered", "recover", "recover_durably"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What came back.

    Attributes:
        blocks: blocks in the index.
        dropped: (space id, key) of records to delete.
        freed: adopted slots to free once they are deleted.
    """

    blocks: int
    dropped: list[tuple[bytes, bytes]]
    freed: list[Slot]


def recover(index: BlockIndex, disk: DiskTier, records: Sequence[BlockRecord]) -> Recovered:
    """Fill the index from records; the spaces are in it already."""
    dropped: list[tuple[bytes, bytes]] = []
    usable: list[tuple[SpaceIndex, BlockRecord]] = []
    spaces = index.spaces
    for record in records:
        space = spaces.get(record.space_id)
        if (
            space is None
            or record.epoch != space.epoch
            or len(record.digests) != space.shape.shards
            or len(record.key) != space.spec.key_bytes
        ):
            dropped.append((record.space_id, record.key))
        else:
            usable.append((space, record))
    slots = [Slot(r.segment, r.slot) for _, r in usable]
    shapes = [space.shape for space, _ in usable]
    adopted = disk.adopt(list(zip(slots, shapes, strict=True)))
    waiting: dict[SpaceIndex, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    ready: list[int] = []
    for i, (space, record) in enumerate(usable):
        if record.parent is None:
            ready.append(i)
        else:
            waiting[space][record.parent].append(i)
    entered = bytearray(len(usable))
    while ready:
        i = ready.pop()
        if not adopted[i]:
            continue
        space, record = usable[i]
        parent = None if record.parent is None else space.blocks[record.parent]
        index.restore(space, record.key, parent, slots[i], record.digests, record.sequence)
        entered[i] = 1
        children = waiting[space].pop(record.key, None)
        if children is not None:
            ready += children
    index.restored()
    lost = [i for i, there in enumerate(entered) if not there]
    dropped += [(usable[i][0].id, usable[i][1].key) for i in lost]
    freed = [slots[i] for i in lost if adopted[i]]
    if dropped:
        log.warning("recovery dropped %d of %d blocks", len(dropped), len(records))
    return Recovered(len(usable) - len(lost), dropped, freed)


async def recover_durably(
    index: BlockIndex, disk: DiskTier, store: MetaStore, counters: Counters
) -> int:
    """Do all of the protocol above; return how many blocks came back."""
    loaded = store.load_blocks(disk.store_id)
    if not loaded.records and any(other != disk.store_id for other in store.stores()):
        log.warning("the blocks that the index knows are on another disk than this: is it mounted?")
    recovered = recover(index, disk, loaded.records)
    await disk.finish_recovery()
    if recovered.dropped:
        reach("recovery.found_lost")
        store.commit_blocks(disk.store_id, [], recovered.dropped)
        reach("recovery.deleted_lost")
    disk.free(recovered.freed)
    counters.counts["recovery_dropped_blocks"] += len(recovered.dropped) + loaded.damaged
    return recovered.blocks
