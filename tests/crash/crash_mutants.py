"""Wrong orders, put into a life on purpose: the crash test must notice each of them.

A test that cannot fail proves nothing. Each of these breaks one numbered step.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest.mock import patch

from crash_life import Life

from kvstore.engine import assembly
from kvstore.engine.disk_records import DiskRecords, record_of
from kvstore.engine.disk_room import Deletes
from kvstore.engine.flusher import Flusher
from kvstore.index import Block
from kvstore.index.lmdb_store import MetaStore
from kvstore.tiers import segment
from kvstore.tiers.base import Slot
from kvstore.tiers.segment_io import SegmentIo
from kvstore.tiers.segment_set import SegmentSet

__all__ = ["MUTANTS"]


def _records_before_data(_: Life) -> None:
    """Records are committed first, and the data they name is synced after that."""
    sync, commit = SegmentIo.sync, Flusher._commit_group

    async def skip(_: SegmentIo) -> None:
        return

    async def commit_first(flusher: Flusher, group: Any) -> int:
        written = await commit(flusher, group)
        await sync(flusher._disk._io)
        return written

    patch.object(SegmentIo, "sync", skip).start()
    patch.object(Flusher, "_commit_group", commit_first).start()


def _slots_before_deletes(_: Life) -> None:
    """A victim's slot is used again before the delete of its record is durable."""
    deleted = Flusher.deleted

    def at_once(flusher: Flusher, block: Block, slot: Slot) -> None:
        deleted(flusher, block, slot)
        flusher._disk.free([slot])

    def nothing(deletes: Deletes, taken: Sequence[tuple[Block, Slot]]) -> list[Slot]:
        for block, _ in taken:
            deletes.freeing[block.space.shape] -= 1
        return []

    patch.object(Flusher, "deleted", at_once).start()
    patch.object(Deletes, "done", nothing).start()


def _segments_without_names(_: Life) -> None:
    """A segment is used before its name is durable."""
    patch.object(segment, "sync_directory", lambda _: None).start()


def _segments_without_headers(_: Life) -> None:
    """A segment gets its name before its header is durable."""
    unsynced = types.SimpleNamespace(**vars(os))
    unsynced.fsync = lambda _: None
    patch.object(segment, "os", unsynced).start()


def _acknowledged_before_commit(_: Life) -> None:
    """Every third group counts as durable although nothing was committed."""
    commit = DiskRecords.commit
    groups = 0

    async def forgetful(durable: DiskRecords, records: Any, deletes: Any) -> bool:
        nonlocal groups
        groups += bool(records)
        if records and groups % 3 == 0:
            durable.deletes.failed(deletes)
            return True
        return await commit(durable, records, deletes)

    patch.object(DiskRecords, "commit", forgetful).start()


def _epoch_in_memory(_: Life) -> None:
    """A bump is acknowledged that nothing keeps."""

    def forgotten(store: MetaStore, space_id: bytes) -> int:
        epoch: int = store._spaces[space_id].epoch + 1
        return epoch

    patch.object(MetaStore, "bump_epoch", forgotten).start()


def _limits_in_memory(_: Life) -> None:
    """Limits are acknowledged that nothing keeps."""
    patch.object(MetaStore, "put_limits", lambda *_: None).start()


def _host_index_used_twice(_: Life) -> None:
    """The saved host index stays after the first grant."""
    patch.object(assembly, "remove_host_index", lambda _: None).start()


def _leaked_slots(_: Life) -> None:
    """A freed slot is not given back now and then."""
    free = SegmentSet.free
    calls = 0

    def leaky(segments: SegmentSet, slots: Sequence[Slot]) -> Any:
        nonlocal calls
        calls += 1
        return free(segments, slots[1:] if calls % 5 == 0 else slots)

    patch.object(SegmentSet, "free", leaky).start()


def _record_of_another_slot(_: Life) -> None:
    """Two records may name one slot."""

    def wrong(block: Block, slot: Slot) -> Any:
        return record_of(block, Slot(slot.group, slot.index // 2 * 2))

    patch("kvstore.engine.flusher.record_of", wrong).start()


MUTANTS: Final[dict[str, Callable[[Life], None]]] = {
    "records-before-data": _records_before_data,
    "slots-before-deletes": _slots_before_deletes,
    "segments-without-names": _segments_without_names,
    "segments-without-headers": _segments_without_headers,
    "acknowledged-before-commit": _acknowledged_before_commit,
    "epoch-in-memory": _epoch_in_memory,
    "limits-in-memory": _limits_in_memory,
    "host-index-used-twice": _host_index_used_twice,
    "leaked-slots": _leaked_slots,
    "record-of-another-slot": _record_of_another_slot,
}
