"""Which keys this engine is storing or has stored, so that nothing is copied twice.

A hint, not the truth: the daemon may have evicted a key since. That shows when the key is looked up
again, or when the commit of a child is refused; then it is forgotten here, and stored anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

__all__ = ["StoredKeys"]

_MOST_KEYS: Final = 1 << 16


class StoredKeys:
    """Keys on their way, and a bounded memory of those that arrived.

    Attributes:
        arrivals: how often a key has arrived.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._under_way: set[bytes] = set()
        # With how many had arrived until then.
        self._arrived: OrderedDict[bytes, int] = OrderedDict()
        self.arrivals = 0

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key needs no storing."""
        if key in self._arrived:
            self._arrived.move_to_end(key)
            return True
        return key in self._under_way

    def begin(self, key: bytes) -> None:
        """A store of the key has been handed to the workers."""
        self._under_way.add(key)

    def end(self, key: bytes, arrived: bool) -> None:
        """The store is over."""
        self._under_way.discard(key)
        if arrived:
            self.arrivals += 1
            self._arrived[key] = self.arrivals
            if len(self._arrived) > _MOST_KEYS:
                self._arrived.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are gone, or may be; storing one twice costs a copy, no more."""
        for key in keys:
            self._arrived.pop(key, None)
            self._under_way.discard(key)

    def gone(self, keys: Iterable[bytes], arrivals: int) -> None:
        """The daemon did not have these when it was asked.

        What is on its way is on its way all the same, and what has arrived since then is there.

        Args:
            keys: any.
            arrivals: when it was asked.
        """
        for key in keys:
            if self._arrived.get(key, arrivals + 1) <= arrivals:
                del self._arrived[key]

    def clear(self) -> None:
        """Forget everything."""
        self._under_way.clear()
        self._arrived.clear()
