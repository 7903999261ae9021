"""Stories of caches that served somebody else's KV, or bytes that were not what was stored."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from engine_world import World, chain
from told_blocks import BLOCK_BYTES, bytes_of, spec_of

from kvstore import Client, Keys, StaleEpoch, chain_keys, keys
from kvstore.attach.held import Held
from kvstore.attach.slabs import SlabTable
from kvstore.client import Space
from kvstore.outcomes import CommitOutcome
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.wire import pack_chain_parents, slot_array

Until = Callable[..., None]

TOKENS = list(range(100, 132))  # eight blocks
HEADER_BYTES = 4096  # of a segment


def _cold(client: Client, space: Space, run: Keys) -> None:
    """Leave a run on disk only."""
    assert client.flush(30).done
    assert space.evict(run, "host").skipped == 0
    assert set(space.lookup(run).tiers) == {"disk"}


def _right(space: Space, tokens: list[int]) -> int:
    """Return how many blocks of a prompt come back; their bytes must be right."""
    got = space.get(chain_keys(tokens, 4), timeout_s=30.0)
    assert np.array_equal(got, bytes_of(tokens)[: len(got)])
    return len(got)


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize(
    "kind", [FaultKind.IO_ERROR, FaultKind.SHORT_READ, FaultKind.BIT_FLIP, FaultKind.UNAVAILABLE]
)
def test_a_failed_transfer_was_counted_as_loaded(
    make_world: Callable[..., World], kind: FaultKind, at: int
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        run = chain("failed", 8)
        assert await player.put(run) == 8
        await world.evict_host()
        # The whole device fails, or one block of the batch does.
        world.disk.plan.append(Fault(kind, "read", block=at))
        expected = 0 if kind is FaultKind.UNAVAILABLE else at
        assert await player.load(run, deadline=30.0) == expected  # compares the bytes
        world.disk.plan.clear()
        await world.settle()
        assert world.engine.index.host_held == world.engine.index.disk_held == 0
        # Damage is forgotten; what could not be read is there again once the device works.
        left = at if kind is FaultKind.BIT_FLIP else 8
        assert await player.load(run, deadline=30.0) == left

    make_world(wrap=Faulty).run(story)


@pytest.mark.parametrize("how", ["removed", "truncated", "a directory in its place"])
def test_a_block_vanished_between_lookup_and_get(
    start_daemon: Any, tmp_path: Path, how: str
) -> None:
    disk = tmp_path / "disk"
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "64MiB")
    run = chain_keys(TOKENS, 4)
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(run, bytes_of(TOKENS)) == 8
        _cold(client, space, run)
        assert space.lookup(run).blocks == 8
        for segment in disk.glob("seg-*.kvs"):
            if how == "truncated":
                os.truncate(segment, HEADER_BYTES)
                continue
            segment.unlink()
            if how != "removed":
                segment.mkdir()
        got = _right(space, TOKENS)
        assert got < 8
        # It goes on: what is stored now is had again, from disk too.
        more = list(range(500, 532))
        assert space.put(chain_keys(more, 4), bytes_of(more)) == 8
        assert _right(space, more) == 8
    # And after a restart, whatever became of the directory.
    assert daemon.stop() == 0
    for segment in disk.glob("seg-*.kvs"):
        if segment.is_dir():
            shutil.rmtree(segment)
    daemon.start()
    with Client(daemon.address) as client:
        _right(client.open_space(spec_of()), TOKENS)
        _right(client.open_space(spec_of()), more)


OTHER: dict[str, Any] = {
    "model": "another",
    "weights_version": "r2",
    "dtype": "fp8",
    "block_tokens": 8,
    "shard_bytes": (BLOCK_BYTES // 2, BLOCK_BYTES // 2),
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "layout": "LBHNC",
    "kv_group": "1",
    "root_seed": "other",
    "tenant": "b",
}


def test_same_model_name_other_weights_or_layout_or_any_other_field_misses(daemon: Any) -> None:
    """Also: the key omitted dtype, TP, block size; the layout changed and the byte size did not."""
    run = chain_keys(TOKENS, 4)
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(run, bytes_of(TOKENS)) == 8
        for field, value in OTHER.items():
            other = client.open_space(spec_of(**{field: value}))
            assert other.spec.fingerprint != space.spec.fingerprint
            assert other.lookup(run).blocks == 0, field
            assert len(other.get(run)) == 0, field
        assert _right(space, TOKENS) == 8


def test_the_key_omitted_lora_or_image_or_salt(daemon: Any) -> None:
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(chain_keys(TOKENS, 4), bytes_of(TOKENS)) == 8
        for salt in (b"lora:sql", b"image:2f", b"tenant a", b"\0"):
            salted = chain_keys(TOKENS, 4, salt=salt)
            assert space.lookup(salted).blocks == 0
            assert len(space.get(salted)) == 0
        assert _right(space, TOKENS) == 8


@pytest.mark.parametrize("mapped", [True, False])
def test_a_hash_of_8_bits_collides_all_the_time(
    daemon: Any, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Foreign bytes come only under a key path that is the same from the first block on.

    Those cannot be told apart: that is what SHA-256 keys are for.
    """

    def weak(data: bytes) -> bytes:
        return (1 + xxhash.xxh3_64_intdigest(data) % 255).to_bytes(1, "little") * 16

    monkeypatch.setitem(keys.HASH_ALGORITHMS, "xxh3-128", weak)
    dice = random.Random(8)
    prompts: list[list[int]] = []
    while len(prompts) < 150:
        tokens = [dice.randrange(50_000) for _ in range(4 * dice.randint(2, 6))]
        run = chain_keys(tokens, 4)
        if len(set(run)) == len(run):  # a key twice is no chain, and refused as such
            prompts.append(tokens)
    with Client(daemon.address, map_memory=mapped) as client:
        space = client.open_space(spec_of())
        elsewhere = client.open_space(spec_of(weights_version="r2"))
        paths: dict[bytes, list[bytes]] = {}
        stored = foreign = 0
        for tokens in prompts:
            run, blocks = chain_keys(tokens, 4), bytes_of(tokens)
            stored += space.put(run, blocks)
            for i, block in enumerate(blocks):
                paths.setdefault(run[: i + 1].packed, []).append(block.tobytes())
        for tokens in prompts:
            run = chain_keys(tokens, 4)
            assert elsewhere.lookup(run).blocks == 0
            got, mine = space.get(run), bytes_of(tokens)
            for i, block in enumerate(got):
                if not np.array_equal(block, mine[i]):
                    foreign += 1
                    assert block.tobytes() in paths[run[: i + 1].packed]
            # A continuation is told apart by what it hangs on.
            for i, block in enumerate(space.get(run[1:]), 1):
                assert block.tobytes() in paths[run[: i + 1].packed]
    assert stored > 150
    assert foreign  # else nothing collided, and the test shows nothing


