"""Daemons that break a promise, for the oracle to find out. Each runs in the daemon's process."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["check_no_digests", "commit_nothing", "keep_granted_slots", "keep_old_epochs"]


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


def keep_granted_slots() -> None:
    """Never take an aborted slot back."""
    _module("kvstore.engine.grants").Grants.abort = lambda *_: None
