"""A store inside this process that keeps the client's contract, with faults to inject.

It shares no code with the client or the daemon but their value types, so that a test that passes
here and fails there shows where the contract is read differently.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import AttachmentLost, ServerUnavailable, StaleEpoch
from kvstore.keys import Keys
from kvstore.miss import Miss, MissReason
from kvstore.space import SpaceSpec

SLOT = np.dtype([("group", "<u4"), ("index", "<u4"), ("generation", "<u8")])
HOST, DISK = b"\2", b"\3"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Block:
    def __init__(self, slot: int, parent: bytes) -> None:
        self.slot = slot
        self.parent = parent
        self.shards: set[int] = set()
        self.on_disk = False


class FakeDaemon:
    """One daemon, with one pool of slots for whatever space comes first.

    Attributes:
        up: whether it answers.
        hold: while set, answers to acquire and reserve wait for `let_go`.
        commits: outcomes given so far.
        asked_for: names of the requests that asked for a lease.
        declines: what is on disk is not worth waiting for.
        queued: for how long each said that waiting costs nothing, seconds.
        faults: names of faults to inject: `commit` fails, or a copy finds that half of its slots
            have a new `generation`, and other bytes.
    """

    def __init__(self, slots: int = 96) -> None:
        self.slots = slots
        self.lock = threading.RLock()
        self.ids = itertools.count(1)
        self.up = True
        self.boots = 0
        self.hold = False
        self.declines = False
        self.held: list[Callable[[], None]] = []
        self.faults: set[str] = set()
        self.commits: list[int] = []
        self.asked_for: list[str] = []
        self.queued: list[float] = []
        self.usage: dict[str, int] = {}
        self.times: list[tuple[str, float]] = []
        self.epoch = 0
        self.boot()

    def boot(self) -> None:
        """Start anew: another pool, nothing in it."""
        with self.lock:
            self.boots += 1
            self.boot_id = self.boots.to_bytes(16, "little")
            self.memory: NDArray[np.uint8] = np.empty((0, 0, 0), np.uint8)
            self.generations = np.zeros(self.slots, np.uint64)
            self.blocks: dict[tuple[bytes, bytes], Block] = {}
            self.free = list(range(self.slots))
            self.granted: dict[int, set[tuple[int, int]]] = {}  # grant -> (slot, shard)
            self.bound: dict[tuple[int, int], bytes] = {}
            self.leases: dict[int, FakeLease] = {}
            self.up = True

    def warm_boot(self) -> None:
        """Start anew with what is in memory."""
        with self.lock:
            kept = self.memory, self.generations, self.blocks
            self.boot()
            self.memory, self.generations, self.blocks = kept
            taken = {block.slot for block in self.blocks.values()}
            self.free = [slot for slot in self.free if slot not in taken]

    def stop(self) -> None:
        with self.lock:
            self.up = False
            for lease in self.leases.values():
                lease.lost = True
            self.leases.clear()

    def let_go(self) -> None:
        """Answer what has been held back."""
        self.hold = False
        held, self.held = self.held, []
        for answer in held:
            answer()

    def answer(self, make: Callable[[], Any]) -> Future[Any]:
        if not self.up:
            return _failed(ServerUnavailable("fake daemon is down"))
        if not self.hold:
            return _done(make())
        future: Future[Any] = Future()
        boot_id = self.boot_id

        def late() -> None:
            if self.up and self.boot_id == boot_id:
                future.set_result(make())
            else:
                future.set_exception(ServerUnavailable("fake daemon went down"))

        self.held.append(late)
        return future

    def room(self, spec: SpaceSpec) -> None:
        shape = (spec.shape.shards, self.slots, spec.shape.slot_bytes)
        if self.memory.shape != shape:
            assert not self.blocks, "the fake serves one shape at a time"
            self.memory = np.zeros(shape, np.uint8)

    def ready(self, space: FakeSpace, key: bytes) -> Block | None:
        block = self.blocks.get((space.name, key))
        return block if block and len(block.shards) == len(space.spec.shard_bytes) else None

    def evict(self, names: Iterable[tuple[bytes, bytes]]) -> None:
        with self.lock:
            for name in list(names):
                self.free.append(self.blocks.pop(name).slot)

    def give_away(self, chosen: list[int]) -> None:
        """Let somebody else write to slots that are being read, as after a lease that expired."""
        with self.lock:
            gone = {name for name, block in self.blocks.items() if block.slot in chosen}
            if not gone:
                return  # another rank's copy has seen to it
            self.memory[:, chosen] = 0xEE
            self.generations[chosen] += np.uint64(1)
            half = {slot for grant in self.granted.values() for slot, _ in grant}
            while True:
                orphans = {
                    (space, key)
                    for (space, key), block in self.blocks.items()
                    if (space, block.parent) in gone
                    and (space, key) not in gone
                    and block.slot not in half
                }
                if not orphans:
                    break
                gone |= orphans
            self.evict(gone)

    def allocate(self, count: int) -> NDArray[Any]:
        with self.lock:
            leased = {int(i) for lease in self.leases.values() for i in lease.slots["index"]}
            half = {slot for grant in self.granted.values() for slot, _ in grant}
            leased |= half  # a block that waits for its other shards stays
            while len(self.free) < count:
                parents = {(s, b.parent) for (s, _), b in self.blocks.items()}
                leaf = next(
                    (
                        n
                        for n, b in self.blocks.items()
                        if n not in parents and b.slot not in leased
                    ),
                    None,
                )
                if leaf is None:
                    break
                self.evict([leaf])
            chosen = [self.free.pop(0) for _ in range(min(count, len(self.free)))]
            self.generations[chosen] += np.uint64(1)
            return self.named(chosen)

    def named(self, chosen: list[int]) -> NDArray[Any]:
        slots = np.zeros(len(chosen), SLOT)
        slots["index"] = chosen
        slots["generation"] = self.generations[chosen]
        return slots


class FakeLease:
    def __init__(self, daemon: FakeDaemon, space: FakeSpace, keys: Keys, deadline: float) -> None:
        self.id = next(daemon.ids)
        self.boot_id = daemon.boot_id
        self.lost = False
        self.released = False
        self._daemon = daemon
        self._space = space
        self._keys = keys
        self.slots = np.empty(0, SLOT)
        self.tiers = b""
        self.growing = False
        self.miss = Miss()
        self.grow(deadline > 0)
        daemon.leases[self.id] = self

    @property
    def blocks(self) -> int:
        return len(self.slots)

    def grow(self, wait: bool) -> None:
        """Lease what is in memory; blocks on disk are waited for if `wait`."""
        daemon, chosen, tiers = self._daemon, [], b""
        self.growing = False
        self.miss = Miss()
        there = itertools.takewhile(lambda key: daemon.ready(self._space, key), self._keys)
        self.present = len(list(there))
        for key in self._keys:
            block = daemon.ready(self._space, key)
            if block is None:
                self.miss = Miss(MissReason.EVICTED)
                break
            if block.on_disk:
                self.miss = Miss(MissReason.NOT_WORTH_WAITING)
                if wait and not daemon.declines:
                    self.growing = True
                break
            chosen.append(block.slot)
            tiers += HOST
        self.slots, self.tiers = daemon.named(chosen), tiers

    def release(self) -> None:
        self.released = True
        self._daemon.leases.pop(self.id, None)


class FakeGrant:
    def __init__(self, daemon: FakeDaemon, owner: int, count: int, shards: int) -> None:
        self.id = next(daemon.ids)
        self.owner_id = owner
        self.boot_id = daemon.boot_id
        self.slots = daemon.allocate(count)
        self.shortage = 0 if len(self.slots) == count else 1
        daemon.granted[self.id] = {
            (int(i), shard) for i in self.slots["index"] for shard in range(shards)
        }


class FakeSpace:
    def __init__(self, client: FakeClient, spec: SpaceSpec) -> None:
        self.spec = spec
        self.name = spec.fingerprint
        self.block_bytes = spec.block_bytes
        self.epoch = client.daemon.epoch
        self._client = client

    def check(self) -> None:
        if self.epoch != self._client.daemon.epoch:
            raise StaleEpoch("epoch is over")

    def acquire(
        self,
        keys: Keys,
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float | None = 0.0,
        priority: int = 0,
        request_id: str = "",
        queued_s: float = 0.0,
    ) -> Future[Any]:
        daemon = self._client.daemon
        try:
            self.check()
        except StaleEpoch as error:
            return _failed(error)
        daemon.asked_for.append(request_id)
        daemon.queued.append(queued_s)
        return daemon.answer(lambda: FakeLease(daemon, self, keys, deadline_s))

    def reserve(
        self,
        count: int,
        *,
        writers: Sequence[int] = (),
        deadline_s: float = 0.0,
        protect: Keys | Sequence[bytes] = (),
    ) -> Future[Any]:
        daemon = self._client.daemon
        daemon.room(self.spec)
        assert len(writers) == len(self.spec.shard_bytes)
        owner = self._client.attachment.id
        return daemon.answer(lambda: FakeGrant(daemon, owner, count, len(writers)))


class FakeHeld:
    def __init__(self, daemon: FakeDaemon, slots: NDArray[Any]) -> None:
        self._daemon, self._slots = daemon, slots
        self._memory, self._generations = daemon.memory, daemon.generations

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        return None

    def mapped(self, shard: int) -> bool:
        return True

    def map(self, shard: int, timeout_s: float) -> None:
        pass

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        base, stride = self._memory[shard].ctypes.data, self._memory.shape[2]
        return self._slots["index"].astype(np.uint64) * np.uint64(stride) + np.uint64(base)

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        return self.addresses(shard), np.zeros(len(self._slots), np.uint8)

    def stretches(self, shard: int) -> NDArray[np.int64]:
        return np.arange(len(self._slots))

    def done(self) -> None:
        self.__exit__()

    def current(self, shard: int) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (
            self._generations[self._slots["index"]] == self._slots["generation"]
        )
        return same


class FakeAttachment:
    def __init__(self, daemon: FakeDaemon, number: int) -> None:
        self._daemon = daemon
        self._number = number
        self.joined = True
        self.unmappable = False
        self.unfilled = 0
        self.resting: list[bool] = []

    @property
    def alive(self) -> bool:
        return self._daemon.up and self.joined and not self.unmappable

    @property
    def boot_id(self) -> bytes:
        return self._daemon.boot_id if self.alive else b""

    @property
    def id(self) -> int:
        return 1000 * self._daemon.boots + self._number if self.alive else 0

    @property
    def streams_only(self) -> bool:
        return self._daemon.up and self.unmappable

    def use_devices(self, uuids: Sequence[str], pins: Any = None) -> None:
        pass

    @property
    def opens_devices(self) -> bool:
        return True

    def rest(self, resting: bool) -> None:
        if not self.resting or self.resting[-1] != resting:
            self.resting.append(resting)

    def wait_active(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while self._daemon.up and not self.joined and time.monotonic() < end:
            time.sleep(0.001)
        return self.alive

    def wait_filled(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        return self.alive

    def make_room(self, shard_bytes: Sequence[int]) -> Future[Any]:
        return _failed(ServerUnavailable("fake daemon makes no room"))

    def wait_run(self, boot_id: bytes, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        over = boot_id != self._daemon.boot_id or not self._daemon.up
        while not over and not self.alive and not self.streams_only and time.monotonic() < end:
            time.sleep(0.001)
        return self.alive and self.boot_id == boot_id

    def using(self, slots: NDArray[Any], *, boot_id: bytes, writer_id: int = 0) -> FakeHeld:
        if not self.alive or boot_id != self.boot_id:
            raise AttachmentLost("granted in another run")
        if writer_id and writer_id != self.id:
            raise AttachmentLost("granted to another attachment")
        if not writer_id and "generation" in self._daemon.faults:
            self._daemon.give_away(slots["index"][len(slots) // 2 :].tolist())
        return FakeHeld(self._daemon, slots)

    def commit(
        self,
        space: FakeSpace,
        owner_id: int,
        grant_id: int,
        shard: int | None,
        slots: NDArray[Any],
        keys: Keys,
        parents: bytes,
    ) -> Future[bytes]:
        daemon = self._daemon
        if not daemon.up:
            return _failed(ServerUnavailable("fake daemon is down"))
        if "commit" in daemon.faults:
            return _failed(AttachmentLost("injected"))
        assert shard is not None
        with daemon.lock:
            outcomes = [
                self._commit_one(
                    space,
                    grant_id,
                    shard,
                    int(slots["index"][i]),
                    keys[i],
                    parents[i * keys.key_bytes : (i + 1) * keys.key_bytes],
                )
                for i in range(len(keys))
            ]
            daemon.commits += outcomes
        return _done(bytes(outcomes))

    def _commit_one(
        self, space: FakeSpace, grant: int, shard: int, slot: int, key: bytes, parent: bytes
    ) -> int:
        daemon = self._daemon
        if (slot, shard) not in daemon.granted.get(grant, set()):
            return 5
        daemon.granted[grant].discard((slot, shard))
        last = not any(s == slot for s, _ in daemon.granted[grant])
        block = daemon.blocks.get((space.name, key))
        if block is not None and block.slot != slot:
            if last:
                daemon.free.append(slot)
            return 3
        if block is None:
            if any(parent) and (space.name, parent) not in daemon.blocks:
                if last:
                    daemon.free.append(slot)
                return 4
            block = daemon.blocks[space.name, key] = Block(slot, parent)
        block.shards.add(shard)
        return 1 if len(block.shards) == len(space.spec.shard_bytes) else 2

    def abort(
        self,
        owner_id: int,
        grant_id: int,
        slots: NDArray[Any] | None = None,
        all_shards: bool = False,
    ) -> Future[None]:
        daemon = self._daemon
        with daemon.lock:
            grant = daemon.granted.get(grant_id, set())
            which = {s for s, _ in grant} if slots is None else set(slots["index"].tolist())
            gone = {item for item in grant if item[0] in which}
            grant -= gone
            held = {slot for slot, _ in grant} | {b.slot for b in daemon.blocks.values()}
            daemon.free += sorted({slot for slot, _ in gone} - held)
        return _done(None)


class FakeClient:
    """Made like the client; `address` names a daemon of `DAEMONS`."""

    def __init__(self, address: str, *, name: str = "", shards: Sequence[int] = ()) -> None:
        self.daemon = DAEMONS[address]
        self.attachment = FakeAttachment(self.daemon, next(self.daemon.ids))
        self.closed = False

    def open_space(self, spec: SpaceSpec) -> FakeSpace:
        if not self.daemon.up:
            raise ServerUnavailable("fake daemon is down")
        return FakeSpace(self, spec)

    def report_usage(self, space: FakeSpace, **counts: int) -> None:
        for name, count in counts.items():
            self.daemon.usage[name] = self.daemon.usage.get(name, 0) + count

    def report_time(self, operation: str, seconds: float) -> None:
        self.daemon.times.append((operation, seconds))

    def close(self) -> None:
        self.closed = True


DAEMONS: dict[str, FakeDaemon] = {}
