"""Every kind of client, operator, crash and fault against a real daemon, beside a plain dict.

The state machine's own process holds three clients (mapped, streaming over TCP, asyncio), which
live through every restart, and forks victims that hold leases and grants until they are killed.
The daemon is a process of its own; kill -9 is one.

Rules tell `oracle_model` before they do something what may come of it, and afterwards what they
saw. Nothing is drawn by what was seen, so an example does the same on any machine; what a daemon
answers may differ, and the model's bounds hold for any of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from oracle_crowd import Victim
from oracle_daemon import FAULTS, REFUSING, ForkedDaemon
from oracle_model import ALL_KEYS, CHAINS, LONGEST, MIB, SPECS, Model, SpaceModel, keys_of
from oracle_players import AsyncPlayer, MappedPlayer, Player, StreamingPlayer, in_threads

from kvstore import Client, Keys
from kvstore.attach import Grant, Lease
from kvstore.errors import (
    AttachmentLost,
    DeadlineExceeded,
    ServerUnavailable,
    StaleEpoch,
)
from kvstore.memory import copy_batch
from kvstore.outcomes import CommitOutcome
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["OracleMachine"]

T = TypeVar("T")

ROOT = Path(os.environ.get("KVSTORE_TEST_ORACLE_DIR", "/dev/shm"))
PATIENCE_SECONDS = 60.0
_AWAY = (ServerUnavailable, AttachmentLost, DeadlineExceeded)
_SURELY = 30.0

spaces = st.integers(0, len(SPECS) - 1)
chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, LONGEST)
players = st.integers(0, 2)
indices = st.integers(0, 7)
uses = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "put", "get", "lookup", "prefetch"]),
        players,
        spaces,
        chains,
        lengths,
    ),
    min_size=1,
    max_size=5,
)


def until(what: Callable[[], bool], why: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < end, f"still not so: {why()}"
        time.sleep(0.005)


class OracleMachine(RuleBasedStateMachine):
    """Rules are what clients, operators and bad luck do."""

    sabotage: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-oracle-", dir=ROOT))
        self.daemon: ForkedDaemon
        self.model: Model
        self.players: list[Player] = []
        self.admin: Client | None = None
        self.leases: list[tuple[int, Keys, Lease]] = []
        self.grants: list[tuple[int, Keys, Grant]] = []
        self.victims: list[Victim] = []
        self.trace: list[str] = []

    # What follows is not rules.

    def note(self, what: str, *answers: object) -> None:
        """Remember a step and its answers: a failure that depends on timing has no other record."""
        self.trace.append(" ".join([f"{what}:", *map(str, answers)]))

    @property
    def outstanding(self) -> bool:
        """Whether somebody holds memory that others may wait for."""
        return bool(self.leases or self.grants or self.victims)

    @property
    def mapped(self) -> MappedPlayer:
        player = self.players[0]
        assert isinstance(player, MappedPlayer)
        return player

    def call(self, what: Callable[[], T]) -> T:
        """Do something, again while a daemon that has just started is not found yet."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return what()
            except _AWAY:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def stats(self) -> pb.StatsResponse:
        assert self.admin is not None
        return self.call(self.admin.stats)

    def tier(self, tier: int, stats: pb.StatsResponse | None = None) -> pb.TierStats:
        found = [t for t in (stats or self.stats()).tiers if t.tier == tier]
        return found[0] if found else pb.TierStats()

    def start_daemon(self, **more: Any) -> None:
        if self.model.fault == "commit fails":
            # A state directory that cannot be written is refused at start, in one line.
            self.daemon.set_fault("")
            self.model.fault = ""
        self.daemon.start(**more)
        if self.admin is not None:
            self.admin.close()
        self.admin = Client(self.daemon.address, name="admin", timeout_s=PATIENCE_SECONDS)
        if not self.players:
            self.players = [
                MappedPlayer(self.daemon.address),
                StreamingPlayer(self.daemon.tcp),
                AsyncPlayer(self.daemon.address),
            ]
        else:
            self.players[1].close()
            self.players[1] = StreamingPlayer(self.daemon.tcp)

    def reopen(self) -> list[int]:
        """Have every player open the spaces; return the epochs."""
        epochs = [self.call(player.open) for player in self.players]
        assert epochs.count(epochs[0]) == len(epochs)
        return epochs[0]

    def come_back(self) -> None:
        """After a start: what was held is void, and epochs are what they were."""
        self.leases.clear()
        self.grants.clear()
        for player in self.players:
            if not isinstance(player, StreamingPlayer):
                # The handles of before the restart go on.
                for space in range(len(SPECS)):
                    self.call(partial(player.lookup, space, keys_of(0)))
        assert self.reopen() == [space.epoch for space in self.model.spaces]

    # Rules.

    @initialize(
        policy=st.sampled_from(["through", "through", "reused", "evict"]),
        host=st.sampled_from([16, 32]),
        disk=st.sampled_from([0, 16, 64, 64]),
    )
    def begin(self, policy: str, host: int, disk: int) -> None:
        flags: dict[str, Any] = {
            "host_pool": host * MIB,
            "write_policy": policy,
            "lease_ttl": 2.0,
            "heartbeat": 0.2,
            "stop_timeout": 30.0,
        }
        if disk:
            flags |= {"disk": str(self.directory / "disk"), "disk_capacity": disk * MIB}
        self.daemon = ForkedDaemon(self.directory, type(self).sabotage, **flags)
        self.model = Model(policy, bool(disk), host * MIB, disk * MIB)
        self.note(f"begin {policy} host={host} disk={disk}")
        self.start_daemon()
        epochs = self.reopen()
        self.model.spaces = [SpaceModel(i, epoch) for i, epoch in enumerate(epochs)]

    @rule(some=uses)
    def use(self, some: list[tuple[str, int, int, int, int]]) -> None:
        for what, who, at, name, length in some:
            if what == "put":
                self.put(who, at, name, length)
            elif what == "get":
                self.get(who, at, name, length)
            elif what == "lookup":
                self.model.weaken()
                self.look(who, self.model.spaces[at], keys_of(name, length))
            else:
                # Length stands for how long to wait.
                self.prefetch(who, at, name, 0.05 * (length % 3), cancel=length > 4)

    # The same again, twice as likely: the rest is what happens between uses.
    @rule(some=uses)
    def use_more(self, some: list[tuple[str, int, int, int, int]]) -> None:
        self.use(some)

    def put(self, who: int, at: int, name: int, length: int) -> None:
        space, keys = self.model.spaces[at], keys_of(name, length)
        blocks = space.blocks(keys)
        patient = self.model.host_fits and not self.outstanding
        timeout = _SURELY if patient else 0.05
        stored = self.call(lambda: self.players[who].put(at, keys, blocks, timeout))
        self.note(f"put by {who} {at}/{name}[:{length}] v{space.next_version}", stored)
        assert stored <= length
        if patient:
            assert stored == length, f"{stored} of {length} blocks were stored"
        space.seen(keys[:stored])
        self.model.weaken()

    def get(self, who: int, at: int, name: int, length: int) -> None:
        space, keys = self.model.spaces[at], keys_of(name, length)
        # What host memory holds is to be had, but it may just be leaving for room, as it may.
        until(lambda: self.got_what_is_in_host(who, space, keys), lambda: self.trace[-4:])
        self.model.weaken()

    def got_what_is_in_host(self, who: int, space: SpaceModel, keys: Keys) -> bool:
        self.model.weaken()
        hit = self.look(who, space, keys)
        in_host = next((i for i, tier in enumerate(hit.tiers) if tier != "host"), hit.blocks)
        surely = self.model.keeps and self.model.loads and not self.outstanding
        timeout = _SURELY if surely else 0.2
        rows = self.call(lambda: self.players[who].get(space.number, keys, timeout))
        self.note(f"get by {who} in {space.number} of {len(keys)}", len(rows))
        space.returned(keys, list(rows))
        if surely:
            assert len(rows) >= space.run(keys), f"{len(rows)} blocks of {hit}"
        space.seen(keys[: len(rows)])
        return self.outstanding or len(rows) >= in_host

    def look(self, who: int, space: SpaceModel, keys: Keys) -> Any:
        """Look a chain up; check the answer."""
        hit = self.call(lambda: self.players[who].lookup(space.number, keys))
        least = space.run(keys)
        self.note(f"lookup by {who} in {space.number} of {len(keys)}, at least {least}", hit)
        assert hit.blocks >= least, f"{hit}, but {least} blocks must be there"
        assert len(hit.tiers) == hit.blocks
        for key in keys[: hit.blocks]:
            assert space.versions[key], "a block that nobody put"
        assert bool(hit.miss) == (hit.blocks < len(keys))
        found = keys[: hit.blocks]
        on_disk = [key for key, tier in zip(found, hit.tiers, strict=True) if tier == "disk"]
        space.seen(found, on_disk=on_disk)
        self.model.weaken()
        return hit

    def prefetch(self, who: int, at: int, name: int, wait: float, *, cancel: bool) -> None:
        keys = keys_of(name)
        ready = self.call(lambda: self.players[who].prefetch(at, keys, wait, cancel=cancel))
        self.note(f"prefetch by {who} {at}/{name} for {wait} s, cancel={cancel}", ready)
        assert ready <= len(keys)
        self.model.weaken()

    @rule(
        who=players,
        at=spaces,
        name=chains,
        first=st.integers(0, LONGEST - 1),
        tier=st.sampled_from([None, "host", "disk", "host", "disk"]),
        whole=st.sampled_from([False, False, False, True]),
    )
    def evict(
        self, who: int, at: int, name: int, first: int, tier: str | None, whole: bool
    ) -> None:
        space = self.model.spaces[at]
        keys = None if whole else keys_of(name)[first:]
        named = ALL_KEYS if keys is None else set(keys)
        self.model.weaken()
        if tier == "host":
            # What is on disk too stays there.
            kept = named & space.durable
            space.lost(named - kept)
        elif tier == "disk":
            space.lost(named)
        else:
            space.lost(named)
        stayed = self.call(lambda: self.players[who].evict(at, keys, tier))
        where = "all" if keys is None else f"{name}[{first}:]"
        self.note(f"evict by {who} {at}/{where} from {tier}, stayed", stayed)
        self.model.weaken()

    @rule(
        who=players,
        at=spaces,
        what=st.sampled_from(["pin", "pin", "unpin", "bump"]),
        name=chains,
        length=lengths,
    )
    def administer(self, who: int, at: int, what: str, name: int, length: int) -> None:
        if what == "pin":
            self.pin(who, at, name, length)
        elif what == "unpin":
            self.unpin(who, at)
        else:
            self.bump(who, at)

    def pin(self, who: int, at: int, name: int, length: int) -> None:
        self.model.weaken()
        space, keys = self.model.spaces[at], keys_of(name, length)
        pinned = self.call(lambda: self.players[who].pin(at, keys))
        self.note(f"pin by {who} {at}/{name}[:{length}]", pinned)
        assert pinned >= space.run(keys)
        space.seen(keys[:pinned])
        space.pinned |= set(keys[:pinned]) & space.sure
        self.model.weaken()

    def unpin(self, who: int, at: int) -> None:
        self.model.spaces[at].pinned.clear()
        self.model.weaken()
        self.call(lambda: self.players[who].unpin(at))
        self.note(f"unpin by {who} {at}")

    def bump(self, who: int, at: int) -> None:
        space = self.model.spaces[at]
        epoch = self.players[who].bump(at)
        self.note(f"bump by {who} {at}", epoch)
        assert epoch == space.epoch + 1
        for other in self.players:
            if other is not self.players[who]:
                with suppress(StaleEpoch):
                    found = other.lookup(at, keys_of(0))
                    raise AssertionError(f"a handle of the old epoch finds {found}")
        space.bumped(epoch)
        self.forget_held(at)
        self.reopen()

    def forget_held(self, at: int) -> None:
        """A bump revoked the leases of a space and voided its grants."""
        for lease_space, _, lease in self.leases:
            if lease_space == at:
                lease.release()
        for grant_space, _, grant in self.grants:
            if grant_space == at:
                self.abort(grant)
        self.leases = [held for held in self.leases if held[0] != at]
        self.grants = [held for held in self.grants if held[0] != at]

    @rule(
        host=st.booleans(),
        size=st.sampled_from([64, 32, 8, 3, 1, 32]),
        wait=st.sampled_from([0.0, 0.5]),
    )
    def resize(self, host: bool, size: int, wait: float) -> None:
        if not host and not self.model.has_disk:
            return
        if host:
            self.model.host = size * MIB
        else:
            self.model.disk = 2 * size * MIB
        wanted = self.model.host if host else self.model.disk
        self.model.weaken()
        assert self.admin is not None
        admin = self.admin
        name = "host" if host else "disk"
        done = self.call(lambda: admin.set_capacity(name, wanted, wait))
        self.note(f"resize {name} to {wanted // MIB} MiB", done.bytes, done.done, done.evicted)
        assert done.bytes >= wanted
        tier = self.tier(pb.TIER_HOST if host else pb.TIER_DISK)
        assert tier.capacity_bytes == wanted
        if done.done:
            assert done.bytes == wanted
            assert tier.used_bytes <= wanted
            assert not host or tier.allocated_bytes <= wanted

    @rule(how=st.sampled_from(["flush", "restart", "restart", "discard", "crash", "flush, crash"]))
    def interrupt(self, how: str) -> None:
        if how == "flush":
            self.flush()
        elif how == "flush, crash":
            self.flush_and_crash()
        elif how == "crash":
            self.crash()
        else:
            self.restart(kept=how == "restart")

    def flush(self) -> None:
        assert self.admin is not None
        admin = self.admin
        answer = self.call(lambda: admin.flush(_SURELY))
        self.note("flush", answer.done, answer.blocks, answer.skipped)
        if self.model.has_disk:
            assert answer.done, "a flush does not end"
            numbers = {spec.fingerprint: number for number, spec in enumerate(SPECS)}
            assert answer.skipped == len(answer.skipped_blocks)
            skipped = {(numbers[block.space_id], block.key) for block in answer.skipped_blocks}
            if self.model.disk_fits and not self.model.fault:
                assert not skipped, "no room on a disk that has it"
            self.model.flushed(skipped)
        self.model.weaken()

    def flush_and_crash(self) -> None:
        """What a flush vouches for is there afterwards, however full the disk is."""
        self.flush()
        if not self.model.has_disk or self.model.fault:
            return
        assert self.admin is not None
        answer = self.admin.flush(_SURELY)
        assert answer.done
        skipped = {(block.space_id, block.key) for block in answer.skipped_blocks}
        before: list[tuple[int, int, int]] = []
        for space in self.model.spaces:
            name_of = SPECS[space.number].fingerprint
            out = {key for space_id, key in skipped if space_id == name_of} | space.tainted
            for name in range(CHAINS):
                found = keys_of(name)[: self.mapped.lookup(space.number, keys_of(name)).blocks]
                safe = next((i for i, key in enumerate(found) if key in out), len(found))
                before.append((space.number, name, safe))
        moving = self.outstanding or not self.model.keeps
        self.crash()
        for number, name, safe in before:
            hit = self.look(0, self.model.spaces[number], keys_of(name))
            # Somebody's promotion may have made room for itself meanwhile.
            assert moving or hit.blocks >= safe, f"{hit}, but {safe} blocks were flushed"

    def restart(self, *, kept: bool) -> None:
        self.model.weaken()
        assert self.daemon.stop() == 0
        self.model.restarted(kept=kept)
        self.note(f"restart kept={kept}")
        self.start_daemon(**({} if kept else {"discard_host": True}))
        self.come_back()

    def crash(self) -> None:
        self.model.weaken()
        self.note("crash")
        self.daemon.kill()
        self.model.crashed()
        self.start_daemon()
        self.come_back()

    @rule(
        at=spaces,
        name=chains,
        what=st.sampled_from(["put", "flush", "bump", "evict", "pin", "stop"]),
        delay=st.sampled_from([0.0, 0.001, 0.003, 0.01, 0.03]),
    )
    def crash_during(self, at: int, name: int, what: str, delay: float) -> None:
        """Killed while something is under way: it has happened or it has not."""
        space, keys = self.model.spaces[at], keys_of(name)
        self.model.weaken()
        player = self.players[0]
        assert self.admin is not None
        admin = self.admin
        blocks = space.blocks(keys)
        if what == "evict":
            space.lost(keys)
        works: dict[str, Callable[[], Any]] = {
            "put": lambda: player.put(at, keys, blocks, 1.0),
            "flush": lambda: admin.flush(_SURELY),
            "bump": lambda: player.bump(at),
            "evict": lambda: player.evict(at, keys, None),
            "pin": lambda: player.pin(at, keys),
            "stop": self.daemon.terminate,
        }

        def kill() -> None:
            time.sleep(delay)
            self.daemon.kill()

        result, ended = in_threads([works[what], kill])
        self.note(f"crash after {delay} s of {what} {at}/{name}", repr(result))
        assert ended is None, ended
        if isinstance(result, BaseException) and not isinstance(result, _AWAY):
            raise result
        if what == "flush" and isinstance(result, pb.FlushResponse) and result.done:
            numbers = {spec.fingerprint: number for number, spec in enumerate(SPECS)}
            self.model.flushed({(numbers[b.space_id], b.key) for b in result.skipped_blocks})
            self.model.weaken()
        if what == "stop":
            # Stopped in time or not: memory is there or it is not.
            self.model.restarted(kept=False)
        self.model.crashed()
        self.start_daemon()
        if what == "bump":
            assert self.admin is not None
            epoch = self.admin.open_space(SPECS[at]).epoch
            least = space.epoch + isinstance(result, int)
            assert least <= epoch <= space.epoch + 1, f"epoch {epoch} after {space.epoch}"
            if epoch > space.epoch:
                space.bumped(epoch)
            self.reopen()
        self.come_back()

    @rule(name=st.sampled_from(FAULTS), some=uses, stays=st.sampled_from([False, False, True]))
    def fault(self, name: str, some: list[tuple[str, int, int, int, int]], stays: bool) -> None:
        """Something happens to the disk; it is repaired afterwards, or goes on."""
        if not self.model.has_disk:
            return
        if self.model.fault:
            self.repair()
        self.model.weaken()
        self.model.fault = name
        self.model.refused |= name in REFUSING or name.startswith(("write", "tier"))
        self.model.broken |= name == "read ends"
        self.model.weaken()
        self.daemon.set_fault(name)
        self.note(f"fault {name}")
        self.use(some)
        if not stays:
            self.repair()

    def repair(self) -> None:
        self.model.weaken()
        self.note("repair")
        self.daemon.set_fault("")
        # What ran into the fault has ended by the end of the next flush.
        assert self.admin is not None
        self.call(partial(self.admin.flush, _SURELY))
        self.model.fault = ""
        self.model.weaken()

    @rule(at=spaces, name=chains, length=lengths, what=st.sampled_from(["lease", "grant", "grow"]))
    def hold(self, at: int, name: int, length: int, what: str) -> None:
        if what == "grant":
            self.hold_grant(at, name, length)
        else:
            self.hold_lease(at, name, length, 0.05 if what == "grow" else 0.0)

    @rule(which=indices, what=st.sampled_from(["read", "commit", "abort"]))
    def let_go(self, which: int, what: str) -> None:
        if what == "read":
            self.read_lease(which)
        else:
            self.settle_grant(which, commit=what == "commit")

    def hold_lease(self, at: int, name: int, length: int, wait: float) -> None:
        self.model.weaken()
        keys = keys_of(name, length)
        assert self.call(lambda: self.mapped.client.attachment.wait_active(PATIENCE_SECONDS))
        lease = self.call(
            lambda: self.mapped.spaces[at].acquire(keys, deadline_s=wait).result(PATIENCE_SECONDS)
        )
        assert lease.blocks <= length
        self.note(f"hold lease {at}/{name}[:{length}]", lease.blocks)
        self.leases.append((at, keys, lease))

    def read_lease(self, which: int) -> None:
        """Read what was leased, however long ago, and give it back."""
        if not self.leases:
            return
        at, keys, lease = self.leases.pop(which % len(self.leases))
        space = self.model.spaces[at]
        slots = lease.slots
        if len(slots):
            rows = np.zeros((len(slots), space.size), np.uint8)
            try:
                with self.mapped.client.attachment.using(slots, boot_id=lease.boot_id) as held:
                    current = np.ones(len(slots), np.bool_)
                    offset = 0
                    for shard, size in enumerate(SPECS[at].shard_bytes):
                        targets = rows.ctypes.data + np.arange(len(slots)) * space.size + offset
                        copy_batch(targets.astype(np.uint64), held.addresses(shard), size)
                        offset += size
                    for shard in range(len(SPECS[at].shard_bytes)):
                        current &= held.current(shard)
            except AttachmentLost:
                current = np.zeros(len(slots), np.bool_)
            if not lease.lost:
                good = len(slots) if current.all() else int(current.argmin())
                space.returned(keys, list(rows[:good]))
        self.note(f"read lease {at} and release", len(slots), lease.lost)
        lease.release()

    def hold_grant(self, at: int, name: int, count: int) -> None:
        keys = keys_of(name, count)
        assert self.call(lambda: self.mapped.client.attachment.wait_active(PATIENCE_SECONDS))
        grant = self.call(
            lambda: self.mapped.spaces[at].reserve(count, protect=keys[:1]).result(PATIENCE_SECONDS)
        )
        assert len(grant.slots) <= count
        self.note(f"hold grant {at}/{name} of {count}", len(grant.slots), grant.shortage)
        if len(grant.slots):
            self.grants.append((at, keys[: len(grant.slots)], grant))
        self.model.weaken()

    def settle_grant(self, which: int, *, commit: bool) -> None:
        """Write to the slots of a grant and commit them, or give them back."""
        if not self.grants:
            return
        at, keys, grant = self.grants.pop(which % len(self.grants))
        if not commit:
            self.abort(grant)
            self.note(f"abort grant {at}")
            return
        self.model.weaken()
        space = self.model.spaces[at]
        rows = np.ascontiguousarray(space.blocks(keys))
        attachment = self.mapped.client.attachment
        with attachment.using(grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id) as held:
            offset = 0
            for shard, size in enumerate(SPECS[at].shard_bytes):
                sources = rows.ctypes.data + np.arange(len(keys)) * space.size + offset
                copy_batch(held.addresses(shard), sources.astype(np.uint64), size)
                offset += size
        parents = [None, *keys[:-1]]
        outcomes = attachment.commit(
            self.mapped.spaces[at], grant.owner_id, grant.id, None, grant.slots, keys, parents
        ).result(PATIENCE_SECONDS)
        present = [CommitOutcome.COMMITTED, CommitOutcome.EXISTS]
        self.note(f"commit grant {at} v{space.next_version}", list(outcomes))
        assert all(outcome in present for outcome in outcomes), list(outcomes)
        space.seen(keys)
        self.model.weaken()

    def abort(self, grant: Grant) -> None:
        self.mapped.client.attachment.abort(
            grant.owner_id, grant.id, grant.slots, all_shards=True
        ).result(PATIENCE_SECONDS)

    @precondition(lambda self: len(self.victims) < 2)
    @rule(at=spaces, name=chains, count=st.integers(1, 4), write=st.booleans(), stop=st.booleans())
    def victim(self, at: int, name: int, count: int, write: bool, stop: bool) -> None:
        """Another process takes a lease and a grant, and may be frozen."""
        victim = Victim(self.daemon.address, at, keys_of(name), count, write=write)
        self.note(f"victim {at}/{name} stop={stop}", victim.leased, victim.granted)
        self.victims.append(victim)
        if stop:
            victim.stop()
        self.model.weaken()

    @rule(which=indices, thaw=st.booleans())
    def end_victim(self, which: int, thaw: bool) -> None:
        if not self.victims:
            return
        victim = self.victims.pop(which % len(self.victims))
        if thaw:
            victim.go_on()
        self.note("end victim")
        victim.kill()
        until(lambda: victim.pid not in [client.pid for client in self.stats().clients], self.stats)

    @rule(
        at=spaces,
        names=st.lists(chains, min_size=2, max_size=3),
        whats=st.lists(
            st.sampled_from(["put", "get", "evict", "prefetch"]), min_size=3, max_size=3
        ),
    )
    def together(self, at: int, names: list[int], whats: list[str]) -> None:
        """Three clients at the same time, on chains that overlap."""
        space = self.model.spaces[at]
        self.model.weaken()
        works: list[Callable[[], Any]] = []
        for who, name in enumerate(names):
            keys, player, what = keys_of(name), self.players[who], whats[who]
            if what == "put":
                works.append(partial(player.put, at, keys, space.blocks(keys), 0.5))
            elif what == "get":
                works.append(partial(player.get, at, keys, 0.5))
            elif what == "evict":
                space.lost(keys)
                works.append(partial(player.evict, at, keys, None))
            else:
                works.append(partial(player.prefetch, at, keys, 0.1, cancel=True))
        for name, what, result in zip(names, whats, in_threads(works), strict=False):
            said = len(result) if isinstance(result, np.ndarray) else result
            self.note(f"together {what} {at}/{name}", said)
            if isinstance(result, BaseException):
                raise result
            if what == "get":
                space.returned(keys_of(name), list(result))
        self.model.weaken()

    @rule()
    def look_everywhere(self) -> None:
        """The index is prefix-closed, and the daemon's numbers are those of what is there."""
        for space in self.model.spaces:
            for name in range(CHAINS):
                self.check_closed(space, name)
        if not self.outstanding:
            until(self.nothing_is_held, self.stats)
        until(self.numbers_fit, self.stats)

    def check_closed(self, space: SpaceModel, name: int) -> None:
        keys = keys_of(name)
        alone = [
            j for j in range(LONGEST) if self.mapped.lookup(space.number, keys[j : j + 1]).blocks
        ]
        hit = self.look(0, space, keys)
        # Nobody puts meanwhile, and what leaves does so from the tail.
        again = [
            j
            for j in alone
            if j >= hit.blocks and self.mapped.lookup(space.number, keys[j : j + 1]).blocks
        ]
        assert not again, f"blocks {again} of chain {name} are there, the first {hit.blocks} too"

    def nothing_is_held(self) -> bool:
        stats = self.stats()
        held = (stats.leases, stats.grants, stats.granted_slots, stats.stuck_slots)
        return held == (0, 0, 0, 0) and not stats.stuck_bytes

    def memory_is_given_back(self) -> bool:
        """Whether the daemon maps no part of the pool that is gone."""
        maps = Path(f"/proc/{self.daemon.pid}/maps").read_text().splitlines()
        return not any("/kvstore-" in line and line.endswith("(deleted)") for line in maps)

    def numbers_fit(self) -> bool:
        """Whether statistics and lookups agree; things may be moving."""
        found = []
        for space in self.model.spaces:
            tiers: dict[bytes, str] = {}
            for name in range(CHAINS):
                hit = self.mapped.lookup(space.number, keys_of(name))
                tiers |= dict(zip(keys_of(name), hit.tiers, strict=False))
            counts = list(tiers.values())
            found.append((len(counts), counts.count("host"), counts.count("disk")))
        stats = self.stats()
        told = {info.space.id: info for info in stats.spaces}
        infos = [told[spec.fingerprint] for spec in SPECS]
        host, disk = self.tier(pb.TIER_HOST, stats), self.tier(pb.TIER_DISK, stats)
        return (
            all(
                info.blocks == blocks
                and info.blocks_host == in_host
                and info.blocks_disk >= on_disk
                for info, (blocks, in_host, on_disk) in zip(infos, found, strict=True)
            )
            and host.blocks == sum(info.blocks_host for info in infos)
            and disk.blocks == sum(info.blocks_disk for info in infos)
        )

    def teardown(self) -> None:
        failed = sys.exc_info()[0] is not None
        try:
            if failed:
                print("\n".join(["", *self.trace, repr(sys.exc_info()[1])]), file=sys.stderr)
                log = self.daemon.log.read_text().splitlines()
                print("\n".join(log[-60:]), file=sys.stderr)
            elif self.players:
                self.finish()
        finally:
            for victim in self.victims:
                victim.kill()
            for player in self.players:
                player.close()
            if self.admin is not None:
                self.admin.close()
            if hasattr(self, "daemon"):
                self.daemon.end()
            shutil.rmtree(self.directory)

    def finish(self) -> None:
        """Everybody lets go: nothing is held. Everything leaves: nothing is left."""
        self.daemon.set_fault("")
        while self.victims:
            self.victims.pop().kill()
        for _, _, lease in self.leases:
            lease.release()
        for _, _, grant in self.grants:
            self.abort(grant)
        self.leases.clear()
        self.grants.clear()
        until(self.nothing_is_held, self.stats)
        until(self.numbers_fit, self.stats)
        for at in range(len(SPECS)):
            self.call(partial(self.mapped.unpin, at))

        def gone() -> bool:
            left = [self.mapped.evict(at, None, None) for at in range(len(SPECS))]
            stats = self.stats()
            used = [tier.used_bytes for tier in stats.tiers]
            return not any(left) and not any(used)

        until(gone, self.stats)
        until(self.memory_is_given_back, lambda: "slabs that are gone are mapped")
        assert self.daemon.stop() == 0
        log = self.daemon.log.read_text()
        assert "Traceback" not in log, log
