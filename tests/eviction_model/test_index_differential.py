"""The real index against the model: the same operations, the same residency, order and victims."""

from __future__ import annotations

from typing import Any

from eviction_machine import EvictionMachine
from eviction_rule import Model, parent_of
from hypothesis import settings
from hypothesis.stateful import invariant

from kvstore.index import (
    NEVER,
    Block,
    BlockIndex,
    EvictionQueue,
    Flush,
    Pressure,
    SpaceIndex,
    SpaceLimits,
    disk_evictable,
    gpu_evictable,
    host_evictable,
)
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot, TierName

SPEC = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,))


def named(key: str) -> bytes:
    return key.encode().ljust(16, b"\0")


class RealIndex:
    """The index with slots to count, and the queue to disk as the flusher keeps it."""

    def __init__(self, host_blocks: int, disk_blocks: int, policy: str, gpu_blocks: int) -> None:
        self.index = BlockIndex(self._free_host, self._free_disk)
        self.index.free_gpu = self._free_gpu
        self.free_gpus = [Slot(0, n) for n in range(gpu_blocks)]
        self.gpu_used: list[tuple[str, Block]] = []
        self.space = SpaceIndex(SPEC.fingerprint, SPEC, 1)
        self.index.spaces[self.space.id] = self.space
        self.space.open_own()
        self.disk_blocks, self.policy = disk_blocks, policy
        self.free_hosts = [Slot(0, n) for n in range(host_blocks)]
        self.free_disks = [Slot(0, n) for n in range(disk_blocks)]
        self.granted: list[Slot] = []
        self.pending: list[tuple[str, Slot]] = []
        self.queue: list[Block] = []
        # What uses or reads a block, by the model's name for it.
        self.used: list[tuple[str, Block]] = []
        self.read: list[tuple[str, Block]] = []

    def _free_host(self, slot: Slot) -> None:
        assert slot not in self.free_hosts
        self.free_hosts.append(slot)

    def _free_disk(self, block: Block, slot: Slot) -> None:
        assert slot not in self.free_disks
        self.free_disks.append(slot)

    def _free_gpu(self, slot: Slot) -> None:
        assert slot not in self.free_gpus
        self.free_gpus.append(slot)

    def block(self, key: str) -> Block:
        return self.space.blocks[named(key)]

    def own(self, tier: TierName) -> EvictionQueue:
        assert self.space.own is not None
        return self.space.own[tier]

    def limit(self, quotas: dict[str, int | None]) -> None:
        size = self.space.shape.block_bytes
        values = {f"{t}_bytes": None if n is None else n * size for t, n in quotas.items()}
        self.space.limit(SpaceLimits(**values), SpaceLimits())

    def leave_host(self, block: Block) -> None:
        to_disk = self.policy == "evict" and self.disk_blocks
        if to_disk and block.disk is None and block.flush is Flush.NONE:
            self.enqueue(block)
        else:
            self.index.drop_host(block)

    def make_room(self, wanted: int) -> None:
        queue = self.index.host_queue(self.space.shape)
        while len(self.free_hosts) < wanted and (block := queue.pop()) is not None:
            self.leave_host(block)

    def make_quota_room(self, wanted: int) -> int:
        space, queue = self.space, self.own(TierName.HOST)
        space.granted = len(self.granted) + len(self.pending)
        while space.host_room < wanted and (block := queue.pop()) is not None:
            self.leave_host(block)
        return max(0, min(wanted, space.host_room))

    def fit(self) -> None:
        while self.space.excess(TierName.HOST) > 0:
            block = self.own(TierName.HOST).peek()
            if block is None:
                break
            self.leave_host(block)
        while self.space.excess(TierName.DISK) > 0:
            block = self.own(TierName.DISK).peek()
            if block is None:
                break
            self.index.drop_disk(block, Pressure.QUOTA)

    def expire(self, sequence: int) -> None:
        for tier in TierName:
            drop = (self.index.drop_gpu, self.index.drop_host, self.index.drop_disk)[tier - 1]
            while (block := self.own(tier).peek()) is not None and block.sequence <= sequence:
                drop(block)

    def reserve(self, wanted: int, protect: list[str]) -> int:
        blocks = [self.space.blocks.get(named(key)) for key in protect]
        held = [b for b in blocks if b is not None and b.host is not None and b.disk is None]
        for block in held:
            self.index.hold_host(block)
        allowed = self.make_quota_room(wanted)
        if allowed:
            self.make_room(allowed)
        for block in held:
            self.index.release_host(block)
        got = min(allowed, len(self.free_hosts))
        if got < wanted and self.policy == "evict" and self.disk_blocks:
            for block in held:
                if block.flush is Flush.NONE:
                    self.enqueue(block)
        self.granted += [self.free_hosts.pop() for _ in range(got)]
        return got

    def commit(self, key: str, *, partly: bool) -> None:
        slot, name = self.granted.pop(), named(key)
        parent = parent_of(key)
        space = self.space
        known = (
            parent is None or named(parent) in space.blocks or named(parent) in space.pending_keys
        )
        if name in space.blocks or not known:
            self._free_host(slot)
            return
        space.pending_keys[name] = space.pending_keys.get(name, 0) + 1
        if parent is not None:
            counts = space.pending_children
            counts[named(parent)] = counts.get(named(parent), 0) + 1
        self.pending.append((key, slot))
        if not partly:
            self.complete(key, slot)

    def _unbind(self, key: str, slot: Slot | None) -> Slot:
        at = next(i for i, p in enumerate(self.pending) if p[0] == key and slot in (None, p[1]))
        found = self.pending.pop(at)[1]
        space, parent = self.space, parent_of(key)
        for counts, name in ((space.pending_keys, key), (space.pending_children, parent)):
            if name is not None:
                counts[named(name)] -= 1
                if not counts[named(name)]:
                    del counts[named(name)]
        if parent is not None:
            self.index.offer_key(space, named(parent))
        return found

    def complete(self, key: str, slot: Slot | None = None) -> None:
        slot = self._unbind(key, slot)
        blocks, parent_key = self.space.blocks, parent_of(key)
        parent = None if parent_key is None else blocks.get(named(parent_key))
        if named(key) in blocks or (parent_key is not None and parent is None):
            self._free_host(slot)
            return
        block = self.index.insert(self.space, named(key), parent)
        self.index.put_host(block, slot)
        self.index.touch([block])
        if parent is not None:
            self.index.touch([parent])
        if self.policy == "through" and self.disk_blocks:
            if parent is not None and parent.disk is None and parent.flush is Flush.REFUSED:
                block.flush = Flush.REFUSED
                self.index.offer(block)
            else:
                self.enqueue(block)

    def enqueue(self, block: Block) -> None:
        chain: list[Block] = []
        at: Block | None = block
        while at is not None and at.disk is None and at.flush in (Flush.NONE, Flush.REFUSED):
            chain.append(at)
            at = at.parent
        for member in reversed(chain):
            member.flush = Flush.QUEUED
            if member.parent is not None:
                member.parent.queued_children += 1
            self.queue.append(member)

    def _dequeued(self, block: Block, state: Flush) -> None:
        self.queue.remove(block)
        block.flush = state
        if block.parent is not None:
            block.parent.queued_children -= 1
            self.index.offer(block.parent)

    def _refuse(self, block: Block) -> None:
        self._dequeued(block, Flush.REFUSED)
        self.index.offer(block)

    def flush_step(self) -> None:
        block = self.queue[0]
        if block.parent is not None and block.parent.disk is None:
            self._refuse(block)
            return
        while self.space.disk_room <= 0:
            victim = self.own(TierName.DISK).peek()
            if victim is None or victim.sequence >= block.sequence:
                self._refuse(block)
                return
            self.index.drop_disk(victim, Pressure.QUOTA)
        if not self.free_disks:
            victim = self.index.disk_queue(self.space.shape).pop()
            if victim is not None:
                self.index.drop_disk(victim)
            if not self.free_disks:
                if not self.read:
                    self._refuse(block)
                return
        self._dequeued(block, Flush.NONE)
        self.index.put_disk(block, self.free_disks.pop())

    def promote(self, key: str) -> None:
        block = self.block(key)
        self.index.hold_disk(block)
        if block.host is None and self.make_quota_room(1):
            self.make_room(1)
            if self.free_hosts:
                self.index.put_host(block, self.free_hosts.pop())
        self.index.release_disk(block)

    def load_gpu(self, key: str) -> bool:
        if not self.free_gpus:
            victim = self.index.gpu_queue(self.space.shape).pop()
            if victim is None:
                return False
            self.index.drop_gpu(victim)
        self.index.put_gpu(self.block(key), self.free_gpus.pop())
        return True

    def evict(self, keys: list[str], tier: TierName) -> None:
        progress = True
        while progress:
            blocks = [b for b in map(self.space.blocks.get, map(named, keys)) if b is not None]
            progress = any(self.index.evict(block, tier) for block in blocks)

    def discard(self, names: dict[str, str], key: str) -> None:
        root = self.block(key)
        for block in reversed([root, *self.index.descendants([root])]):
            self.index.discard(block, "corrupt", TierName.DISK)
        for block in [b for b in self.queue if b.dead]:
            self._dequeued(block, Flush.NONE)
        self.used = [(names.get(name, name), block) for name, block in self.used]
        self.read = [(names.get(name, name), block) for name, block in self.read]
        self.gpu_used = [(names.get(name, name), block) for name, block in self.gpu_used]


