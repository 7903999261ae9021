"""The eviction rule as slow, obvious code: lists, sets, and no bookkeeping that could be wrong.

A block's HOST copy may leave if and only if

* nothing uses it: no lease, no mover; and
* no child has a host copy or is partly committed; and
* the block is on disk as well, or this is its last copy, and then it is neither pinned nor waiting
  for the disk, and nobody uses its GPU copy. (One that the disk refused does not wait.)

A block's DISK copy may leave if and only if

* the block is not pinned; and
* nobody reads it; and
* no child is on disk or waits for it; and
* the block is in host as well, or this is its last copy, and then no child is anywhere, not even
  partly committed, and nobody uses its GPU copy.

A block's GPU copy may leave if and only if nobody uses it and no child has one. It is never the last
copy: it goes along when that goes.

The coldest one goes first. A new block needs a parent that is there. A block goes to disk after its
parent; if nothing may leave the disk for it, it is refused there, stays in host only, and so do
its descendants, until they are asked for again.

A space may have a quota in host and on disk. What is granted or brought up counts against it, and
room is made among its own blocks, coldest first, by the same rule. A block goes to disk within the
quota, or in the place of a colder one, or is refused there. A quota that became smaller, and blocks
that nobody used for long, let go what the rule lets go, coldest first.

Keys are texts, and name their chain: the parent of "aab" is "aa". Nothing here imports kvstore.
"""

from __future__ import annotations

__all__ = ["Model", "parent_of"]


def parent_of(key: str) -> str | None:
    return key[:-1] or None


