"""Which stores still read which engine blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.cuda.flight import Flight

__all__ = ["Readers"]


class Readers:
    """Stores that are on their way, by number. The engine's thread adds, finds and orders."""

    def __init__(self, blocks: int) -> None:
        """Start with none.

        Args:
            blocks: engine blocks in the cache.
        """
        self._guard = threading.Lock()
        # The last store that reads a block, by number.
        self._last = np.zeros(blocks, np.int64)
        self._number = 0
        self._flights: dict[int, Flight] = {}

    def add(self, blocks: NDArray[np.int32], flight: Flight) -> int:
        """Take in a store; return its number, which is not 0."""
        self._number += 1
        with self._guard:
            last = self._last[blocks]
            # Blocks that are stored twice at a time (the daemon restarted) have two readers. As a
            # rule nobody on the way reads any, which the oldest of them tells.
            if len(last) and last.max() >= next(iter(self._flights), self._number):
                others = set(self._flights).intersection(last.tolist())
                flight.before = others.union(*(self._flights[one].before for one in others))
            self._flights[self._number] = flight
        self._last[blocks] = self._number
        return self._number

    def remove(self, number: int) -> None:
        """Forget a store if it is one: from here on nobody waits for its events any more."""
        with self._guard:
            self._flights.pop(number, None)

    def find(self, blocks: NDArray[np.int32] | None) -> dict[int, Flight]:
        """Return the stores that read some blocks, or any, in their order."""
        with self._guard:
            if not self._flights:
                return {}
            found = set(self._flights)
            if blocks is not None:
                found &= set(np.unique(self._last[blocks]).tolist())
                found.update(*(self._flights[number].before for number in found))
                found.intersection_update(self._flights)
            return {number: self._flights[number] for number in sorted(found)}

    def order(self, found: dict[int, Flight], wait: Callable[[int], None]) -> None:
        """Have something wait for those that are on their way still.

        Args:
            found: stores. What is not submitted reads nothing, and nothing reads what has failed
                and was waited for.
            wait: waits for an event, on the GPU.
        """
        with self._guard:
            for number, flight in found.items():
                if number in self._flights and flight.submitted.is_set() and not flight.failed:
                    wait(flight.read)
