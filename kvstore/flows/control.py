"""The flows that move no bytes through this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.attach import new_id
from kvstore.errors import InvalidRequest
from kvstore.flows.base import Deadline, milliseconds, parts
from kvstore.flows.reading import Reading
from kvstore.flows.writing import Writing
from kvstore.keys import Keys
from kvstore.proto import kvstore_pb2 as pb
from kvstore.steps import Flow
from kvstore.wire import MAX_KEYS, NO_LIMIT, TIERS, tier_value

__all__ = ["Asked", "Evicted", "SpaceFlows"]

# Most that one Prefetch call waits.
_WAIT_SECONDS: Final = 2.0
# Tickets in one CancelPrefetch.
_MOST_CANCELLED: Final = 4_096


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction did.

    Attributes:
        copies: removed.
        skipped: leased, pinned, in transfer, or above a block that stays.
    """

    copies: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A prefetch that was asked for.

    Attributes:
        parts: tickets, and the keys of each.
        tier: where to.
        priority: higher first.
        deadline: after which it is dropped; None: never.
    """

    parts: Sequence[tuple[int, Keys]]
    tier: str
    priority: int
    deadline: Deadline | None

    @property
    def deadline_ms(self) -> int:
        """What is left, as the daemon is told; zero would mean no deadline."""
        return 0 if self.deadline is None else max(1, milliseconds(self.deadline.left))


class SpaceFlows(Reading, Writing):
    """All flows of one open space."""

    def prefetch(
        self, keys: Keys, tier: str, deadline_s: float | None, priority: int
    ) -> Flow[Asked]:
        """Ask for a leading run to be moved up."""
        deadline = None if deadline_s is None else Deadline(deadline_s)
        asked = Asked([(new_id(), part) for part in parts(keys)], tier, priority, deadline)
        for ticket_id, part in asked.parts:
            yield from self._rpc("Prefetch", self._prefetch(asked, ticket_id, part, 0.0))
        return asked

    def _prefetch(
        self, asked: Asked, ticket_id: int, part: Keys, wait_s: float
    ) -> pb.PrefetchRequest:
        """Return the call that opens a ticket, or asks how it stands.

        The daemon may have forgotten a ticket that was done or late: whoever asks says all of it,
        so that what is opened again is what was asked for at first.
        """
        return pb.PrefetchRequest(
            space=self._space.ref,
            keys=part.packed,
            tier=tier_value(asked.tier),
            ticket_id=ticket_id,
            deadline_ms=asked.deadline_ms,
            priority=asked.priority,
            wait_ms=milliseconds(wait_s),
        )

    def prefetched(self, asked: Asked, timeout_s: float) -> Flow[int]:
        """Wait for a prefetch; return the leading run that has arrived."""
        deadline, blocks = Deadline(timeout_s), 0
        for ticket_id, part in asked.parts:
            while True:
                wait = min(deadline.left, _WAIT_SECONDS)
                request = self._prefetch(asked, ticket_id, part, wait)
                answer = yield from self._rpc("Prefetch", request, wait + self._timeout_s)
                if answer.done or not deadline.left:
                    break
            blocks += answer.blocks
            if answer.blocks < len(part):
                break
        return blocks

    def cancel(self, asked: Asked) -> Flow[None]:
        """Forget a prefetch."""
        ids = [ticket_id for ticket_id, _ in asked.parts]
        for at in range(0, len(ids), _MOST_CANCELLED):
            request = pb.CancelPrefetchRequest(ticket_ids=ids[at : at + _MOST_CANCELLED])
            yield from self._rpc("CancelPrefetch", request)

    def pin(self, keys: Keys, ttl_s: float | None, owner: str = "") -> Flow[int]:
        """Keep a leading run; return how long it is."""
        if owner and ttl_s is None:
            raise InvalidRequest("ttl_s", "a pin with an owner needs one: its owner may be gone")
        ttl_ms = 0 if ttl_s is None else _ttl_ms(ttl_s)
        blocks = 0
        for part in parts(keys):
            request = pb.PinRequest(
                space=self._space.ref, keys=part.packed, ttl_ms=ttl_ms, owner=owner
            )
            answer = yield from self._rpc("Pin", request)
            blocks += answer.blocks
            if answer.blocks < len(part):
                break
        return blocks

    def unpin(self, keys: Keys | None, owner: str = "") -> Flow[int]:
        """Unpin keys, or with None the whole space; return how many blocks were unpinned."""
        blocks = 0
        for packed in _all_or(keys):
            request = pb.UnpinRequest(space=self._space.ref, keys=packed, owner=owner)
            blocks += (yield from self._rpc("Unpin", request)).blocks
        return blocks

    def set_quotas(self, sizes: Mapping[str, float | None]) -> Flow[pb.SetLimitsResponse]:
        """Set the quotas of tiers, or with None clear them, all or none."""
        changes: dict[str, int | None] = {}
        for tier, size in sizes.items():
            if tier not in TIERS:
                raise InvalidRequest("tier", f"{tier!r} is not one of {', '.join(TIERS)}")
            if size is None or size == math.inf:
                changes[f"{tier}_bytes"] = None if size is None else NO_LIMIT
            elif 0 <= size < NO_LIMIT and size == int(size):
                changes[f"{tier}_bytes"] = int(size)
            else:
                raise InvalidRequest(tier, f"{size} is no size in bytes")
        return self._limit(changes)

    def set_ttl(self, ttl_s: float | None) -> Flow[pb.SetLimitsResponse]:
        """Set how long what nobody uses stays, or with None clear it."""
        if ttl_s == math.inf:
            return self._limit({"ttl_ms": NO_LIMIT})
        return self._limit({"ttl_ms": None if ttl_s is None else _ttl_ms(ttl_s)})

    def _limit(self, changes: Mapping[str, int | None]) -> Flow[pb.SetLimitsResponse]:
        request = pb.SetLimitsRequest(space_id=self._space.ref.id)
        for name, value in changes.items():
            if value is None:
                request.clear.append(name)
            else:
                setattr(request.limits, name, value)
        answer: pb.SetLimitsResponse = yield from self._rpc("SetLimits", request)
        return answer

    def evict(self, keys: Keys | None, tier: str | None) -> Flow[Evicted]:
        """Remove copies of keys, or with None of the whole space."""
        copies = skipped = 0
        for packed in _all_or(keys):
            request = pb.EvictRequest(space=self._space.ref, keys=packed, tier=tier_value(tier))
            answer = yield from self._rpc("Evict", request)
            copies += answer.copies
            skipped += answer.skipped
        return Evicted(copies, skipped)

    def bump_epoch(self) -> Flow[int]:
        """End the epoch; return the next one. This handle is stale afterwards."""
        request = pb.BumpEpochRequest(space=self._space.ref)
        answer = yield from self._rpc("BumpEpoch", request)
        epoch: int = answer.space.epoch
        self._space.retire(f"epoch {self._space.ref.epoch} was ended by this handle")
        return epoch

    def explain(self, keys: Keys) -> Flow[pb.ExplainResponse]:
        """Ask why a leading run ends where it ends; looks at the first 32,768 keys."""
        request = pb.ExplainRequest(
            space=self._space.ref,
            keys=keys.packed[: MAX_KEYS * keys.key_bytes],
        )
        answer: pb.ExplainResponse = yield from self._rpc("Explain", request)
        return answer


def _ttl_ms(ttl_s: float) -> int:
    """Return a time to live in whole milliseconds.

    Raises:
        InvalidRequest: it is not above 0, or longer than can be said.
    """
    if not 0 < ttl_s < 1e15:
        raise InvalidRequest("ttl_s", f"must be above 0 and below 1e15 seconds, not {ttl_s}")
    return max(1, round(ttl_s * 1e3))


def _all_or(keys: Keys | None) -> Iterable[bytes]:
    """Return the key fields that a call over `keys` needs; None is everything.

    An empty run is nothing, although an empty field would mean everything. Tails come first: a
    block is only removed when no child of it stays.
    """
    return [b""] if keys is None else [part.packed for part in reversed(parts(keys))]
