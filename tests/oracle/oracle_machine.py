"""Every kind of client, operator, crash and fault against a real daemon, beside a plain dict.

The state machine's own process holds three clients (mapped, streaming over TCP, asyncio), which
live through every restart, and forks victims that hold leases and grants until they are killed.
The daemon is a process of its own; kill -9 is one.

Rules tell `oracle_model` before they do something what may come of it, and afterwards what they
saw. Nothing is drawn by what was seen, so an example does the same on any machine; what a daemon
answers may differ, and the model's bounds hold for any of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from oracle_daemon import FAULTS, REFUSING, ForkedDaemon
from oracle_holding import HoldingMachine
from oracle_model import (
    ALL_KEYS,
    CHAINS,
    LONGEST,
    MIB,
    SLOT_BYTES,
    SPECS,
    Model,
    SpaceModel,
    keys_of,
)
from oracle_players import in_threads
from oracle_world import AWAY, SURELY_SECONDS, chains, lengths, spaces, until

from kvstore import Keys
from kvstore.errors import StaleEpoch
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["OracleMachine"]

players = st.integers(0, 2)
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


class OracleMachine(HoldingMachine):
    """Rules are what clients, operators and bad luck do."""

    @initialize(
        policy=st.sampled_from(["through", "through", "reused", "evict"]),
        host=st.sampled_from([16, 32]),
        disk=st.sampled_from([0, 16, 64, 64]),
    )
    def begin(self, policy: str, host: int, disk: int) -> None:
        flags: dict[str, Any] = {
            "host_pool": host * MIB,
            "write_policy": policy,
            "lease_ttl": 5.0,
            "heartbeat": 0.2,
            "stop_timeout": 30.0,
        }
        if disk:
            flags |= {"disk": str(self.directory / "disk"), "disk_capacity": disk * MIB}
        self.daemon = ForkedDaemon(self.directory, self.sabotage, **flags)
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
        there_is_room = self.model.host_fits or (self.model.keeps and not self.model.fault)
        patient = there_is_room and not self.outstanding and not space.quotas
        timeout = SURELY_SECONDS if patient else 0.05
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
        surely = surely and not space.quotas
        timeout = SURELY_SECONDS if surely else 0.2
        rows = self.call(lambda: self.players[who].get(space.number, keys, timeout))
        self.note(f"get by {who} in {space.number} of {len(keys)}", len(rows))
        space.returned(keys, list(rows))
        if surely:
            assert len(rows) >= space.run(keys), f"{len(rows)} blocks of {hit}"
        space.seen(keys[: len(rows)])
        return self.outstanding or len(rows) >= in_host

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
            space.lost(named - space.durable - space.pinned)
        else:
            # A pinned block keeps one copy, in whatever tier.
            space.lost(named - space.pinned)
            space.durable -= named
        stayed = self.call(lambda: self.players[who].evict(at, keys, tier))
        where = "all" if keys is None else f"{name}[{first}:]"
        self.note(f"evict by {who} {at}/{where} from {tier}, stayed", stayed)
        self.model.weaken()

    @rule(
        who=players,
        at=spaces,
        what=st.sampled_from(["pin", "pin", "unpin", "bump", "limit", "limit", "expire"]),
        name=chains,
        length=lengths,
    )
    def administer(self, who: int, at: int, what: str, name: int, length: int) -> None:
        if what == "pin":
            self.pin(who, at, name, length)
        elif what == "unpin":
            self.unpin(who, at)
        elif what == "limit":
            self.limit(who, at, "disk" if name % 2 else "host", length if name < 2 else None)
        elif what == "expire":
            self.expire(who, at)
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

    def limit(self, who: int, at: int, tier: str, blocks: int | None) -> None:
        """Set or clear a quota: the space keeps to it, and only its own blocks leave for that."""
        space = self.model.spaces[at]
        if blocks is None:
            space.quotas.pop(tier, None)
        else:
            space.quotas[tier] = blocks * SLOT_BYTES[at]
        self.model.weaken()
        limits = self.call(lambda: self.players[who].limit(at, tier, space.quotas.get(tier)))
        self.note(f"limit by {who} {at} {tier} to {blocks} blocks", limits)
        assert limits == space.quotas
        if not (self.outstanding or space.pinned or self.model.fault):
            until(self.quotas_hold, self.stats)
        self.model.weaken()

    def expire(self, who: int, at: int) -> None:
        """Nobody uses the space for a moment, and that is too long."""
        self.unpin(who, at)
        space = self.model.spaces[at]
        space.lost(ALL_KEYS)
        self.call(lambda: self.players[who].live_for(at, 0.2))
        if not (self.outstanding or self.model.fault):
            until(lambda: not self.info(at).blocks, lambda: self.info(at))
        self.note(f"expire by {who} {at}", self.info(at).blocks)
        self.call(lambda: self.players[who].live_for(at, None))
        self.model.weaken()

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

    @rule(
        how=st.sampled_from(
            [
                *("flush", "verify", "restart", "restart", "discard", "crash", "flush, crash"),
                *("during", "during"),
            ]
        ),
        at=spaces,
        name=chains,
        what=st.sampled_from(["put", "flush", "bump", "evict", "pin", "limit", "stop"]),
        delay=st.sampled_from([0.0, 0.001, 0.003, 0.01, 0.03]),
    )
    def interrupt(self, how: str, at: int, name: int, what: str, delay: float) -> None:
        if how == "flush":
            self.flush()
        elif how == "flush, crash":
            self.flush_and_crash()
        elif how == "verify":
            self.verify()
        elif how == "crash":
            self.crash()
        elif how == "during":
            self.crash_during(at, name, what, delay)
        else:
            self.restart(kept=how == "restart")

    def flush(self) -> None:
        assert self.admin is not None
        admin = self.admin
        answer = self.call(lambda: admin.flush(SURELY_SECONDS))
        self.note("flush", answer.done, answer.blocks, answer.skipped)
        if self.model.has_disk:
            assert answer.done, "a flush does not end"
            numbers = {spec.fingerprint: number for number, spec in enumerate(SPECS)}
            assert answer.skipped == len(answer.skipped_blocks)
            skipped = {(numbers[block.space_id], block.key) for block in answer.skipped_blocks}
            if self.model.disk_fits and not (self.model.fault or self.model.refused):
                limited = {space.number for space in self.model.spaces if space.quotas}
                left_out = {number for number, _ in skipped}
                assert left_out <= limited, "no room on a disk that has it"
            self.model.flushed(skipped)
        self.model.weaken()

    def verify(self) -> None:
        """Everything on disk is read again: what is damaged goes, and only that."""
        if not self.model.has_disk:
            return
        self.model.weaken()
        assert self.admin is not None
        last = list(self.admin.verify())[-1]
        self.note("verify", last.checked, last.damaged, last.unreadable, last.lost)
        assert last.done
        if not self.model.fault:
            assert self.model.spoiled or self.model.broken or not (last.damaged or last.unreadable)
            if not self.model.broken:
                self.model.verified()
        self.model.weaken()

    def flush_and_crash(self) -> None:
        """What a flush vouches for is there afterwards, however full the disk is."""
        self.flush()
        if not self.model.has_disk or self.model.fault:
            return
        assert self.admin is not None
        answer = self.admin.flush(SURELY_SECONDS)
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
        limited = any(space.quotas for space in self.model.spaces)
        moving = self.outstanding or not self.model.keeps or limited
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
        if what == "limit":
            before = dict(space.quotas)
            space.quotas["disk"] = 3 * SLOT_BYTES[at]
            self.model.weaken()
        works: dict[str, Callable[[], Any]] = {
            "put": lambda: player.put(at, keys, blocks, 1.0),
            "flush": lambda: admin.flush(SURELY_SECONDS),
            "bump": lambda: player.bump(at),
            "evict": lambda: player.evict(at, keys, None),
            "pin": lambda: player.pin(at, keys),
            "limit": lambda: player.limit(at, "disk", 3 * SLOT_BYTES[at]),
            "stop": self.daemon.terminate,
        }

        def kill() -> None:
            time.sleep(delay)
            self.daemon.kill()

        result, ended = in_threads([works[what], kill])
        self.note(f"crash after {delay} s of {what} {at}/{name}", repr(result))
        assert ended is None, ended
        if isinstance(result, BaseException) and not isinstance(result, AWAY):
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
        if what == "limit" and isinstance(result, BaseException):
            found = self.quotas(at)
            assert found in (before, space.quotas), f"{found} after {before}"
            space.quotas = found
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
        self.call(partial(self.admin.flush, SURELY_SECONDS))
        self.model.fault = ""
        if self.model.spoiled:
            self.verify()
        self.model.weaken()

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
        calm = not (self.outstanding or self.model.fault or self.model.broken)
        if calm and not any(info.pinned for info in self.stats().spaces):
            until(self.capacity_holds, self.stats)
