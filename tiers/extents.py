"""The free parts of one range of memory: first fit, neighbours merged."""

from __future__ import annotations

import bisect

__all__ = ["Extents"]


class Extents:
    """Free extents of a range, as offsets. Few and large: every call is O(extents)."""

    def __init__(self, length: int) -> None:
        """All of it is free."""
        self._free: list[tuple[int, int]] = [(0, length)] if length else []

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        return max((length for _, length in self._free), default=0)

    @property
    def free_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(length for _, length in self._free)

    def take(self, length: int) -> int:
        """Take the first part that fits; return its offset.

        Raises:
            ValueError: none does; see `largest`.
        """
        for at, (offset, size) in enumerate(self._free):
            if size >= length:
                self._free[at : at + 1] = [(offset + length, size - length)] * (size > length)
                return offset
        raise ValueError(f"no {length} bytes are free in one piece")

    def give_back(self, offset: int, length: int) -> None:
        """Free what `take` returned."""
        at = bisect.bisect(self._free, (offset, length))
        begin, end = offset, offset + length
        first = last = at
        if at and sum(self._free[at - 1]) == begin:
            first = at - 1
            begin = self._free[first][0]
        if at < len(self._free) and self._free[at][0] == end:
            last = at + 1
            end = sum(self._free[at])
        self._free[first:last] = [(begin, end - begin)]
