"""What a client did with what it got, added up between heartbeats."""

from __future__ import annotations

import threading

from kvstore.errors import InvalidRequest
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["UsageLog"]

_FIELDS = frozenset(field.name for field in pb.Usage.DESCRIPTOR.fields if field.name != "space")


class UsageLog:
    """Deltas by space. Any thread may add; the heartbeat takes."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._guard = threading.Lock()
        self._pending: dict[bytes, pb.Usage] = {}

    def add(self, space: pb.SpaceRef, **amounts: int) -> None:
        """Add amounts, named as the fields of the wire's Usage.

        Raises:
            InvalidRequest: an amount is negative, or there is no such field.
        """
        for name, amount in amounts.items():
            if name not in _FIELDS:
                raise InvalidRequest(name, f"is not one of {', '.join(sorted(_FIELDS))}")
            if amount < 0:
                raise InvalidRequest(name, f"must not be negative, is {amount}")
        with self._guard:
            usage = self._pending.get(space.id)
            if usage is None:
                usage = self._pending[space.id] = pb.Usage(space=space)
            for name, amount in amounts.items():
                setattr(usage, name, getattr(usage, name) + int(amount))

    def take(self) -> list[pb.Usage]:
        """Return everything added since the last call."""
        with self._guard:
            taken = list(self._pending.values())
            self._pending.clear()
        return taken
