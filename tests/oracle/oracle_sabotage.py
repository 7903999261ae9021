"""Daemons that break a promise, for the oracle to find out. Each runs in the daemon's process."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = [
    "check_no_digests",
    "commit_nothing",
    "keep_granted_slots",
    "keep_old_epochs",
    "make_others_pay",
]


def _module(name: str) -> Any:
    return importlib.import_module(name)


def commit_nothing() -> None:
    """Say that records are durable, and write none."""
    _module("kvstore.index.lmdb_store").MetaStore.commit_blocks = lambda *_: None


class _Equal:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def check_no_digests() -> None:
    """Serve what the disk delivers, whatever it is."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvstore.tiers.") and hasattr(module, "digest_shards"):
            _module(name).digest_shards = lambda *_: _Equal()


def keep_old_epochs() -> None:
    """Go on serving the blocks of an epoch that was ended."""
    _module("kvstore.index").BlockIndex.discard_space = lambda *_: []


def make_others_pay() -> None:
    """Keep a space's quota at the cost of every other one."""
    tiers = _module("kvstore.tiers.base").TierName
    room = _module("kvstore.engine.room").HostRoom
    own = room.evict_own

    def evict(self: Any, space: Any, count: int, older_than: Any = None) -> int:
        for other in list(self._index.spaces.values()):
            if other is not space:
                for tier in (tiers.HOST, tiers.DISK):
                    self._index.evict_all(list(other.blocks.values()), tier)
        return int(own(self, space, count, older_than))

    room.evict_own = evict


def keep_granted_slots() -> None:
    """Never take an aborted slot back."""
    _module("kvstore.engine.grants").Grants.abort = lambda *_: None
