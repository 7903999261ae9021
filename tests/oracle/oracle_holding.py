"""Rules about who holds what: leases read late, grants settled late, processes that die with both."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from oracle_crowd import Victim
from oracle_model import SPECS, keys_of
from oracle_world import PATIENCE_SECONDS, OracleWorld, chains, lengths, spaces, until

from kvstore.errors import AttachmentLost
from kvstore.memory import copy_batch
from kvstore.outcomes import CommitOutcome

__all__ = ["HoldingMachine"]

indices = st.integers(0, 7)


class HoldingMachine(OracleWorld):
    """Leases and grants of this process, and victims that hold theirs."""

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
