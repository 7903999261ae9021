"""Which part of a tier leaves next when the tier gets smaller."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvstore.space import BlockShape

__all__ = ["Part", "next_to_leave"]


@dataclass(frozen=True, slots=True)
class Part:
    """A slab group or a segment in service.

    Attributes:
        number: its number.
        shape: of its blocks.
        slots: how many it has.
        used: how many of them are taken.
        held: taken slots that cannot be emptied now: granted, leased, in transfer.
    """

    number: int
    shape: BlockShape
    slots: int
    used: int
    held: int


def next_to_leave(
    parts: Iterable[Part],
    leaving: Mapping[BlockShape, int],
    coldest: Callable[[BlockShape], float],
) -> Part | None:
    """Return the part whose leaving costs least.

    First one whose blocks all find room in the others of its shape; else one of the shape whose
    coldest block was used longest ago: the coldest blocks of that shape make the room. Of these,
    one of which little is held, then one of which little is to be moved.

    Args:
        parts: those in service.
        leaving: per shape, blocks in parts that leave already: they need room in the others, too.
        coldest: returns the sequence number of a shape's coldest block.
    """
    slots: Counter[BlockShape] = Counter()
    used: Counter[BlockShape] = Counter(leaving)
    listed = list(parts)
    for part in listed:
        slots[part.shape] += part.slots
        used[part.shape] += part.used

    def cost(part: Part) -> tuple[bool, float, int, int]:
        loses = used[part.shape] > slots[part.shape] - part.slots
        return loses, coldest(part.shape) if loses else 0.0, part.held, part.used

    return min(listed, key=cost, default=None)
