"""An open space of the synchronous client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from kvstore.attach import Grant, Lease
from kvstore.errors import InvalidRequest
from kvstore.flows import Asked, Evicted, Hit, SpaceFlows
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.proto import kvstore_pb2 as pb
from kvstore.rows import Blocks, Rows
from kvstore.space import SpaceSpec
from kvstore.steps import drive

if TYPE_CHECKING:
    from kvstore.client import Client

__all__ = ["Space", "Ticket", "with_parent"]


def with_parent(keys: Keys, parent: bytes | None) -> Keys:
    """Return keys that name `parent` as the key before the first one.

    Raises:
        InvalidRequest: the keys know another parent, or its length is wrong.
    """
    if parent is None:
        return keys
    if keys.parent not in (None, parent):
        raise InvalidRequest("parent", "the keys remember another one")
    return Keys(keys.packed, keys.key_bytes, bytes(parent))


class Ticket:
    """A prefetch that was asked for."""

    def __init__(self, space: Space, asked: Asked) -> None:
        """Made by `Space.prefetch`."""
        self._space = space
        self._asked = asked

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the blocks are there or nothing more is under way.

        Args:
            timeout_s: at most so long; None: until the prefetch's own deadline (a minute, when it
                has none).

        Returns:
            The leading run that is in the tier, or in a faster one, by then.
        """
        if timeout_s is None:
            timeout_s = 60.0 if self._asked.deadline is None else self._asked.deadline.left
        flow = self._space.flows.prefetched(self._asked, timeout_s)
        blocks: int = self._space._run(flow)
        return blocks

    def cancel(self) -> None:
        """Forget it; moves that nobody else waits for are dropped if they have not begun."""
        self._space._run(self._space.flows.cancel(self._asked))


