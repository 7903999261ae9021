"""An engine as far as kvstore sees one: a KV cache, a copier, a space; and its moves, timed.

Slots are granted and leased by a real daemon, and copied by the connector's own copier: that the
bench reaches into the connector is its purpose. What is timed:

- *copy*: from handing blocks to the copier until its callback, slots granted or leased before, right
  after the same copy, as plain copies are timed too: what is measured is the copier, not a processor
  that wakes up;
- *call*: the first copy, after a pause, with what comes before and after: Reserve and Commit, or
  Acquire.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.bench.gpu_cache import FakeCache
from kvstore.cli.bench.gpu_machine import Machine
from kvstore.cli.bench.gpu_plan import Case
from kvstore.cli.child import ChildError
from kvstore.client import Client
from kvstore.connectors.vllm.copier import Copier, SlotRun
from kvstore.connectors.vllm.geometry import Geometry, describe
from kvstore.keys import Keys, chain_keys
from kvstore.outcomes import CommitOutcome
from kvstore.space import SpaceSpec

__all__ = ["Copier", "CopierOf", "FakeEngine", "Seconds"]

CopierOf = Callable[[Geometry, Any, int, Any], Copier]

_WAIT_S: Final = 60.0
_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long a move took: its copy alone, and with the calls around it."""

    copy: float
    call: float


