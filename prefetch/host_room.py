"""What promotion needs of the memory that blocks come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.index import SpaceIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot

__all__ = ["HostRoom"]


class HostRoom(Protocol):
    """Slots of the memory tier, as the promoter takes them."""

    def take(self, shape: BlockShape, count: int, older_than: int | None) -> list[Slot]:
        """Take up to `count` slots now; evict only blocks of lower sequence, if that is given."""

    def admit(self, space: SpaceIndex, count: int, older_than: int | None) -> int:
        """Return how many more blocks a space's quota allows, making room among its own blocks."""

    def free(self, slot: Slot) -> None:
        """Give a slot back unused."""

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return the slot's memory, one buffer per shard."""

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed."""

    def may_come(self, shape: BlockShape, *, promoting: bool) -> bool:
        """Return whether waiting for room can help.

        `promoting`: what is held only by those who themselves wait for promotions does not count.
        """
