"""A tier around another one, for wrappers that change one thing about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Slot, Tier, TierUsage, Transfer

__all__ = ["TierWrapper"]


class TierWrapper(Tier):
    """Passes everything on. What `Tier` does not name (`want`, `adopt`, `on_room`, …) too.

    Attributes:
        inner: the wrapped tier.
        own: names that subclasses keep to themselves; all others are set on the wrapped tier.
    """

    own: ClassVar[frozenset[str]] = frozenset({"inner", "name", "capabilities", "own"})
    inner: Tier

    def __init__(self, inner: Tier) -> None:
        """Wrap an open or unopened tier."""
        self.inner = inner
        # Real attributes: `Tier` only declares them.
        self.name = inner.name
        self.capabilities = inner.capabilities

    def __getattr__(self, name: str) -> Any:
        """Find what the wrapper lacks in the wrapped tier."""
        if name in self.own:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set the wrapped tier's attributes (callbacks) there."""
        if name in self.own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    async def open(self) -> None:
        """Open the wrapped tier."""
        await self.inner.open()

    async def close(self) -> None:
        """Close the wrapped tier."""
        await self.inner.close()

    def usage(self) -> TierUsage:
        """Return the wrapped tier's bytes."""
        return self.inner.usage()

    def free_blocks(self, shape: BlockShape) -> int:
        """Return the wrapped tier's free blocks."""
        return self.inner.free_blocks(shape)

    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Allocate in the wrapped tier."""
        return self.inner.allocate(shape, count)

    def free(self, slots: Sequence[Slot]) -> None:
        """Free in the wrapped tier."""
        self.inner.free(slots)

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read from the wrapped tier."""
        return await self.inner.read(transfers)

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write to the wrapped tier."""
        return await self.inner.write(transfers)

    async def sync(self) -> None:
        """Sync the wrapped tier."""
        await self.inner.sync()
