"""Explains where a leading run ends: of given keys, as things are, or of a recent acquire, as it was.

Reads what others own: the index and its ghosts, `Grants` for shards under way, the promoter's path
for predictions, `RecentAcquires`. Owns nothing, changes nothing, counts no hit and no miss. It is
for people: it may look at every space once (10,000 of them take milliseconds).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.engine.explanation import (
    Explanation,
    OtherSpace,
    forecast_words,
    miss_words,
)
from kvstore.engine.misses import NO_MISS, miss_of
from kvstore.errors import InvalidRequest
from kvstore.index import Pressure
from kvstore.miss import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.engine import Engine
    from kvstore.engine.recent import RecentAcquire
    from kvstore.index import Block, SpaceIndex
    from kvstore.space import Difference

__all__ = ["explain_keys", "explain_request"]

_MOST_OTHERS: Final = 10
# What the bytes of a key depend on, beyond tokens: spaces that differ here cannot be compared.
_KEY_FIELDS: Final = {"block_tokens", "hash_algorithm", "root_seed", "key_bytes"}
_UNSEEN: Final = {MissReason.NEVER_SEEN, MissReason.FORGOTTEN}


def explain_keys(
    engine: Engine, space: SpaceIndex, epoch: int, keys: Sequence[bytes]
) -> Explanation:
    """Explain keys as things are now.

    Args:
        engine: whose.
        space: that the keys are of.
        epoch: of the space, as the caller knows it.
        keys: at least one, in chain order.
    """
    if epoch != space.epoch:
        miss = Miss(MissReason.OTHER_EPOCH)
        line = f"other epoch: the space is at epoch {space.epoch}, not {epoch}; what was stored "
        return Explanation(
            space, len(keys), 0, miss, keys[0], [f"{line}before is out of reach for ever"], []
        )
    run = space.run(keys)
    lines = [_how_far(space, run, len(keys)), *_slow(engine, run)]
    if len(run) == len(keys):
        return Explanation(space, len(keys), len(run), NO_MISS, b"", lines, [])
    key = keys[len(run)]
    miss, why = _missing(engine, space, key)
    lines.append(f"block {len(run)} ({key.hex()[:16]}): {why}")
    others = _others(engine, space, key, keys, miss)
    lines.extend(_other_words(others))
    return Explanation(space, len(keys), len(run), miss, key, lines, others)


def explain_request(engine: Engine, request_id: str) -> Explanation:
    """Explain what a recent request's leases came to, and how things are now.

    Raises:
        InvalidRequest: it is not among the recent ones.
    """
    entries = engine.leases.recent.find(request_id)
    if not entries:
        raise InvalidRequest(
            "request_id",
            f"{request_id!r} is none of the last {len(engine.leases.recent):,} acquires",
        )
    lines = [_entry_words(entry) for entry in entries]
    last = entries[-1]
    space, others = last.space, list[OtherSpace]()
    if last.key:
        if last.key in space.blocks:
            block = space.blocks[last.key]
            coming = block.host is None and engine.afterwards and block in engine.afterwards
            lines.append(
                f"now: block {last.blocks} is there, in {block.fastest_tier.name.lower()}"
                + ("; it is to be brought to memory" if coming else "")
            )
        else:
            miss, why = _missing(engine, space, last.key)
            lines.append(f"now: {why}")
            others = _others(engine, space, last.key, None, miss, last.blocks + 1)
            lines.extend(_other_words(others))
    return Explanation(space, last.asked, last.blocks, last.miss, last.key, lines, others)


def _how_far(space: SpaceIndex, run: Sequence[Block], asked: int) -> str:
    tiers = Counter(block.fastest_tier for block in run)
    where = ", ".join(f"{tiers[tier]:,} in {tier.name.lower()}" for tier in sorted(tiers))
    tokens = len(run) * space.spec.block_tokens
    there = f": {where}" if where else ""
    return f"{len(run):,} of {asked:,} blocks are there ({tokens:,} tokens){there}"


def _slow(engine: Engine, run: Sequence[Block]) -> Iterator[str]:
    """Say what may keep blocks that are there from being used."""
    here = [block.host is not None or block.gpu is not None for block in run]
    forecast = engine.worth.forecast(run, here, 0.0, 0)
    if forecast is not None:
        tokens = forecast.blocks * run[0].space.spec.block_tokens
        pays = tokens / max(forecast.load_seconds, 1e-9)
        yield (
            f"{forecast_words(forecast)}, as predicted now: "
            f"worth it for who computes less than {pays:,.0f} tokens/s"
        )
        stalled = engine.worth.stalled_seconds()
        if stalled:
            yield f"reads from disk have stalled for {stalled:.1f} s: nobody waits for them"
        if engine.disk is not None and engine.disk.state != "ok":
            yield f"the disk tier is {engine.disk.state}: expect I/O errors"
    if run:
        cap = engine.leases.cap_bytes // run[0].space.shape.block_bytes
        if len(run) > cap:
            yield f"lease cap: a client's leases hold {cap:,} blocks at a time"


def _missing(engine: Engine, space: SpaceIndex, key: bytes) -> tuple[Miss, str]:
    """Say why a block is not there, or does not continue the run."""
    miss = miss_of(engine.index, space, key)
    if key in space.blocks:
        return miss, "a block of that key is there, but it hangs on another one: another chain's"
    ghost = engine.index.ghosts.get(space.id, key)
    why = miss_words(miss)
    if ghost is not None:
        why = miss_words(miss, ghost.pressure, unused_seconds=ghost.unused_seconds)
    if miss.reason is MissReason.NOT_READY:
        shards = space.shape.shards
        for missing, writers in engine.grants.under_way(space, key):
            listed = ", ".join(map(str, missing))
            whose = ", ".join(f"{w.client} ({w.state.value})" for w in writers)
            why += f"; missing of {shards} shards: {listed}, from {whose or 'the daemon'}"
    return miss, why


def _others(
    engine: Engine,
    space: SpaceIndex,
    key: bytes,
    keys: Sequence[bytes] | None,
    miss: Miss,
    blocks: int = 0,
) -> list[OtherSpace]:
    """Return other spaces that hold a block; if none does, those that name it differently."""
    holders: list[tuple[SpaceIndex, tuple[Difference, ...]]] = []
    relatives: list[tuple[SpaceIndex, tuple[Difference, ...]]] = []
    for other in engine.index.spaces.values():
        if other is space or not other.blocks:
            continue
        if key in other.blocks:
            holders.append((other, space.spec.differences(other.spec)))
        elif other.spec.model == space.spec.model and miss.reason in _UNSEEN:
            differ = space.spec.differences(other.spec)
            if any(d.field in _KEY_FIELDS for d in differ):
                relatives.append((other, differ))
    found = heapq.nsmallest(
        _MOST_OTHERS, holders or relatives, key=lambda it: (len(it[1]), -len(it[0].blocks))
    )
    if not holders:
        return [OtherSpace(other, 0, differ) for other, differ in found]
    return [
        OtherSpace(other, blocks if keys is None else len(other.run(keys)), differ)
        for other, differ in found
    ]


def _other_words(others: Sequence[OtherSpace]) -> Iterator[str]:
    for other in others:
        what = "; ".join(
            f"{d.field} is {d.here!r} here, {d.there!r} there" for d in other.differences
        )
        name = other.space.id.hex()[:12]
        if other.blocks:
            yield f"other space {name} holds {other.blocks:,} of these blocks: {what}"
        else:
            yield f"other space {name} of this model names blocks differently: {what}"


def _entry_words(entry: RecentAcquire) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.unix_seconds))
    why = miss_words(entry.miss, Pressure.NONE, entry.forecast, entry.deadline_seconds)
    ended = f"block {entry.blocks}: " if entry.key else ""
    return (
        f"{at} {entry.client}, lease {entry.lease_id}, space {entry.space.id.hex()[:12]} "
        f"epoch {entry.epoch}: {entry.blocks:,} of {entry.asked:,} blocks; {ended}{why}"
    )