class Space(SpaceHandle):
    """An open space, bound to one epoch. Every method may be called from any thread.

    Any call may raise `StaleEpoch` (the epoch is over, this handle never serves again),
    `ServerUnavailable`, `DeadlineExceeded` or `ClientClosed`.
    """

    def __init__(self, client: Client, spec: SpaceSpec, opened: pb.OpenSpaceResponse) -> None:
        """Made by `Client.open_space`."""
        super().__init__(spec, opened)
        self._client = client
        self.flows = SpaceFlows(self, client.attachment, client.timeout_s)

    def _run(self, flow: Any) -> Any:
        return drive(self._client.link, flow)

    def put(
        self,
        keys: Keys | Iterable[bytes],
        blocks: Blocks,
        timeout_s: float = 5.0,
        parent: bytes | None = None,
    ) -> int:
        """Store blocks, skipping those that are present.

        Args:
            keys: n keys in chain order.
            blocks: their bytes: uint8, shape (n, block_bytes), rows contiguous; or n bytes
                objects. A block's bytes are its shards, one after the other.
            timeout_s: how long to wait for room.
            parent: the key before the first one, for the continuation of a chain; slices of
                `Keys` remember it.

        Returns:
            The leading run of `keys` present afterwards: fewer than n when there is no room, or
            when the parent is not present.

        Raises:
            InvalidRequest: an argument does not fit; nothing was stored.
        """
        run = with_parent(self.keys(keys), parent)
        rows = Rows.of("blocks", blocks, len(run), self.spec.block_bytes, write=False)
        stored: int = self._run(self.flows.put(run, rows, timeout_s))
        return stored

    def lookup(self, keys: Keys | Iterable[bytes]) -> Hit:
        """Return how long a leading run is present, in which tiers, and why it ends.

        Touches nothing: not even the order of eviction.
        """
        hit: Hit = self._run(self.flows.lookup(self.keys(keys)))
        return hit

    @overload
    def get(
        self, keys: Keys | Iterable[bytes], out: None = None, timeout_s: float | None = None
    ) -> NDArray[np.uint8]: ...
    @overload
    def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8],
        timeout_s: float | None = None,
    ) -> int: ...
    def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8] | None = None,
        timeout_s: float | None = None,
    ) -> int | NDArray[np.uint8]:
        """Read the longest leading run whose blocks were there throughout.

        Args:
            keys: n keys in chain order.
            out: uint8, shape (at least n, block_bytes), rows contiguous. Rows after the run may
                have been written to.
            timeout_s: how long to wait for blocks on slower tiers; None: the client's.

        Returns:
            The length of the run; without `out` the bytes of the run, shape (run, block_bytes).

        Raises:
            InvalidRequest: an argument does not fit.
        """
        run = self.keys(keys)
        target = out
        if target is None:
            target = np.empty((len(run), self.spec.block_bytes), np.uint8)
        rows = Rows.of("out", target, len(run), self.spec.block_bytes, write=True)
        limit = self._client.timeout_s if timeout_s is None else timeout_s
        blocks: int = self._run(self.flows.get(run, rows, limit))
        return blocks if out is not None else target[:blocks]

    def prefetch(
        self,
        keys: Keys | Iterable[bytes],
        tier: str = "host",
        deadline_s: float | None = 0.5,
        priority: int = 0,
    ) -> Ticket:
        """Ask for a leading run to be moved up to a tier. Does not wait for it.

        Args:
            keys: in chain order.
            tier: ``host`` or ``gpu``.
            deadline_s: after which it is dropped; None: never.
            priority: higher first.
        """
        flow = self.flows.prefetch(self.keys(keys), tier, deadline_s, priority)
        return Ticket(self, self._run(flow))

    def pin(self, keys: Keys | Iterable[bytes], ttl_s: float | None = None, owner: str = "") -> int:
        """Keep a leading run present for `ttl_s` seconds, or until unpinned; return its length.

        Args:
            keys: in chain order.
            ttl_s: with an owner it must be given.
            owner: whose pins these are (a session, an agent): pinning again moves their expiry,
                `Client.unpin_owner` takes all of them away.
        """
        blocks: int = self._run(self.flows.pin(self.keys(keys), ttl_s, owner))
        return blocks

    def unpin(self, keys: Keys | Iterable[bytes] | None = None, owner: str = "") -> int:
        """Unpin keys, or the whole space; return how many blocks were unpinned.

        Args:
            keys: which; None: the whole space.
            owner: only its pins; empty: everybody's.
        """
        named = None if keys is None else self.keys(keys)
        blocks: int = self._run(self.flows.unpin(named, owner))
        return blocks

    def set_quotas(self, **sizes: float | None) -> pb.SetLimitsResponse:
        """Limit what the space takes in tiers, at the cost of its own coldest blocks; durable.

        Args:
            sizes: bytes by tier (`gpu`, `host`, `disk`); None: as the daemon's default says;
                `math.inf`: no limit, whatever it says. Tiers that are not named stay as they are.
        """
        limits: pb.SetLimitsResponse = self._run(self.flows.set_quotas(sizes))
        return limits

    def set_ttl(self, ttl_s: float | None) -> pb.SetLimitsResponse:
        """Have blocks leave every tier that nobody used for `ttl_s` seconds; durable.

        None: as the daemon's default says; `math.inf`: none leave, whatever it says.
        """
        limits: pb.SetLimitsResponse = self._run(self.flows.set_ttl(ttl_s))
        return limits

    def evict(self, keys: Keys | Iterable[bytes] | None = None, tier: str | None = None) -> Evicted:
        """Remove copies of keys, or of the whole space, from one tier or from all."""
        named = None if keys is None else self.keys(keys)
        evicted: Evicted = self._run(self.flows.evict(named, tier))
        return evicted

    def bump_epoch(self) -> Space:
        """Make every block of the space unreachable, for ever, because its weights changed.

        Returns:
            A handle for the next epoch; this one, and all others, are stale.
        """
        self._run(self.flows.bump_epoch())
        return self._client.open_space(self.spec)

    def explain(self, keys: Keys | Iterable[bytes]) -> pb.ExplainResponse:
        """Ask the daemon why a leading run ends where it ends; the first 32,768 keys are looked at."""
        answer: pb.ExplainResponse = self._run(self.flows.explain(self.keys(keys)))
        return answer

    def acquire(
        self,
        keys: Keys | Iterable[bytes],
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float | None = 0.0,
        priority: int = 0,
        request_id: str = "",
        queued_s: float = 0.0,
    ) -> Future[Lease]:
        """Ask for a lease without waiting; see `Attachment.acquire`."""
        return self._client.attachment.acquire(
            self,
            self.keys(keys),
            deadline_s=deadline_s,
            prefill_tokens_per_second=prefill_tokens_per_second,
            priority=priority,
            request_id=request_id,
            queued_s=queued_s,
        )

    def reserve(
        self,
        count: int,
        *,
        writers: Sequence[int] = (),
        deadline_s: float = 0.0,
        protect: Keys | Sequence[bytes] | None = None,
    ) -> Future[Grant]:
        """Ask for empty slots without waiting; see `Attachment.reserve`."""
        return self._client.attachment.reserve(
            self, count, writers=writers, deadline_s=deadline_s, protect=protect
        )
