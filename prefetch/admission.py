"""Which blocks of a batch the quotas of their spaces let into memory, and at whose cost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.index.limits import NO_QUOTA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.index import Block, SpaceIndex
    from kvstore.prefetch.move import Move

__all__ = ["GUESS_PRIORITY", "admitted", "at_whose_cost", "loses_nothing"]

# Of what nobody has asked for: no block is lost for it.
GUESS_PRIORITY: Final = -(1 << 29)


def admitted(blocks: Sequence[Block], admit: Callable[[SpaceIndex, int], int]) -> Sequence[bool]:
    """Return for each block whether it may come; of a space, the first ones.

    Args:
        blocks: of any spaces.
        admit: returns how many more blocks of a space may come now.
    """
    wanted = Counter(block.space for block in blocks if block.space.host_quota < NO_QUOTA)
    left = {space: admit(space, count) for space, count in wanted.items()}
    fits = []
    for block in blocks:
        room = left.get(block.space)
        fits.append(room is None or room > 0)
        if room:
            left[block.space] = room - 1
    return fits


def at_whose_cost(batch: Sequence[Move]) -> int | None:
    """Return the sequence number below which blocks may leave for a batch; None: any may."""
    if any(job.waiter.holding for move in batch for job in move.jobs):
        return None
    return max(move.block.sequence for move in batch)


def loses_nothing(batch: Sequence[Move]) -> bool:
    """Return whether nobody but guesses wants a batch."""
    return all(job.priority <= GUESS_PRIORITY for move in batch for job in move.jobs)
