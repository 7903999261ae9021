"""How fast prompts are computed, by how much is computed at once.

A step over few tokens says nothing about one over many: on a GPU both take about as long. So rates
are kept apart by size, in classes that double, and a size is answered from the class next to its
own. Standard library only: engines measure by it, the daemon remembers by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

__all__ = ["Rates"]

# A step is slow for many reasons, others in it and long contexts among them; it is fast for one. And
# whoever loads because computing looks slow does not find out that it is not.
_FASTER_WEIGHT: Final = 0.3
_SLOWER_WEIGHT: Final = 0.05
_CLASSES: Final = 32


def _class_of(tokens: int) -> int:
    return min(max(tokens, 1).bit_length(), _CLASSES) - 1


class Rates:
    """Moving averages of tokens per second, per size class, that follow fast steps sooner."""

    __slots__ = ("_means",)

    def __init__(self, means: Mapping[int, float] | None = None) -> None:
        """Know nothing, or what `means` once returned.

        Raises:
            ValueError: these are no rates.
        """
        self._means: dict[int, float] = dict(means or {})
        for size, rate in self._means.items():
            if not (0 <= size < _CLASSES and 0 < rate < math.inf):
                raise ValueError(f"class {size}: {rate} is no rate")

    def note(self, tokens: int, rate: float) -> None:
        """Take note that so many tokens were computed at a rate above 0."""
        size = _class_of(tokens)
        old = self._means.get(size, 0.0)
        weight = _FASTER_WEIGHT if rate > old else _SLOWER_WEIGHT
        self._means[size] = old + weight * (rate - old) if old else rate

    def rate(self, tokens: int, *, within: int = _CLASSES) -> float:
        """Return tokens per second when so many are computed at once; 0 when that is not known.

        Args:
            tokens: how many.
            within: how many classes away a measurement may be.
        """
        size = _class_of(tokens)
        # Of two as near the larger: what is computed faster than believed is waited for in vain.
        nearest = min(self._means, key=lambda one: (abs(one - size), -one), default=size)
        return self._means.get(nearest, 0.0) if abs(nearest - size) <= within else 0.0

    def means(self) -> dict[int, float]:
        """Return a copy of what is known: rate by class."""
        return dict(self._means)