def test_weights_updated_in_place_old_kv_kept(start_daemon: Any, tmp_path: Path) -> None:
    daemon = start_daemon("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB")
    run, later = chain_keys(TOKENS, 4), chain_keys(range(900, 908), 4)
    with Client(daemon.address) as client, Client(daemon.address) as trainer:
        space = client.open_space(spec_of())
        assert space.put(run, bytes_of(TOKENS)) == 8
        assert client.flush(30).done
        # A store that began under the old weights, and ends after the bump.
        assert client.attachment.wait_active(30)
        grant = space.reserve(2, deadline_s=5.0).result(30)
        assert len(grant.slots) == 2
        new = trainer.open_space(spec_of()).bump_epoch()
        late = client.attachment.commit(
            space, grant.owner_id, grant.id, None, grant.slots, later, pack_chain_parents(later)
        )
        assert set(late.result(30)) == {CommitOutcome.ABORTED}
        for stale in (lambda: space.get(run), lambda: space.put(run, bytes_of(TOKENS))):
            with pytest.raises(StaleEpoch):
                stale()
        assert new.lookup(run).blocks == new.lookup(later).blocks == 0
        assert client.stats().granted_slots == 0
    for end in (daemon.stop, daemon.kill):
        end()
        daemon.start()
        with Client(daemon.address) as client:
            space = client.open_space(spec_of())
            assert space.ref.epoch == new.ref.epoch
            assert space.lookup(run).blocks == space.lookup(later).blocks == 0
            assert len(space.get(run)) == 0


def _damage(segments: list[Path], how: str, dice: random.Random) -> None:
    """Damage some of the slots that hold blocks of the prompt."""
    blocks = {block.tobytes() for block in bytes_of(TOKENS)}
    for segment in segments:
        data = bytearray(segment.read_bytes())
        places = range(HEADER_BYTES, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES)
        held = [at for at in places if bytes(data[at : at + BLOCK_BYTES]) in blocks]
        if len(held) < 2:
            continue
        one, other = (slice(at, at + BLOCK_BYTES) for at in dice.sample(held, 2))
        if how == "flipped":
            data[one.start + dice.randrange(BLOCK_BYTES)] ^= 1 << dice.randrange(8)
        elif how == "truncated":
            del data[min(held) + dice.randrange(len(held) * BLOCK_BYTES) :]
        else:
            data[one], data[other] = data[other], data[one]
        segment.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "truncated", "swapped"])
