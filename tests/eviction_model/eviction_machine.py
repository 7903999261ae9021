"""What may happen to a few small trees of blocks, and what must hold meanwhile."""

from __future__ import annotations

from eviction_rule import Model, parent_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

__all__ = ["EvictionMachine"]

KEYS = st.text("ab", min_size=1, max_size=4)


def prefix_closed(keys: set[str]) -> bool:
    return all(parent_of(k) is None or parent_of(k) in keys for k in keys)


class EvictionMachine(RuleBasedStateMachine):
    """Everything that may happen to a few small trees of blocks."""

    model: Model

    def make(self, host_blocks: int, disk_blocks: int, policy: str, gpu_blocks: int) -> Model:
        return Model(host_blocks, disk_blocks, policy, gpu_blocks)

    @initialize(
        host=st.integers(2, 8),
        disk=st.sampled_from([0, 1, 2, 3, 4, 6, 8]),
        policy=st.sampled_from(["through", "evict"]),
        gpu=st.sampled_from([0, 1, 3]),
    )
    def start(self, host: int, disk: int, policy: str, gpu: int) -> None:
        self.model = self.make(host, disk, policy, gpu)
        self.leases: list[list[str]] = []

    def leading_run(self, key: str) -> list[str]:
        run = []
        for n in range(1, len(key) + 1):
            if key[:n] not in self.model.order:
                break
            run.append(key[:n])
        return run

    @rule(wanted=st.integers(1, 3), protect=KEYS)
    def reserve(self, wanted: int, protect: str) -> None:
        model = self.model
        protected = self.leading_run(protect)[-1:]
        there = self.leading_run(protect)
        got = model.reserve(wanted, protected)
        assert self.leading_run(protect) == there
        if got:
            assert model.quota_room("host") >= 0
        if got < wanted:
            assert not [k for k in model.order if model.evictable_host(k) and k not in there]

    @precondition(lambda self: self.model.granted)
    @rule(data=st.data(), partly=st.booleans())
    def commit(self, data: st.DataObject, partly: bool) -> None:
        there = ["", *self.model.order, *self.model.partly]
        key = data.draw(KEYS | st.sampled_from([k + c for k in there for c in "ab"]))
        known = set(self.model.order) | set(self.model.partly) | {None}
        outcome = self.model.commit(key, partly=partly)
        assert (outcome == "parent missing") <= (parent_of(key) not in known or not partly)
        assert (outcome == "committed") <= (key in self.model.host)

    @precondition(lambda self: self.model.partly)
    @rule(data=st.data(), abort=st.booleans())
    def finish(self, data: st.DataObject, abort: bool) -> None:
        key = data.draw(st.sampled_from(self.model.partly))
        if abort:
            self.model.abort_partly(key)
        else:
            self.model.complete(key)

    @precondition(lambda self: self.model.granted)
    @rule()
    def abort(self) -> None:
        self.model.abort()

    @rule(key=KEYS)
    def put(self, key: str) -> None:
        """What clients do most: a chain, block by block, with its own tail protected."""
        for n in range(1, len(key) + 1):
            if key[:n] in self.model.order:
                continue
            if self.model.reserve(1, [key[: n - 1]]) == 0:
                break
            assert self.model.commit(key[:n]) == "committed"

    @precondition(lambda self: self.model.waiting)
    @rule(steps=st.integers(1, 4))
    def flush(self, steps: int) -> None:
        for _ in range(min(steps, len(self.model.waiting))):
            self.model.flush_step()

    @precondition(lambda self: self.model.refused)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self.model.enqueue(data.draw(st.sampled_from(sorted(self.model.refused))))

    @precondition(lambda self: self.model.order)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.model.touch(self.leading_run(data.draw(st.sampled_from(self.model.order))))

    @precondition(lambda self: self.model.order)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        run = self.leading_run(data.draw(st.sampled_from(self.model.order)))
        run = run[: next((i for i, k in enumerate(run) if k not in self.model.host), len(run))]
        if run:
            self.model.hold(run)
            self.model.touch(run)
            self.leases.append(run)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        run = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.model.release(run)

    @precondition(lambda self: self.model.disk - self.model.host)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.disk - self.model.host)))
        self.model.promote(key)

    @precondition(lambda self: self.model.disk)
    @rule(data=st.data())
    def begin_read(self, data: st.DataObject) -> None:
        self.model.begin_read(data.draw(st.sampled_from(sorted(self.model.disk))))

    @precondition(lambda self: self.model.read)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        self.model.end_read(data.draw(st.sampled_from(self.model.read)))

    @precondition(lambda self: self.model.gpu_blocks and self.model.host - self.model.gpu)
    @rule(data=st.data())
    def load_gpu(self, data: st.DataObject) -> None:
        model = self.model
        room = model.free_gpu() > 0 or model.coldest_gpu() is not None
        assert model.load_gpu(data.draw(st.sampled_from(sorted(model.host - model.gpu)))) == room

    @precondition(lambda self: self.model.gpu)
    @rule(data=st.data())
    def hold_gpu(self, data: st.DataObject) -> None:
        self.model.hold_gpu(data.draw(st.sampled_from(sorted(self.model.gpu))))

    @precondition(lambda self: self.model.gpu_used)
    @rule(data=st.data())
    def release_gpu(self, data: st.DataObject) -> None:
        self.model.release_gpu(data.draw(st.sampled_from(self.model.gpu_used)))

    @precondition(lambda self: self.model.order)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.model.pin(self.leading_run(data.draw(st.sampled_from(self.model.order))))

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.model.unpin(data.draw(st.sampled_from(sorted(self.model.pinned))))

    @precondition(lambda self: self.model.order)
    @rule(data=st.data(), tier=st.sampled_from(["gpu", "host", "disk"]))
    def evict(self, data: st.DataObject, tier: str) -> None:
        keys = st.lists(st.sampled_from(self.model.order), min_size=1, max_size=4, unique=True)
        self.model.evict(data.draw(keys), tier)

    @rule(tier=st.sampled_from(["host", "disk"]), quota=st.none() | st.integers(0, 5))
    def limit(self, tier: str, quota: int | None) -> None:
        self.model.set_quota(tier, quota)

    @rule()
    def fit(self) -> None:
        model = self.model
        model.fit()
        quota = model.quotas["host"]
        if quota is not None and quota < len(model.host):
            assert model.coldest_host() is None
        if model.quota_room("disk") < 0:
            assert model.coldest_disk() is None

    @precondition(lambda self: self.model.order)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        model = self.model
        count = data.draw(st.integers(1, len(model.order)))
        young = model.order[count:]
        copies = [set(young) & tier for tier in (model.gpu, model.host, model.disk)]
        model.expire(count)
        assert [set(young) & tier for tier in (model.gpu, model.host, model.disk)] == copies
        assert model.order[-len(young) :] == young or not young

    @precondition(lambda self: len(self.model.order) > 3)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        names = self.model.discard(data.draw(st.sampled_from(self.model.order)))
        self.leases = [[names.get(k, k) for k in run] for run in self.leases]

    @invariant()
    def what_is_there_hangs_together(self) -> None:
        model = self.model
        assert set(model.order) == model.host | model.disk
        assert len(set(model.order)) == len(model.order)
        assert prefix_closed(set(model.order)), "a block lost its parent"
        assert prefix_closed(model.disk), "a crash now would orphan a block on disk"
        assert model.gpu <= set(model.order), "a GPU copy without another"

    @invariant()
    def capacities_hold(self) -> None:
        assert self.model.free_host() >= 0
        assert self.model.free_disk() >= 0
        assert self.model.free_gpu() >= 0

    @invariant()
    def what_is_held_stays(self) -> None:
        model = self.model
        assert {k for k in model.used if "#" not in k} <= model.host
        assert {k for k in model.read if "#" not in k} <= model.disk
        assert {k for k in model.gpu_used if "#" not in k} <= model.gpu
        assert model.pinned <= set(model.order)
        assert set(model.waiting) <= model.host - model.disk
        assert not model.refused & (model.disk | set(model.waiting))

    @invariant()
    def something_may_go_unless_something_is_held(self) -> None:
        model = self.model
        if model.gpu and not model.gpu_used:
            assert model.coldest_gpu() is not None
        if model.gpu_used:
            return  # those keep their last other copies
        if model.host and not (model.used or model.pinned or model.partly or model.waiting):
            assert model.coldest_host() is not None
        if model.disk and not (model.read or model.pinned or model.partly or model.waiting):
            # Blocks that are in host only may hold their ancestors on disk, nothing else does.
            hanging = [k for k in model.order if k not in model.disk]
            assert model.coldest_disk() is not None or hanging

    @invariant()
    def nothing_is_lost_that_need_not_be(self) -> None:
        """With nothing held and time to flush, whatever is asked for fits."""
        model = self.model
        held = model.used or model.gpu_used or model.pinned or model.partly or model.granted
        if model.host_blocks and not held:
            # With a quota, too: what is asked for has room, or something may go for it.
            assert model.free_host() or model.coldest_host() is not None or model.waiting