class _Done:
    """Waits for one callback of a copier."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def stored(self, right: bool) -> None:
        self._said.put(right)

    def loaded(self, right: NDArray[np.bool_]) -> None:
        self.stored(bool(right.all()))

    def wait(self, what: str) -> None:
        try:
            right = self._said.get(timeout=_WAIT_S)
        except queue.Empty:
            raise ChildError(f"a {what} did not end within {_WAIT_S:.0f} s") from None
        if not right:
            raise ChildError(f"a {what} failed")


class FakeEngine:
    """Stores from and loads into a KV cache.

    Attributes:
        cache: the KV cache.
        case: what is measured.
        space: where its blocks are stored.
    """

    def __init__(self, client: Client, machine: Machine, case: Case, copier_of: CopierOf) -> None:
        """Allocate the KV cache and open a space.

        Args:
            client: attached; its attachment maps the slots.
            machine: where the KV cache lies.
            case: its layout and sizes.
            copier_of: makes a copier of (geometry, attachment, engine blocks per slot, one of the
                cache's tensors).
        """
        self.case = case
        self.cache = FakeCache(machine, case)
        self._machine = machine
        self._attachment = client.attachment
        if not self._attachment.wait_active(_WAIT_S):
            raise ChildError(f"the bench could not attach within {_WAIT_S:.0f} s")
        geometry = describe(self.cache.tensors, self.cache.engine_blocks)
        self._copier = copier_of(
            geometry,
            client.attachment,
            case.group_blocks,
            next(iter(self.cache.tensors.values())),
        )
        self.space = client.open_space(
            SpaceSpec(
                model=f"bench-gpu-{case.layout}-{case.shard_bytes}",
                dtype="bfloat16",
                block_tokens=_TOKENS * case.group_blocks,
                shard_bytes=(case.shard_bytes,),
                layout=geometry.layout,
            )
        )
        self._chains = 0

    def close(self) -> None:
        """Stop the copier."""
        self._copier.close()

    def new_keys(self) -> Keys:
        """Return the keys of a chain that was never stored."""
        self._chains += 1
        tokens = self.case.blocks * self.space.spec.block_tokens
        return chain_keys(np.full(tokens, self._chains, np.uint32), self.space.spec.block_tokens)

    def _reserve(self, count: int) -> list[Any]:
        """Reserve slots, by several grants while the pool still grows.

        Raises:
            ChildError: there are too few.
        """
        grants: list[Any] = []
        deadline = time.monotonic() + _WAIT_S
        while left := count - sum(len(grant.slots) for grant in grants):
            grants.append(self.space.reserve(left, deadline_s=_WAIT_S).result(timeout=2 * _WAIT_S))
            if time.monotonic() > deadline:
                self._abort(grants)
                raise ChildError(f"only {count - left} of {count} slots were granted")
        return grants

    def _abort(self, grants: Sequence[Any]) -> None:
        for grant in grants:
            self._attachment.abort(grant.owner_id, grant.id, all_shards=True)

    def _commit(self, grants: Sequence[Any], keys: Keys) -> None:
        size, at = keys.key_bytes, 0
        parents = bytes(size) + keys.packed[:-size]
        for grant in grants:
            end = at + len(grant.slots)
            outcomes = self._attachment.commit(
                self.space,
                grant.owner_id,
                grant.id,
                0,
                grant.slots,
                keys[at:end],
                parents[at * size : end * size],
            ).result(timeout=_WAIT_S)
            if any(outcome != CommitOutcome.COMMITTED for outcome in outcomes):
                raise ChildError("not every stored block was committed")
            at = end

    @staticmethod
    def _slots(grants: Sequence[Any]) -> SlotRun:
        slots = np.concatenate([grant.slots for grant in grants])
        return SlotRun(slots, grants[0].boot_id, grants[0].owner_id)

    def store(self, keys: Keys) -> Seconds:
        """Store the KV cache's sources under new keys."""
        began = time.perf_counter()
        grants = self._reserve(len(keys))
        run = self._slots(grants)
        self._store(run)
        call = time.perf_counter() - began
        # Or nobody would see whether the next ones copy anything.
        self.cache.refresh()
        self._store(run)
        copy = self._store(run)
        began = time.perf_counter()
        self._commit(grants, keys)
        return Seconds(copy, call + time.perf_counter() - began)

    def _store(self, run: SlotRun) -> float:
        begin, done = time.perf_counter(), _Done()
        self._copier.store(self.cache.sources, run, done.stored)
        done.wait("store")
        return time.perf_counter() - begin

    def _load(self, run: SlotRun) -> float:
        begin, done = time.perf_counter(), _Done()
        self._copier.load(self.cache.targets, run, 0, done.loaded)
        done.wait("load")
        return time.perf_counter() - begin

    def load(self, keys: Keys, tier: int | None = None) -> Seconds:
        """Load blocks that are in memory into the KV cache's targets.

        Args:
            keys: of all blocks of the case.
            tier: the wire's number of the tier they must all be in; None: any.
        """
        began = time.perf_counter()
        lease = self.space.acquire(keys).result(timeout=_WAIT_S)
        try:
            if lease.blocks != len(keys):
                raise ChildError(f"only {lease.blocks} of {len(keys)} blocks were leased")
            if tier is not None and set(lease.tiers) != {tier}:
                raise ChildError(f"blocks are in tiers {set(lease.tiers)}, not {tier}")
            run = SlotRun(lease.slots, lease.boot_id)
            self._load(run)
            call = time.perf_counter() - began
            self.check("load")
            self._load(run)
            return Seconds(self._load(run), call)
        finally:
            lease.release()

    def load_growing(self, keys: Keys) -> Seconds:
        """Load blocks that are on disk: each part is copied on as soon as it is in memory."""
        group = self.case.group_blocks
        began = time.perf_counter()
        lease = self.space.acquire(keys, deadline_s=_WAIT_S).result(timeout=_WAIT_S)
        copies: list[_Done] = []
        at = 0
        try:
            while True:
                growing, blocks, slots = lease.growing, lease.blocks, lease.slots
                if blocks > at:
                    copies.append(_Done())
                    self._copier.load(
                        self.cache.targets[at * group : blocks * group],
                        SlotRun(slots[at:blocks], lease.boot_id),
                        0,
                        copies[-1].loaded,
                    )
                    at = blocks
                elif not growing:
                    break
                else:
                    lease.wait(_WAIT_S, beyond=at)
            if at != len(keys):
                raise ChildError(f"only {at} of {len(keys)} blocks came from disk: {lease.miss}")
            for copy in copies:
                copy.wait("load")
        finally:
            lease.release()
        seconds = time.perf_counter() - began
        return Seconds(seconds, seconds)

    def both(self, stored: Keys, loaded: Keys) -> float:
        """Store one chain while another is loaded; return how long the copies of both took."""
        lease = self.space.acquire(loaded).result(timeout=_WAIT_S)
        grants = self._reserve(len(stored))
        try:
            if lease.blocks != len(loaded):
                raise ChildError(f"only {lease.blocks} of {len(loaded)} blocks were leased")
            out, into = self._slots(grants), SlotRun(lease.slots, lease.boot_id)
            self._both(out, into)
            self.check("load beside a store")
            self._both(out, into)
            return self._both(out, into)
        finally:
            lease.release()
            self._abort(grants)

    def _both(self, out: SlotRun, into: SlotRun) -> float:
        begin, store, load = time.perf_counter(), _Done(), _Done()
        self._copier.load(self.cache.targets, into, 0, load.loaded)
        self._copier.store(self.cache.sources, out, store.stored)
        load.wait("load")
        store.wait("store")
        return time.perf_counter() - begin

    def held(self, keys: Keys, question: Callable[[Any], bool]) -> bool:
        """Ask something about the mapped slots of blocks in memory."""
        lease = self.space.acquire(keys).result(timeout=_WAIT_S)
        try:
            with self._attachment.using(lease.slots, boot_id=lease.boot_id) as held:
                return question(held)
        finally:
            lease.release()

    def check(self, what: str) -> None:
        """See whether the targets are the sources' bytes now, and poison them for the next time.

        Raises:
            ChildError: a byte differs.
        """
        wrong = self.cache.wrong_blocks()
        if wrong:
            raise ChildError(f"{what}: {wrong} engine blocks are not what was stored")
        self.cache.poison()
