"""What must hold of an engine between any two steps, computed again from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.index import (
    Block,
    Flush,
    SpaceIndex,
    disk_evictable,
    gpu_evictable,
    host_evictable,
)
from kvstore.tiers.base import Slot, TierName

if TYPE_CHECKING:
    from kvstore.engine import Engine


def check(engine: Engine, *, quiet: bool = False) -> None:
    """Check everything; `quiet`: nothing moves, so that references and slots add up, too."""
    for space in engine.index.spaces.values():
        _check_space(space)
    _check_queues(engine)
    _check_grants(engine)
    _check_leases(engine)
    if quiet:
        _check_slots(engine)
        _check_references(engine)


def _check_space(space: SpaceIndex) -> None:
    host_children: Counter[Block] = Counter()
    disk_children: Counter[Block] = Counter()
    gpu_children: Counter[Block] = Counter()
    queued: Counter[Block] = Counter()
    children: dict[Block, set[Block]] = {}
    for key, block in space.blocks.items():
        assert block.key == key
        assert block.space is space
        assert not block.dead
        assert block.host is not None or block.disk is not None, "a block without a copy"
        parent = block.parent
        if parent is not None:
            assert space.blocks.get(parent.key) is parent, "an orphan"
            assert block.disk is None or parent.disk is not None, "an orphan on disk"
            host_children[parent] += block.host is not None
            disk_children[parent] += block.disk is not None
            gpu_children[parent] += block.gpu is not None
            queued[parent] += block.flush in (Flush.QUEUED, Flush.WRITING)
            children.setdefault(parent, set()).add(block)
        if block.disk is not None:
            assert block.digests is not None
            assert block.flush is Flush.NONE
        if block.flush in (Flush.QUEUED, Flush.WRITING):
            assert block.host is not None, "the copy to be flushed is gone"
    for block in space.blocks.values():
        assert block.host_children == host_children[block]
        assert block.disk_children == disk_children[block]
        assert block.gpu_children == gpu_children[block]
        assert block.queued_children >= queued[block]
        linked = []
        child = block.child
        while child is not None:
            linked.append(child)
            child = child.after
        assert len(linked) == len(set(linked))
        assert set(linked) == children.get(block, set())
    assert space.host_blocks == sum(b.host is not None for b in space.blocks.values())
    assert space.disk_blocks == sum(b.disk is not None for b in space.blocks.values())
    assert space.gpu_blocks == sum(b.gpu is not None for b in space.blocks.values())
    assert min(space.gpu_arriving, space.host_arriving, space.disk_arriving) >= 0
    waiting = sum(b.flush in (Flush.QUEUED, Flush.WRITING) for b in space.blocks.values())
    assert space.dirty >= waiting
    if space.own is not None:
        _check_own_queues(space)


def _check_own_queues(space: SpaceIndex) -> None:
    """Every block of a space with limits that may leave is offered there, once."""
    assert space.own is not None
    for tier, evictable in (
        (TierName.GPU, gpu_evictable),
        (TierName.HOST, host_evictable),
        (TierName.DISK, disk_evictable),
    ):
        entries = [entry[2] for entry in space.own[tier]._heap]
        assert len(entries) == len(set(entries)), "queued twice"
        offered = set(entries)
        for block in space.blocks.values():
            assert bool(block.queued & 1 << tier + 4) == (block in offered)
            assert not evictable(block) or block in offered, f"{block} is not offered to its space"


def _check_queues(engine: Engine) -> None:
    """Every block that may leave is offered, once."""
    index = engine.index
    blocks = [b for space in index.spaces.values() for b in space.blocks.values()]
    for queues, tier, evictable in (
        (index._gpu_queues, TierName.GPU, gpu_evictable),
        (index._host_queues, TierName.HOST, host_evictable),
        (index._disk_queues, TierName.DISK, disk_evictable),
    ):
        entries = [entry[2] for queue in queues.values() for entry in queue._heap]
        assert len(entries) == len(set(entries)), "queued twice"
        offered = set(entries)
        for block in blocks:
            assert bool(block.queued & 1 << tier) == (block in offered)
            assert not evictable(block) or block in offered, f"{block} may leave, is not offered"


def _check_grants(engine: Engine) -> None:
    grants = engine.grants._grants
    assert engine.grants.slot_count == sum(len(g.slots) for g in grants.values())
    for space in engine.index.spaces.values():
        assert space.granted == sum(len(g.slots) for g in grants.values() if g.space is space)
    keys: dict[SpaceIndex, Counter[bytes]] = {}
    parents: dict[SpaceIndex, Counter[bytes]] = {}
    for grant in grants.values():
        assert grant.slots, "a settled grant is kept"
        for granted in grant.slots.values():
            assert granted.open_shards, "a settled slot is kept"
            if granted.key is not None:
                keys.setdefault(grant.space, Counter())[granted.key] += 1
                if granted.parent is not None:
                    parents.setdefault(grant.space, Counter())[granted.parent] += 1
    for space in engine.index.spaces.values():
        assert space.pending_keys == keys.get(space, Counter())
        assert space.pending_children == parents.get(space, Counter())
    for attachment in engine.attachments.snapshot():
        assert attachment.writing == {g for g in grants.values() if attachment.id in g.writers}
        mine = [g for g in grants.values() if g.owner == attachment.id]
        assert sorted(attachment.owned) == sorted(g.id for g in mine)


def _check_leases(engine: Engine) -> None:
    attachments = engine.attachments.snapshot()
    assert engine.leases.count == sum(len(a.leases) for a in attachments)
    for attachment in attachments:
        size = 0
        for lease in attachment.leases.values():
            assert not lease.ended
            assert len(lease.tiers) >= len(lease.run) >= lease.count
            assert set(range(lease.count)) <= lease.held
            assert lease.held.isdisjoint(lease.where.values())
            assert lease.held | set(lease.where.values()) == set(range(len(lease.run)))
            assert lease.on_gpu <= lease.held
            assert all(lease.run[i].gpu is not None for i in lease.on_gpu)
            assert all(lease.run[i].host is not None for i in lease.held - lease.on_gpu)
            size += len(lease.run) * lease.space.shape.block_bytes
        assert attachment.leased_bytes == size


def _check_slots(engine: Engine) -> None:
    """Every slot that a tier has given out has one owner; nobody has one that it has not."""
    host: list[Slot] = []
    disk: list[Slot] = []
    gpu: list[Slot] = []
    for space in engine.index.spaces.values():
        for block in space.blocks.values():
            host += [block.host] if block.host is not None else []
            disk += [block.disk] if block.disk is not None else []
            gpu += [block.gpu] if block.gpu is not None else []
    for grant in engine.grants._grants.values():
        host += grant.slots
    host += [slot for slot, _ in engine.quarantine.busy()]
    leased = {b for a in engine.attachments.snapshot() for le in a.leases.values() for b in le.run}
    host += [b.host for b in leased if b.dead and b.host is not None]
    assert len(host) == len(set(host)), "a host slot has two owners"
    taken = {
        Slot(number, index)
        for number, group in engine.host._groups.items()
        for index in range(group.info.slots)
        if group._taken[index]
    }
    assert set(host) == taken, "host slots leaked or given away"
    if engine.gpu is not None:
        gpu += [b.gpu for b in leased if b.dead and b.gpu is not None]
        assert len(gpu) == len(set(gpu)), "a gpu slot has two owners"
        assert set(gpu) == {
            Slot(number, index)
            for number, members in engine.gpu._groups.items()
            for index in range(members.info.slots)
            if members._taken[index]
        }, "gpu slots leaked or given away"
    if engine.disk is not None:
        assert len(disk) == len(set(disk)), "a disk slot has two owners"
        in_use = {s for g, *_ in engine.disk.segments() for s in engine.disk.allocated_slots(g)}
        assert set(disk) == in_use, "disk slots leaked or given away"


def _check_references(engine: Engine) -> None:
    # Digests are computed some time after a commit, whatever else is at rest.
    held: Counter[Block] = Counter(engine.digester.held)
    on_gpu: Counter[Block] = Counter()
    for attachment in engine.attachments.snapshot():
        for lease in attachment.leases.values():
            held.update(lease.run[i] for i in lease.held - lease.on_gpu)
            on_gpu.update(lease.run[i] for i in lease.on_gpu)
    for space in engine.index.spaces.values():
        for block in space.blocks.values():
            assert block.host_refs == held[block], f"{block}: {block.host_refs} references"
            assert block.gpu_refs == on_gpu[block], f"{block}: {block.gpu_refs} gpu references"
            assert block.disk_refs == 0
            assert block.queued_children == 0
        both = (*held.items(), *on_gpu.items())
        assert space.held == sum(n for block, n in both if block.space is space)
        assert not space.dirty
        assert not space.gpu_arriving + space.host_arriving + space.disk_arriving
    assert engine.index.host_held == sum(held.values())
    assert engine.index.gpu_held == sum(on_gpu.values())
    assert engine.index.disk_held == 0
