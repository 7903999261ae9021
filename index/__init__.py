"""Which block is where: the block index, its eviction rule, and what LMDB keeps of it."""

from kvstore.index.block import NEVER, Block, Flush
from kvstore.index.eviction import EvictionQueue, disk_evictable, gpu_evictable, host_evictable
from kvstore.index.ghosts import Ghost, GhostList, Pressure
from kvstore.index.index import BlockIndex
from kvstore.index.limits import NO_LIMIT, SpaceLimits
from kvstore.index.space_index import SpaceIndex

__all__ = [
    "NEVER",
    "NO_LIMIT",
    "Block",
    "BlockIndex",
    "EvictionQueue",
    "Flush",
    "Ghost",
    "GhostList",
    "Pressure",
    "SpaceIndex",
    "SpaceLimits",
    "disk_evictable",
    "gpu_evictable",
    "host_evictable",
]
