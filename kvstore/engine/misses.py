"""Why a leading run ended, from what the index remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.miss import Miss, MissReason

if TYPE_CHECKING:
    from kvstore.index import BlockIndex, SpaceIndex

__all__ = ["NO_MISS", "miss_of"]

NO_MISS = Miss()

_OF_CAUSE = {
    "evicted": MissReason.EVICTED,
    "expired": MissReason.EXPIRED,
    "corrupt": MissReason.CORRUPT,
    "io_error": MissReason.IO_ERROR,
    "epoch": MissReason.OTHER_EPOCH,
}


def miss_of(index: BlockIndex, space: SpaceIndex, key: bytes) -> Miss:
    """Say why a key that is not in the index is not there."""
    if key in space.pending_keys:
        return Miss(MissReason.NOT_READY)
    ghost = index.ghosts.get(space.id, key)
    if ghost is not None:
        return Miss(_OF_CAUSE[ghost.cause], ghost.tier.name.lower(), ghost.unix_seconds)
    return Miss(MissReason.FORGOTTEN if index.ghosts.forgot else MissReason.NEVER_SEEN)