class Model:
    """Blocks in two tiers.

    Attributes:
        order: every block, coldest first.
        host, disk: blocks with a copy there.
        waiting: blocks queued for the disk, first one first.
        refused: blocks that the disk had no room for.
        pinned: blocks whose last copy must stay.
        gpu: blocks with a copy there.
        used, read, gpu_used: per use of a host copy, read of a disk copy, use of a GPU copy, one
            entry.
        partly: keys of which some shards are committed, one entry per slot.
        granted: host slots without a key.
        quotas: most blocks in "host" and on "disk"; None: no limit.
        deaths: blocks that were discarded. What still uses one knows it by another name, such as
            "ab#3"; its copies keep their slots until then.
    """

    def __init__(
        self, host_blocks: int, disk_blocks: int, policy: str, gpu_blocks: int = 0
    ) -> None:
        self.host_blocks, self.disk_blocks, self.policy = host_blocks, disk_blocks, policy
        self.gpu_blocks = gpu_blocks
        self.gpu: set[str] = set()
        self.gpu_used: list[str] = []
        self.order: list[str] = []
        self.host: set[str] = set()
        self.disk: set[str] = set()
        self.waiting: list[str] = []
        self.refused: set[str] = set()
        self.pinned: set[str] = set()
        self.used: list[str] = []
        self.read: list[str] = []
        self.partly: list[str] = []
        self.granted = 0
        self.deaths = 0
        self.quotas: dict[str, int | None] = {"host": None, "disk": None}

    # The rule.

    def has_child(self, key: str, among: set[str] | list[str]) -> bool:
        return any(parent_of(other) == key for other in among)

    def evictable_host(self, key: str) -> bool:
        if key not in self.host or key in self.used:
            return False
        if self.has_child(key, self.host) or self.has_child(key, self.partly):
            return False
        kept = key in self.pinned or key in self.waiting or key in self.gpu_used
        return key in self.disk or not kept

    def evictable_disk(self, key: str) -> bool:
        if key not in self.disk or key in self.read or key in self.pinned:
            return False
        if self.has_child(key, self.disk) or self.has_child(key, self.waiting):
            return False
        if key in self.host:
            return True
        child = self.has_child(key, self.order) or self.has_child(key, self.partly)
        return not child and key not in self.gpu_used

    def evictable_gpu(self, key: str) -> bool:
        return key in self.gpu - set(self.gpu_used) and not self.has_child(key, self.gpu)

    # What follows from it.

    def coldest_host(self) -> str | None:
        return next((k for k in self.order if self.evictable_host(k)), None)

    def coldest_disk(self) -> str | None:
        return next((k for k in self.order if self.evictable_disk(k)), None)

    def coldest_gpu(self) -> str | None:
        return next((k for k in self.order if self.evictable_gpu(k)), None)

    def free_gpu(self) -> int:
        dead = {name for name in self.gpu_used if "#" in name}
        return self.gpu_blocks - len(self.gpu) - len(dead)

    def free_host(self) -> int:
        dead = {name for name in self.used if "#" in name}
        return self.host_blocks - len(self.host) - len(dead) - len(self.partly) - self.granted

    def free_disk(self) -> int:
        return self.disk_blocks - len(self.disk) - len({name for name in self.read if "#" in name})

    def touch(self, run: list[str]) -> None:
        """Tail first, head last."""
        for key in reversed(run):
            self.order.remove(key)
            self.order.append(key)

    def set_quota(self, tier: str, blocks: int | None) -> None:
        self.quotas[tier] = blocks

    def quota_room(self, tier: str) -> int:
        """How many more blocks the quota allows; negative: there are too many."""
        quota = self.quotas[tier]
        if quota is None:
            return 1 << 30
        if tier == "disk":
            return quota - len(self.disk)
        return quota - len(self.host) - self.granted - len(self.partly)

    def make_quota_room(self, wanted: int, protect: list[str]) -> int:
        """Evict until the quota in host allows `wanted` more, or nothing may go; return how many."""
        self.used += protect
        while self.quota_room("host") < wanted and (victim := self.coldest_host()) is not None:
            self.evict_or_enqueue(victim)
        for key in protect:
            self.used.remove(key)
        return max(0, min(wanted, self.quota_room("host")))

    def evict_or_enqueue(self, victim: str) -> None:
        """Under `evict`, what would leave host goes to disk first."""
        to_disk = self.policy == "evict" and self.disk_blocks
        if to_disk and victim not in self.disk | self.refused:
            self.enqueue(victim)
        else:
            self.drop_host(victim)

    def fit(self) -> None:
        """Let go what is too much, as far as the rule lets it."""
        while len(self.host) > (self.quotas["host"] or 0) and self.quotas["host"] is not None:
            victim = self.coldest_host()
            if victim is None:
                break
            self.evict_or_enqueue(victim)
        while self.quota_room("disk") < 0 and (victim := self.coldest_disk()) is not None:
            self.drop_disk(victim)

    def expire(self, count: int) -> None:
        """The `count` coldest blocks were not used for too long."""
        old = set(self.order[:count])
        while (victim := self.coldest_gpu()) is not None and victim in old:
            self.gpu.remove(victim)
        while (victim := self.coldest_host()) is not None and victim in old:
            self.drop_host(victim)
        while (victim := self.coldest_disk()) is not None and victim in old:
            self.drop_disk(victim)

    def make_room(self, wanted: int, protect: list[str] | None = None) -> int:
        """Evict until `wanted` host slots are free, or nothing may go; return how many are."""
        self.used += protect or []
        while self.free_host() < wanted and (victim := self.coldest_host()) is not None:
            self.evict_or_enqueue(victim)
        for key in protect or []:
            self.used.remove(key)
        return min(wanted, self.free_host())

    def reserve(self, wanted: int, protect: list[str]) -> int:
        """Grant up to `wanted` slots; the chains that end in `protect` stay."""
        # A protected block that is on disk stays there without its host copy, and its chain too.
        # One that is not keeps its chain by its host copy: each of them has a child in host.
        held = [k for k in protect if k in self.host - self.disk]
        allowed = self.make_quota_room(wanted, held)
        got = self.make_room(allowed, held) if allowed else 0
        if got < wanted and self.policy == "evict" and self.disk_blocks:
            # The only blocks that could leave may be the protected ones: once they are on disk
            # their host copies can go, so that a chain may be longer than the host tier.
            for key in held:
                if key not in self.refused:
                    self.enqueue(key)
        self.granted += got
        return got

    def commit(self, key: str, *, partly: bool = False) -> str:
        """Bind a granted slot to a key: some of its shards (`partly`), or all at once."""
        self.granted -= 1
        parent = parent_of(key)
        if key in self.order:
            return "exists"
        if parent is not None and parent not in self.order and parent not in self.partly:
            return "parent missing"
        self.partly.append(key)
        return "waiting" if partly else self.complete(key)

    def complete(self, key: str) -> str:
        """The last shard of a slot is committed."""
        self.partly.remove(key)
        parent = parent_of(key)
        if key in self.order:
            return "exists"
        if parent is not None and parent not in self.order:
            return "parent missing"
        self.order.append(key)
        self.host.add(key)
        if parent is not None:
            self.touch([parent])
        if self.policy == "through" and self.disk_blocks:
            if parent in self.refused:
                self.refused.add(key)
            else:
                self.enqueue(key)
        return "committed"

    def enqueue(self, key: str) -> None:
        """Queue a block for the disk, behind those of its ancestors that are not there."""
        if key in self.disk or key in self.waiting:
            return
        parent = parent_of(key)
        if parent is not None:
            self.enqueue(parent)
        self.waiting.append(key)
        self.refused.discard(key)

    def flush_step(self) -> str:
        """Bring the first waiting block to disk, or refuse it."""
        key = self.waiting[0]
        if parent_of(key) not in self.disk | {None}:
            return self.refuse(key)
        if self.quota_room("disk") <= 0:
            colder = self.order[: self.order.index(key)]
            while self.quota_room("disk") <= 0:
                victim = self.coldest_disk()
                if victim not in colder:
                    return self.refuse(key)
                self.drop_disk(victim)
        if self.free_disk() == 0:
            victim = self.coldest_disk()
            if victim is not None:
                self.drop_disk(victim)
            if self.free_disk() == 0:
                return "busy" if self.read else self.refuse(key)
        self.waiting.remove(key)
        self.disk.add(key)
        return "flushed"

    def refuse(self, key: str) -> str:
        self.waiting.remove(key)
        self.refused.add(key)
        return "refused"

    def promote(self, key: str) -> bool:
        """Give a block that is on disk a host copy."""
        self.read.append(key)
        room = key not in self.host and self.make_quota_room(1, []) == 1 == self.make_room(1)
        self.read.remove(key)
        if room:
            self.host.add(key)
        return room

    def load_gpu(self, key: str) -> bool:
        """Give a block that is in host a GPU copy."""
        if not self.free_gpu() and (victim := self.coldest_gpu()) is not None:
            self.gpu.remove(victim)
        room = self.free_gpu() > 0
        if room:
            self.gpu.add(key)
        return room

    def hold_gpu(self, key: str) -> None:
        self.gpu_used.append(key)

    def release_gpu(self, name: str) -> None:
        self.gpu_used.remove(name)

    def hold(self, run: list[str]) -> None:
        self.used += run

    def release(self, run: list[str]) -> None:
        for name in run:
            self.used.remove(name)

    def begin_read(self, key: str) -> None:
        self.read.append(key)

    def end_read(self, name: str) -> None:
        self.read.remove(name)

    def pin(self, run: list[str]) -> None:
        self.pinned |= set(run)

    def unpin(self, key: str) -> None:
        self.pinned.discard(key)

    def abort(self) -> None:
        self.granted -= 1

    def abort_partly(self, key: str) -> None:
        self.partly.remove(key)

    def drop_host(self, key: str) -> None:
        assert not self.has_child(key, self.host), "a head must outlive its tail"
        self.host.remove(key)
        if key not in self.disk:
            self.lose(key)

    def drop_disk(self, key: str) -> None:
        assert key not in self.pinned, "what is pinned survives a crash if it is on disk"
        self.disk.remove(key)
        if key in self.host:
            self.refused.add(key)
        else:
            self.lose(key)

    def evict(self, keys: list[str], tier: str) -> None:
        """Drop the copies that may go, as often as dropping some sets others free."""
        may_go = {
            "gpu": self.evictable_gpu,
            "host": self.evictable_host,
            "disk": self.evictable_disk,
        }[tier]
        drop = {"gpu": self.gpu.remove, "host": self.drop_host, "disk": self.drop_disk}[tier]
        while going := [k for k in keys if may_go(k)]:
            drop(going[0])

    def lose(self, key: str) -> None:
        """The last copy went."""
        assert not self.has_child(key, self.order), "a block lost its parent"
        assert not self.has_child(key, self.partly), "a block on its way lost its parent"
        assert key not in self.pinned
        assert key not in self.gpu_used
        assert not self.has_child(key, self.gpu)
        self.forget(key)

    def discard(self, key: str) -> dict[str, str]:
        """A block is damaged: it goes, and all that hangs on it, whoever uses it.

        Returns:
            the other names of those that went.
        """
        names = {}
        for victim in [k for k in self.order if k.startswith(key)]:
            self.deaths += 1
            names[victim] = f"{victim}#{self.deaths}"
            self.used = [names.get(k, k) for k in self.used]
            self.read = [names.get(k, k) for k in self.read]
            self.gpu_used = [names.get(k, k) for k in self.gpu_used]
            self.host.discard(victim)
            self.disk.discard(victim)
            self.forget(victim)
        return names

    def forget(self, key: str) -> None:
        self.order.remove(key)
        self.gpu.discard(key)
        self.refused.discard(key)
        self.pinned.discard(key)
        if key in self.waiting:
            self.waiting.remove(key)
