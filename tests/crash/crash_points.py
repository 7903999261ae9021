"""The daemon's sync points: how a life gets to each, and what the crash there interrupts."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["POINTS", "Point"]


class Point(NamedTuple):
    """One place at which a life is killed.

    Attributes:
        theme: what the life does to get there (`crash_life.THEMES`); "start": it starts.
        between: what is done when it is killed, and what is not.
        after: point at which the life before this one must end.
        fresh: only in a directory that is new.
    """

    theme: str
    between: str
    after: str = ""
    fresh: bool = False


POINTS: Final[dict[str, Point]] = {
    "flush.written": Point("flush", "blocks are written | synced"),
    "flush.synced": Point("flush", "blocks are synced | their records committed"),
    "blocks.put": Point("flush", "records are in a transaction | it is committed"),
    "blocks.committed": Point("flush", "records are durable | the flusher knows"),
    "flush.committed": Point("flush", "records are durable | victims' slots are free"),
    "flush.freed": Point("flush", "victims' slots are free | the index knows of the group"),
    "segment.reserved": Point("grow", "a segment has its length | its header"),
    "segment.written": Point("grow", "a segment has its header | it is synced"),
    "segment.synced": Point("grow", "a segment is synced | it has its name"),
    "segment.renamed": Point("grow", "a segment has its name | the name is durable"),
    "segment.unlinked": Point("shrink", "a segment is deleted | durably"),
    "disk.reading": Point("read", "a block's slot in host is taken | its bytes are there"),
    "move.written": Point("shrink", "moved blocks are written | synced"),
    "move.synced": Point("shrink", "moved blocks are synced | their records name the new places"),
    "move.committed": Point("shrink", "records name the new places | the old ones are free"),
    "move.emptied": Point("shrink", "a segment is empty | it is let go"),
    "epoch_log.written": Point("bump", "an epoch is appended | synced"),
    "epoch.logged": Point("bump", "an epoch is logged | in LMDB"),
    "epoch.committed": Point("bump", "an epoch is in LMDB | acknowledged"),
    "epoch.durable": Point("bump", "an epoch is durable | its old blocks are forgotten"),
    "pins.committed": Point("pin", "pins are durable | acknowledged"),
    "limits.committed": Point("limit", "limits are durable | acknowledged"),
    "budget.synced": Point("shrink", "the budget's record is written | in place"),
    "budget.renamed": Point("shrink", "the budget's record is in place | durably"),
    "host_index.written": Point("restart", "the host index is written | synced"),
    "host_index.synced": Point("restart", "the host index is synced | in place"),
    "host_index.renamed": Point("restart", "the host index is in place | durably"),
    "host_index.saved": Point("restart", "the host index is saved | the slabs are to be kept"),
    "seal.synced": Point("restart", "the seal is written | in place"),
    "seal.renamed": Point("restart", "the seal is in place | durably"),
    "seal.unlinked": Point("start", "the seal is removed | durably"),
    "adoption.mapped": Point("restart", "slabs are mapped | blocks adopted"),
    "adoption.adopted": Point("restart", "blocks are adopted | the host index is removed"),
    "host_index.unlinked": Point("restart", "the host index is removed | durably"),
    "adoption.invalidated": Point("restart", "the host index is gone | the first slot is granted"),
    # Only after an unclean end is LMDB copied.
    "renew.copied": Point("start", "LMDB is copied | the copy in its place", "flush.committed"),
    "renew.replaced": Point("start", "LMDB's copy is in its place | durably", "flush.committed"),
    "recovery.found_lost": Point(
        "start", "lost blocks are found | their records deleted", after="epoch.committed"
    ),
    "recovery.deleted_lost": Point(
        "start", "lost blocks' records are deleted | slots free", after="epoch.committed"
    ),
    "store_id.synced": Point("start", "the store's id is written | in place", fresh=True),
    "store_id.renamed": Point("start", "the store's id is in place | durably", fresh=True),
}
