"""What put and get do when the daemon answers this or that: flows against a scripted one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
import pytest

from kvstore.attach import Grant, Lease
from kvstore.attach.times import TimesLog
from kvstore.attach.usage import UsageLog
from kvstore.errors import (
    AttachmentLost,
    InvalidRequest,
    KVStoreError,
    ServerUnavailable,
    StaleEpoch,
    UnknownSpace,
)
from kvstore.flows import SpaceFlows
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys, chain_keys
from kvstore.miss import Miss, MissReason
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.proto import kvstore_pb2 as pb
from kvstore.rows import Rows
from kvstore.space import SpaceSpec
from kvstore.steps import Await, Flow, Grow, Pause, Receive, Rpc, Send, Step, Work
from kvstore.wire import SlotArray, miss_to_message, slot_array

BOOT = b"b" * 16
SHARDS = (4096, 100)
SPEC = SpaceSpec(model="m", dtype="d", block_tokens=2, shard_bytes=SHARDS)
BLOCK = sum(SHARDS)
WINDOW = 4


def keys_of(count: int) -> Keys:
    return chain_keys(range(2 * count), 2)


def blocks_of(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(count).integers(0, 256, (count, BLOCK), np.uint8)


def interrupt() -> Any:
    raise KeyboardInterrupt


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Memory:
    """Slots of both shards, as a `Held` shows them."""

    def __init__(self, script: Script, slots: SlotArray) -> None:
        self.script = script
        self.slots = slots
        script.held += 1

    def addresses(self, shard: int) -> Any:
        start = self.script.slab.ctypes.data
        return start + self.slots["index"].astype(np.uint64) * 8192 + np.uint64(shard * 4096)

    def current(self, shard: int) -> Any:
        self.script.before_check()
        return self.script.generations[self.slots["index"]] == self.slots["generation"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.script.held -= 1


class Script:
    """An attachment and a daemon in one: a pool of slots, an index, and prepared answers.

    `shortages`, `outcomes` and `misses` are used up call by call; without them all goes well.
    """

    lease_cap_bytes = 2 * WINDOW * SPEC.shape.block_bytes
    boot_id = BOOT

    def __init__(self, slots: int = 64) -> None:
        self.slab = np.zeros((slots, 8192), np.uint8)
        self.generations = np.ones(slots, np.uint64)
        self.free = list(range(slots))
        self.index: dict[bytes, int] = {}
        self.usage = UsageLog()
        self.times = TimesLog()
        self.alive = True
        self.held = 0
        self.leases: set[int] = set()
        self.open_grants: dict[int, set[int]] = {}
        self.shortages: deque[tuple[int, Shortage]] = deque()
        self.outcomes: deque[bytes] = deque()
        self.misses: deque[tuple[int, Miss]] = deque()
        self.protected: list[list[bytes]] = []
        self.calls: list[str] = []
        self.rpc_errors: deque[KVStoreError] = deque()
        self.epoch = 1
        self.requests: list[Any] = []
        self.before_check: Callable[[], object] = lambda: None

    def wait_active(self, timeout_s: float) -> bool:
        return self.alive

    def using(self, slots: SlotArray, *, boot_id: bytes, writer_id: int = 0) -> Memory:
        assert boot_id == BOOT
        return Memory(self, slots)

    def acquire(self, space: SpaceHandle, keys: Keys, *, deadline_s: float) -> Future[Any]:
        self.calls.append(f"acquire {len(keys)}")
        run = 0
        while run < len(keys) and keys[run] in self.index:
            run += 1
        miss = Miss() if run == len(keys) else Miss(MissReason.NEVER_SEEN)
        if self.misses:
            limit, miss = self.misses.popleft()
            run = min(run, limit)
        lease = Lease(len(self.calls), BOOT, 1, lambda it: self.leases.discard(it.id))
        self.leases.add(lease.id)
        places = [self.index[keys[i]] for i in range(run)]
        lease.extend(0, slot_array((0, at, self.generations[at]) for at in places), b"\2" * run)
        lease.finish(run, miss)
        return done(lease)

    def reserve(
        self,
        space: SpaceHandle,
        count: int,
        *,
        deadline_s: float,
        protect: Iterable[bytes],
        keys: Keys | None = None,
    ) -> Future[Any]:
        self.calls.append(f"reserve {count}")
        self.protected.append(list(protect))
        shortage, present = Shortage.NONE, 0
        if keys is not None:
            present = next((i for i, k in enumerate(keys) if k not in self.index), len(keys))
            count = min(count, len(keys) - present)
            if keys.parent is not None and keys.parent not in self.index:
                count, shortage = 0, Shortage.ORPHAN
        if self.shortages:
            limit, shortage = self.shortages.popleft()
            count = min(count, limit)
        taken = [self.free.pop(0) for _ in range(count)]
        grant_id = len(self.calls)
        self.open_grants[grant_id] = set(taken)
        slots = slot_array((0, at, self.generations[at]) for at in taken)
        return done(Grant(grant_id, 1, BOOT, (), slots, shortage, present))

    def commit(
        self,
        space: SpaceHandle,
        owner_id: int,
        grant_id: int,
        shard: int | None,
        slots: SlotArray,
        keys: Keys,
        parents: bytes,
    ) -> Future[bytes]:
        self.calls.append(f"commit {len(keys)}")
        assert shard is None
        answer = self.outcomes.popleft() if self.outcomes else b"\1" * len(keys)
        for key, slot, outcome in zip(keys, slots["index"].tolist(), answer, strict=True):
            self.open_grants[grant_id].discard(slot)
            if outcome == CommitOutcome.COMMITTED:
                self.index[key] = slot
        return done(answer)

    def abort(
        self, owner_id: int, grant_id: int, slots: SlotArray, all_shards: bool = False
    ) -> Future[None]:
        assert all_shards
        self.open_grants[grant_id].difference_update(slots["index"].tolist())
        return done(None)

    @property
    def stuck(self) -> int:
        """Slots granted and neither committed nor aborted."""
        return sum(len(slots) for slots in self.open_grants.values())

    def answer(self, step: Rpc) -> Any:
        self.calls.append(step.name)
        self.requests.append(step.request)
        if step.name == "OpenSpace":
            return pb.OpenSpaceResponse(space=pb.SpaceRef(id=SPEC.fingerprint, epoch=self.epoch))
        if self.rpc_errors:
            raise self.rpc_errors.popleft()
        if step.name == "Lookup":
            keys = Keys(step.request.keys, SPEC.key_bytes)
            run = 0
            while run < len(keys) and keys[run] in self.index:
                run += 1
            miss = miss_to_message(Miss(MissReason.NEVER_SEEN))
            return pb.LookupResponse(blocks=run, tiers=b"\2" * run, miss=miss)
        return {
            "Hello": pb.HelloResponse(),
            "Evict": pb.EvictResponse(copies=1),
            "Unpin": pb.UnpinResponse(blocks=1),
            "Prefetch": pb.PrefetchResponse(blocks=1, done=True),
        }[step.name]

    def perform(self, step: Step) -> Any:
        match step:
            case Rpc():
                return self.answer(step)
            case Await(future, _):
                return future.result(0)
            case Work(run):
                return run()
            case Pause():
                self.calls.append("pause")
                return None
            case Grow(lease, _, _):
                return lease.blocks
            case Send() | Receive():
                raise AssertionError("no streams here")

    def run(self, flow: Flow[Any], cut: int | None = None) -> Any:
        """Run a flow, throwing an error into it instead of answering step `cut`."""
        try:
            step = next(flow)
            count = 0
            while True:
                try:
                    result = interrupt() if count == cut else self.perform(step)
                except BaseException as error:  # noqa: BLE001
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
                count += 1
        except StopIteration as end:
            return end.value


@pytest.fixture
def script() -> Script:
    return Script()


def flows_of(script: Any) -> SpaceFlows:
    opened = pb.OpenSpaceResponse(space=pb.SpaceRef(id=SPEC.fingerprint, epoch=1))
    return SpaceFlows(SpaceHandle(SPEC, opened), script, timeout_s=1.0)


def put(script: Script, keys: Keys, blocks: Any, timeout_s: float = 1.0) -> int:
    rows = Rows.of("blocks", blocks, len(keys), BLOCK, write=False)
    stored: int = script.run(flows_of(script).put(keys, rows, timeout_s))
    return stored


def get(script: Script, keys: Keys, timeout_s: float = 1.0) -> Any:
    out = np.zeros((len(keys), BLOCK), np.uint8)
    rows = Rows.of("out", out, len(keys), BLOCK, write=True)
    return out[: script.run(flows_of(script).get(keys, rows, timeout_s))]


def test_windows_are_reserved_and_leased_ahead(script: Script) -> None:
    keys, blocks = keys_of(10), blocks_of(10)
    assert put(script, keys, blocks) == 10
    assert script.calls == [
        *("reserve 4", "reserve 4", "commit 4"),
        *("reserve 2", "commit 4", "commit 2"),
    ]
    # The chain before a window is protected by its last block and by the last one committed.
    assert script.protected[0] == []
    assert set(script.protected[1]) == {keys[3]}
    assert set(script.protected[2]) == {keys[3], keys[7]}
    script.calls.clear()
    assert np.array_equal(get(script, keys), blocks)
    assert script.calls == ["acquire 4", "acquire 4", "acquire 2"]
    assert (script.held, script.leases, script.stuck) == (0, set(), 0)


def test_what_is_present_is_not_written_again(script: Script) -> None:
    keys, blocks = keys_of(6), blocks_of(6)
    assert put(script, keys[:5], blocks[:5]) == 5
    script.calls.clear()
    assert put(script, keys, blocks) == 6
    assert script.calls == ["reserve 4", "commit 1"]
    script.calls.clear()
    assert put(script, keys, blocks_of(7)[:6]) == 6
    assert script.calls == ["reserve 4"]
    assert np.array_equal(get(script, keys), blocks)


def test_a_missing_parent_ends_a_put_and_gives_the_rest_back(script: Script) -> None:
    script.outcomes.append(bytes([1, 1, CommitOutcome.PARENT_MISSING, 4]))
    assert put(script, keys_of(12), blocks_of(12)) == 2
    assert script.stuck == 0
    assert "commit 2" not in script.calls


def test_no_room_keeps_the_head_of_a_chain(script: Script) -> None:
    script.shortages += [(4, Shortage.NONE), (1, Shortage.NO_ROOM), (0, Shortage.NO_ROOM)]
    keys, blocks = keys_of(9), blocks_of(9)
    assert put(script, keys, blocks) == 5
    assert np.array_equal(get(script, keys), blocks[:5])
    assert script.stuck == 0


@pytest.mark.parametrize("shortage", [Shortage.BUSY, Shortage.CLIENT_CAP])
def test_a_busy_pool_is_asked_again_until_the_deadline(script: Script, shortage: Shortage) -> None:
    script.shortages += [(2, shortage), (0, shortage), (0, shortage), (3, Shortage.NONE)]
    assert put(script, keys_of(5), blocks_of(5)) == 5
    assert script.calls.count("pause") == 2
    script.shortages += [(0, shortage)] * 3
    before = len(script.calls)
    assert put(script, chain_keys(range(100, 104), 2), blocks_of(2), timeout_s=0.0) == 0
    assert script.calls[before:] == ["reserve 2", "Lookup"]


def test_a_block_that_changed_under_the_copy_ends_the_run(script: Script) -> None:
    keys, blocks = keys_of(8), blocks_of(8)
    put(script, keys, blocks)
    victim = script.index[keys[5]]

    def reuse() -> None:
        script.generations[victim] = 99
        script.slab[victim] = 0xEE

    script.before_check = reuse
    assert np.array_equal(get(script, keys), blocks[:5])
    assert (script.held, script.leases) == (0, set())


@pytest.mark.parametrize("reason", [MissReason.LEASE_CAP, MissReason.NO_ROOM])
def test_a_window_that_its_own_predecessor_crowds_out_is_asked_for_again(
    script: Script, reason: MissReason
) -> None:
    keys, blocks = keys_of(8), blocks_of(8)
    put(script, keys, blocks)
    script.misses += [(4, Miss()), (1, Miss(reason)), (0, Miss(reason)), (3, Miss())]
    assert np.array_equal(get(script, keys), blocks)
    assert script.leases == set()


def test_crowding_by_others_is_waited_out_only_until_the_deadline(script: Script) -> None:
    keys = keys_of(4)
    put(script, keys, blocks_of(4))
    script.misses += [(0, Miss(MissReason.LEASE_CAP))] * 3
    assert len(get(script, keys, timeout_s=0.0)) == 0
    assert len(script.misses) == 2


@pytest.mark.parametrize("what", ["put", "get"])
def test_whatever_ends_a_flow_it_leaves_nothing_behind(what: str) -> None:
    keys, blocks = keys_of(12), blocks_of(12)
    cut = 0
    while True:
        script = Script()
        if what == "get":
            put(script, keys, blocks)
        rows = Rows.of("rows", blocks.copy(), 12, BLOCK, write=True)
        flows = flows_of(script)
        flow = flows.put(keys, rows, 1.0) if what == "put" else flows.get(keys, rows, 1.0)
        try:
            script.run(flow, cut)
        except KeyboardInterrupt:
            cut += 1
            assert script.leases == set()
            assert script.held == 0
            # A commit that was sent is the daemon's business.
            assert script.stuck == 0
        else:
            break
    assert cut > 4


def test_a_daemon_that_forgot_the_space_is_told_again(script: Script) -> None:
    script.rpc_errors.append(UnknownSpace("who?"))
    assert script.run(flows_of(script).lookup(keys_of(2))).blocks == 0
    assert script.calls == ["Lookup", "OpenSpace", "Lookup"]


def test_nothing_is_reserved_for_blocks_whose_parent_is_missing(script: Script) -> None:
    keys, blocks = keys_of(8), blocks_of(8)
    assert put(script, keys[4:], blocks[4:]) == 0
    assert script.calls == ["reserve 4", "Lookup"]
    assert (script.stuck, script.index) == (0, {})
    assert put(script, keys[:4], blocks[:4]) == 4
    assert put(script, keys[4:], blocks[4:]) == 4


def test_a_handle_never_serves_another_epoch(script: Script) -> None:
    flows = flows_of(script)
    script.rpc_errors.append(UnknownSpace("who?"))
    script.epoch = 2
    with pytest.raises(StaleEpoch, match="epoch 1"):
        script.run(flows.lookup(keys_of(1)))
    # Not even when the daemon would answer again.
    script.epoch = 1
    before = len(script.calls)
    with pytest.raises(StaleEpoch):
        script.run(flows.lookup(keys_of(1)))
    assert len(script.calls) == before


def test_a_stale_answer_makes_the_handle_stale_for_ever(script: Script) -> None:
    flows = flows_of(script)
    script.rpc_errors.append(StaleEpoch("bumped"))
    for _ in range(2):
        with pytest.raises(StaleEpoch, match="bumped"):
            script.run(flows.lookup(keys_of(1)))


def test_evicting_no_keys_does_not_evict_everything(script: Script) -> None:
    flows = flows_of(script)
    none = Keys(b"", SPEC.key_bytes)
    assert script.run(flows.evict(none, None)).copies == 0
    assert script.run(flows.unpin(none)) == 0
    assert script.requests == []
    assert script.run(flows.evict(None, "disk")).copies == 1
    assert script.requests[-1].keys == b""
    assert script.requests[-1].tier == pb.TIER_DISK


def test_an_attachment_that_came_back_is_used_again(script: Script) -> None:
    keys, blocks = keys_of(6), blocks_of(6)
    reserve = script.reserve
    failures = [AttachmentLost("restarted")]

    def once(*args: Any, **named: Any) -> Future[Any]:
        return done(failures.pop()) if failures else reserve(*args, **named)

    script.reserve = once  # type: ignore[method-assign]
    assert put(script, keys, blocks) == 6
    assert np.array_equal(get(script, keys), blocks)


def test_what_was_read_before_the_daemon_died_still_counts(script: Script) -> None:
    keys, blocks = keys_of(8), blocks_of(8)
    put(script, keys, blocks)
    acquire, calls = script.acquire, [1]

    def dying(*args: Any, **named: Any) -> Future[Any]:
        if not calls:
            return done(ServerUnavailable("gone"))
        calls.pop()
        return acquire(*args, **named)

    script.acquire = dying  # type: ignore[method-assign]
    assert np.array_equal(get(script, keys), blocks[:4])
    with pytest.raises(ServerUnavailable):
        get(script, keys)


def test_usage_is_reported_in_tokens_by_tier(script: Script) -> None:
    keys, blocks = keys_of(6), blocks_of(6)
    put(script, keys[:5], blocks[:5])
    script.usage.take()
    get(script, keys)
    (usage,) = script.usage.take()
    assert (usage.requests, usage.prompt_tokens, usage.reused_tokens_host) == (1, 12, 10)
    assert (usage.loaded_bytes, usage.reused_tokens_disk) == (5 * BLOCK, 0)


BAD_BLOCKS: list[tuple[str, Any]] = [
    ("dtype", np.zeros((2, BLOCK), np.int8)),
    ("shape", np.zeros((2, BLOCK + 1), np.uint8)),
    ("shape", np.zeros(2 * BLOCK, np.uint8)),
    ("rows", np.zeros((3, BLOCK), np.uint8)),
    ("contiguous", np.zeros((BLOCK, 2), np.uint8).T),
    ("block 1 has 5 bytes", [bytes(BLOCK), b"short"]),
    ("are 1 for 2", [bytes(BLOCK)]),
    ("must be", b"bytes"),
    ("block 0", ["text", "text"]),
]


@pytest.mark.parametrize(("word", "blocks"), BAD_BLOCKS, ids=[word for word, _ in BAD_BLOCKS])
def test_blocks_that_do_not_fit_are_refused_by_name(word: str, blocks: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^blocks: .*{word}"):
        Rows.of("blocks", blocks, 2, BLOCK, write=False)


def test_rows_may_be_strided_and_lists_may_mix(script: Script) -> None:
    wide = np.random.default_rng(3).integers(0, 256, (8, BLOCK + 60), np.uint8)
    keys = keys_of(4)
    assert put(script, keys, wide[::2, 30 : 30 + BLOCK]) == 4
    assert np.array_equal(get(script, keys), wide[::2, 30 : 30 + BLOCK])
    listed = [bytes(BLOCK), bytearray(b"\1" * BLOCK), memoryview(b"\2" * BLOCK)]
    more = chain_keys(range(50, 56), 2)
    assert put(script, more, listed) == 3
    assert [int(row[0]) for row in get(script, more)] == [0, 1, 2]


def test_rows_that_overlap_are_not_read_into() -> None:
    base = np.zeros(2 * BLOCK, np.uint8)
    overlapping = np.lib.stride_tricks.as_strided(base, (2, BLOCK), (8, 1))
    with pytest.raises(InvalidRequest, match="overlap"):
        Rows.of("out", overlapping, 2, BLOCK, write=True)
    readonly = np.zeros((2, BLOCK), np.uint8)
    readonly.flags.writeable = False
    with pytest.raises(InvalidRequest, match="read-only"):
        Rows.of("out", readonly, 2, BLOCK, write=True)


def test_asking_how_a_prefetch_stands_says_again_what_was_asked_for(script: Script) -> None:
    """A ticket that the daemon has forgotten must not be opened again for ever, and at any price."""
    flows, keys = flows_of(script), keys_of(1)
    asked = script.run(flows.prefetch(keys, "host", 60.0, -7))
    assert script.run(flows.prefetched(asked, 5.0)) == 1
    late = script.run(flows.prefetch(keys, "host", 0.0, 0))
    script.run(flows.prefetched(late, 5.0))
    ever = script.run(flows.prefetch(keys, "host", None, 0))
    script.run(flows.prefetched(ever, 5.0))
    requests = [request for request in script.requests if isinstance(request, pb.PrefetchRequest)]
    assert [request.priority for request in requests] == [-7, -7, 0, 0, 0, 0]
    first, again, *others = [request.deadline_ms for request in requests]
    assert 0 < again <= first <= 60_000
    assert others == [1, 1, 0, 0]