class Both(Model):
    """Answers as the model does, and does the same to the real index."""

    # Calls that the model makes to itself must not reach the real index a second time.
    depth = 0

    def __init__(
        self, host_blocks: int, disk_blocks: int, policy: str, gpu_blocks: int = 0
    ) -> None:
        super().__init__(host_blocks, disk_blocks, policy, gpu_blocks)
        self.real = RealIndex(host_blocks, disk_blocks, policy, gpu_blocks)

    def _outermost(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        self.depth += 1
        try:
            return getattr(Model, name)(self, *args, **kwargs), self.depth == 1
        finally:
            self.depth -= 1

    def reserve(self, wanted: int, protect: list[str]) -> int:
        got, _ = self._outermost("reserve", wanted, protect)
        assert self.real.reserve(wanted, protect) == got
        return int(got)

    def commit(self, key: str, *, partly: bool = False) -> str:
        outcome, _ = self._outermost("commit", key, partly=partly)
        self.real.commit(key, partly=partly)
        return str(outcome)

    def complete(self, key: str) -> str:
        outcome, outermost = self._outermost("complete", key)
        if outermost:
            self.real.complete(key)
        return str(outcome)

    def touch(self, run: list[str]) -> None:
        if self._outermost("touch", run)[1]:
            self.real.index.touch([self.real.block(key) for key in run])

    def enqueue(self, key: str) -> None:
        if self._outermost("enqueue", key)[1]:
            self.real.enqueue(self.real.block(key))

    def flush_step(self) -> str:
        outcome, _ = self._outermost("flush_step")
        self.real.flush_step()
        return str(outcome)

    def promote(self, key: str) -> bool:
        done, _ = self._outermost("promote", key)
        self.real.promote(key)
        return bool(done)

    def set_quota(self, tier: str, blocks: int | None) -> None:
        super().set_quota(tier, blocks)
        self.real.limit(self.quotas)

    def fit(self) -> None:
        self._outermost("fit")
        self.real.fit()

    def expire(self, count: int) -> None:
        sequence = self.real.block(self.order[count - 1]).sequence
        self._outermost("expire", count)
        self.real.expire(sequence)

    def evict(self, keys: list[str], tier: str) -> None:
        self._outermost("evict", keys, tier)
        self.real.evict(keys, TierName[tier.upper()])

    def discard(self, key: str) -> dict[str, str]:
        names: dict[str, str] = self._outermost("discard", key)[0]
        self.real.discard(names, key)
        return names

    def hold(self, run: list[str]) -> None:
        super().hold(run)
        for key in run:
            self.real.index.hold_host(self.real.block(key))
            self.real.used.append((key, self.real.block(key)))

    def release(self, run: list[str]) -> None:
        super().release(run)
        for name in run:
            at = next(i for i, use in enumerate(self.real.used) if use[0] == name)
            self.real.index.release_host(self.real.used.pop(at)[1])

    def load_gpu(self, key: str) -> bool:
        done = super().load_gpu(key)
        assert self.real.load_gpu(key) == done
        return done

    def hold_gpu(self, key: str) -> None:
        super().hold_gpu(key)
        self.real.index.hold_gpu(self.real.block(key))
        self.real.gpu_used.append((key, self.real.block(key)))

    def release_gpu(self, name: str) -> None:
        super().release_gpu(name)
        at = next(i for i, use in enumerate(self.real.gpu_used) if use[0] == name)
        self.real.index.release_gpu(self.real.gpu_used.pop(at)[1])

    def begin_read(self, key: str) -> None:
        super().begin_read(key)
        self.real.index.hold_disk(self.real.block(key))
        self.real.read.append((key, self.real.block(key)))

    def end_read(self, name: str) -> None:
        super().end_read(name)
        at = next(i for i, use in enumerate(self.real.read) if use[0] == name)
        self.real.index.release_disk(self.real.read.pop(at)[1])

    def pin(self, run: list[str]) -> None:
        super().pin(run)
        for key in run:
            self.real.block(key).pinned_until = NEVER

    def unpin(self, key: str) -> None:
        super().unpin(key)
        self.real.block(key).pinned_until = 0.0
        self.real.index.offer(self.real.block(key))

    def abort(self) -> None:
        super().abort()
        self.real._free_host(self.real.granted.pop())

    def abort_partly(self, key: str) -> None:
        super().abort_partly(key)
        self.real._free_host(self.real._unbind(key, None))


class DifferentialMachine(EvictionMachine):
    """The machine of the model, with the index beside it."""

    model: Both

    def make(self, host_blocks: int, disk_blocks: int, policy: str, gpu_blocks: int) -> Model:
        return Both(host_blocks, disk_blocks, policy, gpu_blocks)

    @invariant()
    def the_same_blocks_are_in_the_same_tiers(self) -> None:
        model, blocks = self.model, self.model.real.space.blocks
        assert {named(k) for k in model.order} == set(blocks)
        assert {named(k) for k in model.host} == {
            k for k, b in blocks.items() if b.host is not None
        }
        assert {named(k) for k in model.disk} == {
            k for k, b in blocks.items() if b.disk is not None
        }
        assert {named(k) for k in model.gpu} == {k for k, b in blocks.items() if b.gpu is not None}
        space = model.real.space
        assert space.gpu_blocks == len(model.gpu)
        assert (space.host_blocks, space.disk_blocks) == (len(model.host), len(model.disk))

    @invariant()
    def the_order_is_the_same(self) -> None:
        blocks = sorted(self.model.real.space.blocks.values(), key=lambda b: b.sequence)
        assert [b.key for b in blocks] == [named(k) for k in self.model.order]

    @invariant()
    def the_same_copies_may_leave_and_the_queues_know_the_first(self) -> None:
        model, real = self.model, self.model.real
        for key in model.order:
            assert host_evictable(real.block(key)) == model.evictable_host(key), key
            assert disk_evictable(real.block(key)) == model.evictable_disk(key), key
            assert gpu_evictable(real.block(key)) == model.evictable_gpu(key), key
        for queue, coldest in (
            (real.index.host_queue(real.space.shape), model.coldest_host()),
            (real.index.disk_queue(real.space.shape), model.coldest_disk()),
            (real.index.gpu_queue(real.space.shape), model.coldest_gpu()),
            (real.own(TierName.HOST), model.coldest_host()),
            (real.own(TierName.DISK), model.coldest_disk()),
            (real.own(TierName.GPU), model.coldest_gpu()),
        ):
            victim = queue.peek()
            assert (victim and victim.key) == (coldest and named(coldest))

    @invariant()
    def the_same_slots_are_free_and_none_is_free_twice(self) -> None:
        model, real = self.model, self.model.real
        assert len(real.free_hosts) == model.free_host()
        assert len(real.free_disks) == model.free_disk()
        assert len(real.free_gpus) == model.free_gpu()

    @invariant()
    def the_way_to_disk_is_the_same(self) -> None:
        model, real = self.model, self.model.real
        assert [b.key for b in real.queue] == [named(k) for k in model.waiting]
        refused = {b.key for b in real.space.blocks.values() if b.flush is Flush.REFUSED}
        assert refused == {named(k) for k in model.refused}


TestDifferentialMachine = DifferentialMachine.TestCase
TestDifferentialMachine.settings = settings(max_examples=200, stateful_step_count=40)
