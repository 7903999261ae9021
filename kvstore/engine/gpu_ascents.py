"""Blocks that are to get a GPU copy, in the order in which they come up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.index import Block
    from kvstore.miss import MissReason

__all__ = ["Ascent", "AscentQueue", "GpuWaiter"]

# 1 use, 2-3, 4-7, 8-15, and more: twice as often goes first, within that the order of asking.
_LEVELS: Final = 5


class GpuWaiter(Protocol):
    """Who waits for GPU copies. Called on the event loop; must not block or raise."""

    def arrived(self, block: Block) -> None:
        """The block has a GPU copy now."""

    def failed(self, block: Block, reason: MissReason) -> None:
        """It is not getting one."""


@dataclass(eq=False, slots=True)
class Ascent:
    """One block's way up.

    Attributes:
        block: the block.
        waiters: who wants it there; none when it comes up because it was used.
        held: whether its host copy is held: somebody waits, or it is under way.
        moving: whether it is under way.
        level: place in the queue; see `AscentQueue`.
        traceparents: of those who want it there and trace that.
    """

    block: Block
    waiters: list[GpuWaiter] = field(default_factory=list)
    held: bool = False
    moving: bool = False
    level: int = 0
    traceparents: tuple[str, ...] = ()


class AscentQueue:
    """Ascents that have not begun.

    Attributes:
        bytes: of all of them.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._levels: list[OrderedDict[Block, Ascent]] = [OrderedDict() for _ in range(_LEVELS)]
        self.bytes = 0

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return any(self._levels)

    def __contains__(self, block: Block) -> bool:
        """Return whether a block is queued."""
        return any(block in level for level in self._levels)

    def add(self, ascent: Ascent, uses: int = 1) -> None:
        """Queue an ascent; `uses` is how often its block was used lately."""
        ascent.level = min(max(uses, 1).bit_length(), _LEVELS) - 1
        self._levels[ascent.level][ascent.block] = ascent
        self.bytes += ascent.block.space.shape.block_bytes

    def remove(self, ascent: Ascent) -> bool:
        """Take an ascent out; False when it is not here."""
        if self._levels[ascent.level].get(ascent.block) is not ascent:
            return False
        del self._levels[ascent.level][ascent.block]
        self.bytes -= ascent.block.space.shape.block_bytes
        return True

    def first(self) -> Ascent | None:
        """Return the one that is to come next."""
        return next(self._heads(reversed(self._levels)), None)

    def least(self) -> Ascent | None:
        """Return the one that is least worth it: used least often, and first of these."""
        return next(self._heads(iter(self._levels)), None)

    @staticmethod
    def _heads(levels: Iterator[OrderedDict[Block, Ascent]]) -> Iterator[Ascent]:
        for level in levels:
            if level:
                yield next(iter(level.values()))
