"""How long a client's operations take: kept for the program, and told to the daemon."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Final

from kvstore.buckets import Buckets
from kvstore.errors import InvalidRequest
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["OPERATIONS", "OperationTimes", "TimesLog"]

OPERATIONS: Final = ("lookup", "load", "store")


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Times of one operation since the client was made, in seconds.

    Attributes:
        operation: lookup, load or store.
        count: samples.
        total: sum.
        p50: half of the samples took no longer; as exact as the buckets: 1, 2, 5 a decade.
        p95: the same of 95 %.
        p99: the same of 99 %.
        longest: the longest.
        buckets: samples up to each of `kvstore.buckets.BUCKET_SECONDS` and above the one before;
            then the rest.
    """

    operation: str
    count: int
    total: float
    p50: float
    p95: float
    p99: float
    longest: float
    buckets: tuple[int, ...]


class TimesLog:
    """Histograms of a client. Any thread may add; the heartbeat takes what is new."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._guard = threading.Lock()
        # Those that were told, and those since: a sample is added once.
        self._told = {operation: Buckets() for operation in OPERATIONS}
        self._new = {operation: Buckets() for operation in OPERATIONS}

    def add(self, operation: str, seconds: float) -> None:
        """Add a sample.

        Raises:
            InvalidRequest: the operation is none of `OPERATIONS`, or that is no time.
        """
        if operation not in self._new:
            raise InvalidRequest("operation", f"{operation} is not one of {', '.join(OPERATIONS)}")
        if not 0 <= seconds < math.inf:
            raise InvalidRequest("seconds", f"{seconds} is no time")
        with self._guard:
            self._new[operation].add(seconds)

    def take(self) -> list[pb.OperationTimes]:
        """Return what was added since the last call."""
        messages = []
        with self._guard:
            for name, new in self._new.items():
                if new.longest or any(new.counts):
                    self._told[name].merge(new.counts, new.total, new.longest)
                    self._new[name] = Buckets()
                    messages.append(
                        pb.OperationTimes(
                            operation=name,
                            buckets=new.counts,
                            total_seconds=new.total,
                            longest_seconds=new.longest,
                        )
                    )
        return messages

    def seen(self) -> dict[str, OperationTimes]:
        """Return everything since the client was made, by operation; none that did not happen."""
        found = {}
        for name in OPERATIONS:
            every = Buckets()
            with self._guard:
                for part in (self._told[name], self._new[name]):
                    every.merge(part.counts, part.total, part.longest)
            if every.count:
                found[name] = OperationTimes(
                    operation=name,
                    count=every.count,
                    total=every.total,
                    p50=every.quantile(0.5),
                    p95=every.quantile(0.95),
                    p99=every.quantile(0.99),
                    longest=every.longest,
                    buckets=tuple(every.counts),
                )
        return found
