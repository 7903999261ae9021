"""What the store keeps, and how it behaves when the machine does not play along."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, KVStoreError, UnknownSpace
from kvstore.index import SpaceLimits, records
from kvstore.index.lmdb_env import LmdbEnv
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.index.records import BlockRecord, PinRecord, UsesRecord, pin_name
from kvstore.space import SpaceSpec

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
STORE = b"s" * 16
SPEC = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096, 4096))
OTHER = SpaceSpec(model="n", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,))


def make_blocks(count: int, seed: int = 0, space_id: bytes = SPEC.fingerprint) -> list[BlockRecord]:
    rng = random.Random(seed)
    chain, parent = [], None
    for i in range(count):
        key = rng.randbytes(16)
        digests = (rng.getrandbits(64), rng.getrandbits(64))
        chain.append(BlockRecord(space_id, key, parent, 1, i // 64, i % 64, digests, i))
        parent = key
    return chain


def by_key(records: list[BlockRecord]) -> dict[tuple[bytes, bytes], BlockRecord]:
    return {(record.space_id, record.key): record for record in records}


def test_spaces_pins_epochs_and_blocks_are_there_after_reopening(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    first, second = store.put_space(SPEC), store.put_space(OTHER)
    assert (first.number, second.number, first.epoch) == (1, 2, 1)
    assert store.put_space(SPEC) == first
    assert store.bump_epoch(first.space_id) == 2
    blocks = make_blocks(100) + make_blocks(50, 1, OTHER.fingerprint)
    store.commit_blocks(STORE, blocks, [])
    store.commit_blocks(b"t" * 16, blocks[:3], [])
    pins = [PinRecord(first.space_id, b"k" * 16, 0.0), PinRecord(second.space_id, b"l" * 16, 12.5)]
    store.put_pins(pins)
    store.mark_clean()
    store.close()

    store, note = MetaStore.open_or_reset(tmp_path)
    assert (note, store.was_clean, store.damaged) == (None, True, 0)
    assert [(r.spec, r.epoch) for r in store.spaces()] == [(SPEC, 2), (OTHER, 1)]
    assert store.pins() == pins
    assert by_key(store.load_blocks(STORE).records) == by_key(blocks)
    assert sorted(store.stores()) == [STORE, b"t" * 16]
    store.delete_pins([(first.space_id, b"k" * 16), (first.space_id, b"unknown"), (b"?", b"?")])
    assert store.pins() == pins[1:]
    store.clear_store(STORE)
    assert store.load_blocks(STORE).records == []
    assert len(store.load_blocks(b"t" * 16).records) == 3
    assert store.load_blocks(b"never seen").records == []
    store.close()


@pytest.mark.parametrize("store_id", [b"\x00" * 16, b"ab\x00" + b"c" * 13, b"\xff" * 128])
def test_the_blocks_of_a_store_are_found_again_whatever_its_id(
    tmp_path: Path, store_id: bytes
) -> None:
    """One random id in sixteen has a zero byte, where LMDB ends a name."""
    blocks = make_blocks(5)
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    store.commit_blocks(store_id, blocks, [])
    store.close()
    store = MetaStore.open(tmp_path)
    assert by_key(store.load_blocks(store_id).records) == by_key(blocks)
    assert store.stores() == [store_id]
    store.close()


def test_a_block_that_moved_keeps_its_new_place(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    old, gone = make_blocks(2)
    moved = BlockRecord(space_id, old.key, None, 1, 9, 9, old.digests, 5)
    store.commit_blocks(STORE, [old, gone], [])
    store.commit_blocks(STORE, [moved], [(space_id, old.key), (space_id, gone.key)])
    assert store.load_blocks(STORE).records == [moved]
    store.close()


def test_one_bad_record_leaves_the_whole_group_out(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    good = make_blocks(3)
    bad = BlockRecord(space_id, b"k" * 16, None, 1, -1, 0, (), 0)
    stranger = make_blocks(1, 2, OTHER.fingerprint)
    with pytest.raises(ValueError, match="does not fit"):
        store.commit_blocks(STORE, [*good, bad], [])
    with pytest.raises(UnknownSpace):
        store.commit_blocks(STORE, [*good, *stranger], [])
    with pytest.raises(UnknownSpace):
        store.put_pins([PinRecord(OTHER.fingerprint, b"k" * 16, 0.0)])
    with pytest.raises(UnknownSpace):
        store.bump_epoch(OTHER.fingerprint)
    assert store.load_blocks(STORE).records == []
    store.close()


def test_the_map_grows_in_the_middle_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.index.lmdb_env._FIRST_MAP_BYTES", 64 << 10)
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    small, large = make_blocks(20), make_blocks(20_000, 1)
    store.commit_blocks(STORE, small, [])
    store.commit_blocks(STORE, large, [(r.space_id, r.key) for r in small])
    assert (tmp_path / "index.mdb/data.mdb").stat().st_size > 1 << 20
    assert by_key(store.load_blocks(STORE).records) == by_key(large)
    for number in range(40):  # each store is a database of its own: the list of them grows too
        store.commit_blocks(b"store %d" % number, small, [])
    assert len(store.stores()) == 41
    store.close()
    store = MetaStore.open(tmp_path)
    assert by_key(store.load_blocks(STORE).records) == by_key(large)
    store.close()


def test_a_full_device_refuses_the_group_and_takes_it_when_there_is_room(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    before, group = make_blocks(10), make_blocks(20_000, 1)
    store.commit_blocks(STORE, before, [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, limits[1]))
    try:
        with pytest.raises(StoreDamaged) as error:
            store.commit_blocks(STORE, group, [(r.space_id, r.key) for r in before])
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
        assert error.value.errno > 0
        assert by_key(store.load_blocks(STORE).records) == by_key(before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.commit_blocks(STORE, group, [(r.space_id, r.key) for r in before])
    assert by_key(store.load_blocks(STORE).records) == by_key(group)
    store.close()


def refusals(store: MetaStore) -> list[str]:
    calls: list[Callable[[], object]] = [
        store.spaces,
        store.pins,
        store.mark_open,
        store.mark_clean,
        lambda: store.put_space(OTHER),
        lambda: store.bump_epoch(SPEC.fingerprint),
        lambda: store.load_blocks(STORE),
        lambda: store.commit_blocks(STORE, make_blocks(1), []),
    ]
    told = []
    for call in calls:
        with pytest.raises(KVStoreError) as error:
            call()
        told.append(str(error.value))
    return told


def test_fork_after_lmdb_was_used_is_refused_and_does_the_parent_no_harm(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    # The child runs in the middle of a process that may have threads: it only refuses and exits.
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            told = refusals(store)
            store.close()
            code = 0 if all("fork" in line for line in told) else 2
        except BaseException:  # noqa: BLE001 - a forked child must never return into pytest
            traceback.print_exc()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    blocks = make_blocks(10)
    store.commit_blocks(STORE, blocks, [])
    assert by_key(store.load_blocks(STORE).records) == by_key(blocks)
    store.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    store.close()
    store.close()
    assert all("closed" in line for line in refusals(store))


def test_threads_take_turns(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    groups = [make_blocks(200, seed) for seed in range(8)]
    threads = [
        threading.Thread(target=store.commit_blocks, args=(STORE, group, [])) for group in groups
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(store.load_blocks(STORE).records) % 200 == 0
    for thread in threads:
        thread.join()
    assert by_key(store.load_blocks(STORE).records) == by_key([r for g in groups for r in g])
    store.close()


def test_a_remote_or_missing_state_directory_is_refused_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        MetaStore.open(tmp_path / "missing")
    monkeypatch.setattr("kvstore.index.lmdb_store.network_filesystem", lambda _: "nfs4")
    for opener in (MetaStore.open, MetaStore.open_or_reset):
        with pytest.raises(ConfigError, match="is on nfs4"):
            opener(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_walking_child_imports_little() -> None:
    # A daemon that was killed waits for it before it serves.
    program = (
        "import sys; import kvstore.index.lmdb_check\n"
        "print([m for m in ('google.protobuf', 'grpc', 'pydantic', 'asyncio', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_limits_pins_of_owners_and_uses_are_there_after_reopening(tmp_path: Path) -> None:
    limits = SpaceLimits(host_bytes=1 << 30, ttl_ms=5_000)
    uses = UsesRecord(5.0, 6.0, 7.0, bytes(16), ((1, 2.0), (3, 4.0)))
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    pins = [PinRecord(space_id, b"k" * 16, 0.0), PinRecord(space_id, b"k" * 16, 9.0, "agent")]
    store.put_pins(pins)
    store.put_limits(space_id, limits)
    store.put_uses(uses)
    with pytest.raises(UnknownSpace):
        store.put_limits(OTHER.fingerprint, limits)
    store.close()
    # Also after a crash, when a child process has copied record by record.
    again, note = MetaStore.open_or_reset(tmp_path)
    assert note is None
    assert again.limits() == {space_id: limits}
    assert sorted(again.pins(), key=lambda pin: pin.owner) == pins
    assert again.uses() == uses
    again.delete_pins([(space_id, pin_name(b"k" * 16, "agent"))])
    again.put_limits(space_id, SpaceLimits())
    assert (again.pins(), again.limits()) == (pins[:1], {})
    again.close()


def test_a_store_stays_at_the_first_version_until_it_holds_what_needs_the_second(
    tmp_path: Path,
) -> None:
    def version() -> int | None:
        env = LmdbEnv(tmp_path / "index.mdb", readonly=True)
        value = env.get(records.META, records.FORMAT_KEY)
        env.close()
        assert value is not None
        return records.format_version(value, "here")

    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    store.put_pins([PinRecord(space_id, b"k" * 16, 0.0)])
    store.close()
    assert version() == 1
    store = MetaStore.open(tmp_path)
    store.put_pins([PinRecord(space_id, b"k" * 16, 1.0, "agent")])
    store.close()
    assert version() == 2
