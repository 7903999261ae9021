"""How often blocks were used lately: what decides who stays in the GPU pool.

By the order of use alone, one pass over many chains that nobody asks for twice would push out every
prefix that is asked for every minute. So what comes up only because it was used may take the place
of what was used less often, or as often and less recently; never of what is used more often.

Two tallies: what was used since the last turn of the page, and what on the page before, which counts
half. A page is turned when it names several times as much as the pool holds, so what was hot once and
is not any more loses its place, and the tallies stay small. Nothing of it survives the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index import Block

__all__ = ["GpuDemand"]

# Of the pool's capacity: how much one page names.
_PAGE: Final = 4


class GpuDemand:
    """Counts uses of blocks."""

    def __init__(self, pool_bytes: int) -> None:
        """Start with nothing used."""
        self._page_bytes = _PAGE * pool_bytes
        self._named = 0
        self._now: dict[Block, int] = {}
        self._before: dict[Block, int] = {}

    def used(self, run: Iterable[Block]) -> None:
        """Count one use of each block."""
        now = self._now
        for block in run:
            count = now.get(block)
            if count is None:
                self._named += block.space.shape.block_bytes
                count = 0
            now[block] = count + 1
        if self._named > self._page_bytes:
            self._before, self._now, self._named = now, {}, 0

    def uses(self, block: Block) -> int:
        """Return how often a block was used lately."""
        return self._now.get(block, 0) + (self._before.get(block, 0) + 1) // 2

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return len(self._now.keys() | self._before.keys())