def test_right_length_wrong_bytes_unnoticed(start_daemon: Any, tmp_path: Path, how: str) -> None:
    """Damage while the daemon runs, then more of it while it is stopped."""
    disk = tmp_path / "disk"
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "64MiB", "--no-save-host")
    dice = random.Random(how)
    run = chain_keys(TOKENS, 4)
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(run, bytes_of(TOKENS)) == 8
        _cold(client, space, run)
        _damage(sorted(disk.glob("seg-*.kvs")), how, dice)
        assert _right(space, TOKENS) < 8
        stats = client.stats()
        [tier] = [t for t in stats.tiers if t.tier == pb.TIER_DISK]
        assert stats.counters["corrupt_blocks"] + tier.io_errors + tier.corrupt_blocks
        assert space.put(run, bytes_of(TOKENS)) == 8
        assert client.flush(30).done
    daemon.stop()
    _damage(sorted(disk.glob("seg-*.kvs")), how, dice)
    daemon.start()
    with Client(daemon.address) as client:
        assert _right(client.open_space(spec_of()), TOKENS) < 8


@pytest.mark.parametrize("point", ["flush.written", "blocks.put"])
def test_killed_between_the_write_of_the_data_and_the_commit_of_the_index(
    start_daemon: Any, tmp_path: Path, until: Until, point: str
) -> None:
    here = tmp_path / "here"
    options = ("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB")
    daemon = start_daemon(*options, KVSTORE_SYNC_POINT=f"{point}:{here}")
    run = chain_keys(TOKENS, 4)
    with Client(daemon.address) as client:
        assert client.open_space(spec_of()).put(run, bytes_of(TOKENS)) == 8
        until(here.exists, 60)
    daemon.signal(signal.SIGKILL)
    daemon.kill()
    daemon.environment.clear()
    daemon.start()
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        # No record named the bytes: a miss; what is stored into the same slots is right.
        assert _right(space, TOKENS) == 0
        other = list(range(700, 732))
        assert space.put(chain_keys(other, 4), bytes_of(other)) == 8
        _cold(client, space, chain_keys(other, 4))
        assert _right(space, other) == 8
        assert _right(space, TOKENS) == 0


@pytest.mark.parametrize("data_offset", [4096, 12288])
def test_the_interior_offset_of_a_pool_was_lost(tmp_path: Path, data_offset: int) -> None:
    """Slots begin where the slab says, not where its memory begins."""
    slots, size = 6, 4096
    path = tmp_path / "slab"
    whole = np.zeros(data_offset + slots * size, np.uint8)
    for index in range(slots):
        whole[data_offset + index * size :][:size] = index + 1
    whole[: 8 * slots].view(np.uint64)[:] = 5
    path.write_bytes(whole.tobytes())
    table = SlabTable(lambda _groups: None)
    slab = pb.Slab(
        group=1, tier=pb.TIER_HOST, slot_bytes=size, slots=slots, path=str(path),
        data_offset=data_offset, length=len(whole),
    )  # fmt: skip
    table.announce(slab)
    wanted = slot_array((1, index, 5) for index in (4, 0, 5))
    with Held(table, wanted) as held:
        assert held.current(0).all()
        for index, address in zip((4, 0, 5), held.addresses(0).tolist(), strict=True):
            mapping = table.slab(1, 0).mapping
            view = mapping.view(address - mapping.address, size)
            assert bytes(view) == bytes([index + 1]) * size
            view.release()
    table.end("over", lambda: None)


def test_every_pair_of_slots_of_a_lease_is_somewhere_else(daemon: Any) -> None:
    with Client(daemon.address) as client:
        space = client.open_space(spec_of(shard_bytes=(4096, 8192)))
        assert client.attachment.wait_active(30)
        grant = space.reserve(40, deadline_s=10.0).result(30)
        using = client.attachment.using(
            grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id
        )
        with using as held:
            places = [
                (int(at), int(at) + size)
                for shard, size in enumerate((4096, 8192))
                for at in held.addresses(shard)
            ]
        for (_, end), (begin, _) in itertools.pairwise(sorted(places)):
            assert end <= begin
