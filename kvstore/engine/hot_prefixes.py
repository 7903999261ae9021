"""Which prompts' beginnings are asked for most: a bounded memory of hot chains.

Every use of a chain's head adds to a counter of that chain (a "space saving" sketch: of the `_MOST`
that are kept, the coldest makes way for one that is not, and hands its warmth on). Warmth halves in
`_HALF_LIFE_SECONDS`, so that what was hot yesterday goes. A use costs a few microseconds however
many blocks and spaces there are; what a chain's requests have in common is worked out only when
somebody asks, from the blocks' own counts. Holds keys, no blocks. Lost with the process.

`used` runs on the event loop's thread; `hottest` on any: it reads what each chain says at that moment.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["HotPrefix", "HotPrefixes"]

_MOST: Final = 64
_HALF_LIFE_SECONDS: Final = 600.0
# Blocks of a chain that are looked at: 64 Ki tokens in blocks of 128.
_DEEPEST: Final = 512
# Exponents of two beyond which warmth is scaled down; a float ends at 1,023.
_RESCALE_EXPONENT: Final = 500.0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning that requests have in common.

    Attributes:
        space: whose.
        root: key of the chain's first block.
        key: of the last block that at least half of the requests have in common.
        requests: that began with `root`, since it was noticed.
        hit_blocks: that these found, beyond the common part too.
        shared_blocks: how long the common part is; at most `_DEEPEST`.
        tiers: how many of these have a copy there, by tier.
        idle_seconds: since the last of these requests.
    """

    space: SpaceIndex
    root: bytes
    key: bytes
    requests: int
    hit_blocks: int
    shared_blocks: int
    tiers: dict[TierName, int]
    idle_seconds: float


class _Chain:
    """One chain that is counted."""

    __slots__ = ("best", "hit_blocks", "last", "requests", "root", "space", "used_at", "warmth")

    def __init__(self, space: SpaceIndex, root: bytes, warmth: float) -> None:
        self.space = space
        self.root = root
        self.warmth = warmth
        self.requests = 0
        self.hit_blocks = 0
        self.used_at = 0.0
        # Keys of the last run, and of the one that had the longest part in common.
        self.last: Sequence[bytes] = ()
        self.best: Sequence[bytes] = ()


class HotPrefixes:
    """The chains that are used most, of all spaces."""

    def __init__(self, index: BlockIndex, clock: Callable[[], float] = time.monotonic) -> None:
        """Know none.

        Args:
            index: whose blocks they are.
            clock: seconds, monotonic.
        """
        self._index = index
        self._clock = clock
        self._since = clock()
        self._chains: dict[tuple[bytes, bytes], _Chain] = {}

    def __len__(self) -> int:
        """Return how many chains are counted."""
        return len(self._chains)

    def used(self, space: SpaceIndex, run: Sequence[Block], keys: Sequence[bytes]) -> None:
        """Count one use of a leading run.

        Args:
            space: whose.
            run: what was found; one that does not start its chain is the rest of a long one, whose
                head was counted: it is not counted again.
            keys: what was asked for, `run`'s keys first.
        """
        if not run or run[0].parent is not None:
            return
        now = self._clock()
        exponent = (now - self._since) / _HALF_LIFE_SECONDS
        if exponent > _RESCALE_EXPONENT:
            self._rescale(now, exponent)
            exponent = 0.0
        name = (space.id, run[0].key)
        chain = self._chains.get(name)
        if chain is None:
            chain = self._chains[name] = _Chain(space, run[0].key, self._make_way())
        chain.warmth += 2.0**exponent
        chain.requests += 1
        chain.hit_blocks += len(run)
        chain.used_at = now
        chain.last = keys[: min(len(run), _DEEPEST)]

    def _make_way(self) -> float:
        """Return the warmth that a chain not counted before begins with."""
        if len(self._chains) < _MOST:
            return 0.0
        coldest = min(self._chains, key=lambda name: self._chains[name].warmth)
        return self._chains.pop(coldest).warmth

    def _rescale(self, now: float, exponent: float) -> None:
        for chain in self._chains.values():
            chain.warmth *= 2.0**-exponent
        self._since = now

    def hottest(self, most: int) -> list[HotPrefix]:
        """Return the hottest chains that are still there, hottest first.

        Looks at `most` × `_DEEPEST` blocks at most, whatever the index holds.
        """
        now = self._clock()
        found = []
        for chain in heapq.nlargest(most, list(self._chains.values()), key=lambda c: c.warmth):
            shared = self._shared(chain)
            if not shared:
                continue
            found.append(
                HotPrefix(
                    space=chain.space,
                    root=chain.root,
                    key=shared[-1].key,
                    requests=chain.requests,
                    hit_blocks=chain.hit_blocks,
                    shared_blocks=len(shared),
                    tiers={
                        TierName.GPU: sum(block.gpu is not None for block in shared),
                        TierName.HOST: sum(block.host is not None for block in shared),
                        TierName.DISK: sum(block.disk is not None for block in shared),
                    },
                    idle_seconds=max(0.0, now - chain.used_at),
                )
            )
        return found

    def _shared(self, chain: _Chain) -> list[Block]:
        """Return the blocks that at least half of a chain's requests have in common."""
        blocks = chain.space.blocks
        root = blocks.get(chain.root)
        if root is None:
            return []

        def common(keys: Sequence[bytes]) -> int:
            # A block is used no more often than what it hangs on: halving finds the place.
            low, high = 0, len(keys)
            while low < high:
                middle = (low + high) // 2
                block = blocks.get(keys[middle])
                if block is not None and 2 * block.uses >= root.uses:
                    low = middle + 1
                else:
                    high = middle
            return low

        # The last request may be one that parts early: the best one so far is kept beside it.
        length, chain.best = max(
            ((common(keys), keys) for keys in (chain.best, chain.last)), key=lambda it: it[0]
        )
        found: list[Block] = []
        at = blocks.get(chain.best[length - 1]) if length else None
        while at is not None and len(found) < length:
            found.append(at)
            at = at.parent
        return found[::-1]
