"""What every flow of a space needs: calls that reopen it, time, windows and copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.attach import Attachment
from kvstore.errors import StaleEpoch, UnknownSpace
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.memory import copy_batch
from kvstore.miss import Miss
from kvstore.proto import kvstore_pb2 as pb
from kvstore.steps import Flow, Rpc, Work
from kvstore.syncpoint import armed, reach
from kvstore.units import MIB
from kvstore.wire import (
    MAX_KEYS,
    PROTOCOL_VERSION,
    miss_from_message,
    pack_run_parent,
    tier_name,
)

__all__ = ["LATE_SECONDS", "Deadline", "FlowsBase", "Hit", "milliseconds", "parts", "pauses"]

# Bytes that one lease or grant covers: large enough that its calls cost nothing beside the copy,
# small enough that two of them leave room for others.
_WINDOW_BYTES: Final = 128 * MIB
# The daemon's word that time is up arrives after the time is up.
LATE_SECONDS: Final = 0.25
# Slowest stream that is not given up on.
_STREAM_BYTES_PER_SECOND: Final = 20e6


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found.

    Attributes:
        blocks: usable leading run.
        tiers: of each of its blocks, the fastest tier that holds it.
        miss: why the run ended.
    """

    blocks: int
    tiers: tuple[str, ...]
    miss: Miss


def milliseconds(seconds: float) -> int:
    """Return seconds as the wire's unsigned milliseconds."""
    return max(0, min(round(seconds * 1e3), 0xFFFFFFFF))


def parts(keys: Keys) -> list[Keys]:
    """Split a run so that each part fits one message."""
    return [keys[at : at + MAX_KEYS] for at in range(0, len(keys), MAX_KEYS)]


class Deadline:
    """A point in time on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        """Set it `seconds` from now."""
        self._begun = time.monotonic()
        self._end = self._begun + seconds

    @property
    def spent(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between tries, longer each time, up to 0.1."""
    pause = 0.002
    while True:
        yield pause
        pause = min(2 * pause, 0.1)


class FlowsBase:
    """What the flows of one open space share."""

    def __init__(self, space: SpaceHandle, attachment: Attachment, timeout_s: float) -> None:
        """Bind to a space.

        Args:
            space: the open space.
            attachment: of this process.
            timeout_s: for calls that do not wait on purpose.
        """
        self._space = space
        self._attachment = attachment
        self._timeout_s = timeout_s
        self._block_bytes = space.spec.block_bytes
        shard_bytes = np.array(space.spec.shard_bytes, np.uint64)
        self._shard_bytes = shard_bytes
        self._shard_offsets = np.cumsum(shard_bytes) - shard_bytes

    def _rpc(self, name: str, request: Any, timeout_s: float | None = None) -> Flow[Any]:
        """Make a call that names the space; open the space once if the daemon forgot it."""
        self._space.check()
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            try:
                return (yield Rpc(name, request, limit))
            except UnknownSpace:
                answer = yield Rpc("OpenSpace", self._space.reopen_request(), self._timeout_s)
                self._space.reopened(answer)
                return (yield Rpc(name, request, limit))
        except StaleEpoch as error:
            raise self._space.retire(str(error)) from error

    def lookup(self, keys: Keys) -> Flow[Hit]:
        """Ask how long a leading run is present, and where."""
        begun = time.perf_counter()
        blocks, tiers, miss = 0, b"", Miss()
        for part in parts(keys):
            request = pb.LookupRequest(
                space=self._space.ref, keys=part.packed, parent=pack_run_parent(part)
            )
            answer = yield from self._rpc("Lookup", request)
            blocks += answer.blocks
            tiers += answer.tiers
            miss = miss_from_message(answer.miss)
            if answer.blocks < len(part):
                break
        self._attachment.times.add("lookup", time.perf_counter() - begun)
        return Hit(blocks, tuple(tier_name(tier) for tier in tiers), miss)

    def _mapped(self, deadline: Deadline) -> Flow[bool]:
        """Return whether the pool can be used directly; waits while that is being found out."""
        if not self._attachment.alive:
            # Fails at once when no daemon is there, which the attachment finds out later.
            yield Rpc("Hello", pb.HelloRequest(protocol_version=PROTOCOL_VERSION), self._timeout_s)
            wait = min(deadline.left, self._timeout_s)
            yield Work(partial(self._attachment.wait_active, wait))
        return self._attachment.alive

    def _window(self) -> int:
        """Blocks per lease or grant."""
        cap = self._attachment.lease_cap_bytes // 2 or _WINDOW_BYTES
        return max(1, min(cap, _WINDOW_BYTES) // self._space.spec.shape.block_bytes)

    def _spread(self, rows: Any) -> Any:
        """Return the address of every shard of every row, shape (n, shards)."""
        return rows[:, None] + self._shard_offsets[None, :]

    def _copy(self, destinations: Any, sources: Any, halfway: str) -> None:
        """Copy blocks; addresses have shape (n, shards)."""
        lengths = np.broadcast_to(self._shard_bytes, destinations.shape)
        middle = len(destinations) // 2 if armed(halfway) else 0
        for part in (slice(0, middle), slice(middle, None)):
            if len(destinations[part]):
                copy_batch(destinations[part].ravel(), sources[part].ravel(), lengths[part].ravel())
            if part.start == 0:
                reach(halfway)

    def _stream_seconds(self, blocks: int, deadline: Deadline) -> float:
        size = blocks * self._block_bytes
        return deadline.left + self._timeout_s + size / _STREAM_BYTES_PER_SECOND
