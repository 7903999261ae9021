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

    def take(
        self, shape: BlockShape, count: int, older_than: int | None, *, lossless: bool
    ) -> list[Slot]:
        """Take up to `count` slots now.

        Args:
            shape: of the blocks to come.
            count: how many.
            older_than: evict only blocks of a lower sequence number, if that is given.
            lossless: evict no last copies.
        """

    def admit(
        self, space: SpaceIndex, count: int, older_than: int | None, *, lossless: bool
    ) -> int:
        """Return how many more blocks a space's quota allows, making room among its own blocks.

        `older_than` and `lossless` are those of `take`.
        """

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
