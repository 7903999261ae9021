"""One example's world: a daemon, clients that live through its restarts, the model beside it.

Answers are compared with `oracle_model` here; what is done, and when, is in the rules
(`oracle_holding`, `oracle_machine`). In the end everybody lets go, and nothing may be left: no
lease, no grant, no slot, no mapping, no line of a traceback in the daemon's log.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import StopTest
from hypothesis.stateful import RuleBasedStateMachine
from oracle_crowd import Victim
from oracle_daemon import ForkedDaemon
from oracle_model import CHAINS, LONGEST, SPECS, Model, SpaceModel, keys_of
from oracle_players import AsyncPlayer, MappedPlayer, Player, StreamingPlayer, told_quotas

from kvstore import Client, Keys
from kvstore.attach import Grant, Lease
from kvstore.errors import AttachmentLost, DeadlineExceeded, ServerUnavailable
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["AWAY", "SURELY_SECONDS", "OracleWorld", "chains", "lengths", "spaces", "until"]

T = TypeVar("T")

ROOT = Path(os.environ.get("KVSTORE_TEST_ORACLE_DIR", "/dev/shm"))
PATIENCE_SECONDS = 60.0
# For what cannot fail for want of time, on any machine.
SURELY_SECONDS = 30.0
# What a call raises while a daemon is away.
AWAY = (ServerUnavailable, AttachmentLost, DeadlineExceeded)

spaces = st.integers(0, len(SPECS) - 1)
chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, LONGEST)


def until(what: Callable[[], bool], why: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < end, f"still not so: {why()}"
        time.sleep(0.005)


class OracleWorld(RuleBasedStateMachine):
    """What rules work with; it has none itself."""

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
        self.sabotage: Callable[[], None] | None = None

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
            except AWAY:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def stats(self) -> pb.StatsResponse:
        assert self.admin is not None
        return self.call(self.admin.stats)

    def tier(self, tier: int, stats: pb.StatsResponse | None = None) -> pb.TierStats:
        found = [t for t in (stats or self.stats()).tiers if t.tier == tier]
        return found[0] if found else pb.TierStats()

    def info(self, at: int, stats: pb.StatsResponse | None = None) -> pb.SpaceInfo:
        wanted = SPECS[at].fingerprint
        return next(i for i in (stats or self.stats()).spaces if i.space.id == wanted)

    def quotas(self, at: int) -> dict[str, int]:
        """Return the quotas that the daemon says were set for a space."""
        return told_quotas(self.info(at).own_limits)

    def quotas_hold(self) -> bool:
        """Whether no space has more than its quotas."""
        stats = self.stats()
        return all(
            getattr(self.info(space.number, stats), f"bytes_{tier}") <= size
            for space in self.model.spaces
            for tier, size in space.quotas.items()
        )

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
        # The handles of before the restart go on, and what was promised is there.
        for who in (0, 2):
            for space in self.model.spaces:
                for name in range(who // 2, CHAINS, 2):
                    self.look(who, space, keys_of(name))
        assert self.reopen() == [space.epoch for space in self.model.spaces]
        told = [self.quotas(space.number) for space in self.model.spaces]
        assert told == [space.quotas for space in self.model.spaces]

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

    def abort(self, grant: Grant) -> None:
        self.mapped.client.attachment.abort(
            grant.owner_id, grant.id, grant.slots, all_shards=True
        ).result(PATIENCE_SECONDS)

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

    def recovered(self) -> bool:
        """Whether the tiers are well, and a flush leaves nothing out for which there is room."""
        assert self.admin is not None
        flushed = self.admin.flush(SURELY_SECONDS)
        if self.model.disk_fits and not self.model.broken and flushed.skipped:
            return False
        return self.model.broken or all(tier.state == "ok" for tier in self.stats().tiers)

    def capacity_holds(self) -> bool:
        """Whether every tier keeps to its size; after a shrink it may take a moment."""
        tiers = self.stats().tiers
        return all(max(t.used_bytes, t.allocated_bytes) <= t.capacity_bytes for t in tiers)

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
        error = sys.exc_info()[1]
        # Hypothesis ends an example that has grown too long by raising.
        failed = error is not None and not isinstance(error, StopTest)
        try:
            if failed:
                print("\n".join(["", *self.trace, repr(error)]), file=sys.stderr)
                log = self.daemon.log.read_text().splitlines()
                print("\n".join(log[-60:]), file=sys.stderr)
            elif self.players:
                self.finish()
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        """End everything and remove it."""
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
        for at in range(len(SPECS)):
            self.call(partial(self.mapped.unpin, at))
        until(self.quotas_hold, self.stats)
        for space in self.model.spaces:
            for tier in list(space.quotas):
                self.call(partial(self.mapped.limit, space.number, tier, None))
        until(self.numbers_fit, self.stats)
        # What failed works again by itself, and what it left undone is done.
        until(self.recovered, self.stats)

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
