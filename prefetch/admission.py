"""Which blocks of a batch the quotas of their spaces let into memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.index.limits import NO_QUOTA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.index import Block, SpaceIndex

__all__ = ["admitted"]


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
