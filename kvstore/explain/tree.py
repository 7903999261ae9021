"""Prefix trees of texts, without building them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["common_prefix", "tree_size"]

_STEP: Final = 256


def common_prefix(one: str, other: str, start: int = 0) -> int:
    """Return the length of the longest common prefix; `start` characters are known to be equal."""
    end = min(len(one), len(other))
    step = _STEP
    while start < end:
        stop = min(start + step, end)
        if one[start:stop] == other[start:stop]:
            start = stop
            step *= 2
            continue
        # It differs in here: halve until one character is left.
        while stop - start > 1:
            middle = (start + stop) // 2
            if one[start:middle] == other[start:middle]:
                start = middle
            else:
                stop = middle
        return start
    return end


def tree_size(texts: Iterable[str]) -> int:
    """Return the number of characters that are left when every prefix counts once."""
    size = 0
    before = ""
    for text in sorted(texts):
        size += len(text) - common_prefix(before, text)
        before = text
    return size
