"""After kill -9, after damage, after loss: the right records or fewer, never a dead daemon."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstore.errors import FormatVersionError
from kvstore.index import lmdb_recovery
from kvstore.index.epoch_log import EpochLog
from kvstore.index.lmdb_check import CheckResult, walk
from kvstore.index.lmdb_env import LmdbEnv
from kvstore.index.lmdb_store import MetaStore, StoreDamaged, check_in_child
from kvstore.index.records import BlockRecord
from kvstore.space import SpaceSpec

HERE = Path(__file__).parent
STORE = b"s" * 16
SPEC = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,))
DATA = "index.mdb/data.mdb"


def program(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, os.fspath(HERE / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.fspath(HERE.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def make_block(number: int, slot: int, sequence: int) -> BlockRecord:
    key = xxhash.xxh3_128_digest(b"%d" % number)
    return BlockRecord(SPEC.fingerprint, key, None, 1, 0, slot, (number,), sequence)


def fill(path: Path, blocks: int) -> list[BlockRecord]:
    """Make a store with a past: blocks that moved, blocks that went."""
    store = MetaStore.open(path)
    store.put_space(SPEC)
    first = [make_block(n, n, n) for n in range(blocks)]
    moved = [make_block(n, blocks + n, blocks + n) for n in range(0, blocks, 2)]
    gone = [(r.space_id, r.key) for r in first[1::4]]
    for at in range(0, blocks, 100):
        store.commit_blocks(STORE, first[at : at + 100], [])
    store.commit_blocks(STORE, moved, gone)
    store.mark_clean()
    store.close()
    return [*first, *moved]


def test_what_was_acknowledged_before_kill_9_is_there(tmp_path: Path) -> None:
    rng = random.Random(seed := 20_260)
    acknowledged: set[int] = set()
    unsure: set[int] = set()
    first = 0
    for _ in range(6):
        with program("commit_worker.py", os.fspath(tmp_path), str(first)) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(rng.randrange(1, 40))]
            child.kill()
            # What it said between the last line read and its death counts as well.
            lines += child.stdout.read().splitlines()
        numbers = [int(line) for line in lines]
        acknowledged |= set(numbers)
        unsure.add(numbers[-1] + 1)
        first = (numbers[-1] + 4) // 3 * 3

        store, note = MetaStore.open_or_reset(tmp_path)
        loaded = store.load_blocks(STORE)
        store.close()
        assert (note, store.was_clean, loaded.damaged) == (None, False, 0)
        counts: dict[int, int] = {}
        for record in loaded.records:
            assert record.digests == (record.segment, record.slot)
            counts[record.segment] = counts.get(record.segment, 0) + 1
        assert set(counts.values()) == {40}, f"a group in part (seed {seed})"
        assert set(counts) <= acknowledged | unsure
        # Group 3n + 2 deletes group 3n + 1 in its own transaction.
        expected = {n for n in acknowledged if n % 3 != 1 or n + 1 not in counts}
        assert expected <= set(counts), f"an acknowledged group is missing (seed {seed})"
        assert not [n for n in counts if n % 3 == 1 and n + 1 in counts]


def damage(rng: random.Random, template: Path, count: int) -> list[dict[str, Any]]:
    size = (template / DATA).stat().st_size
    samples: list[dict[str, Any]] = []
    for _ in range(count):
        sealed = rng.random() < 0.25
        kind = rng.randrange(6)
        if kind == 0:  # meta pages
            at = rng.randrange(200) + 4096 * rng.randrange(2)
        elif kind == 1:  # headers of pages, and their tables of nodes
            at = rng.randrange(size // 4096) * 4096 + rng.randrange(64)
        else:
            at = rng.randrange(size)
        if kind == 2:
            length = rng.choice([at, at // 4096 * 4096, 0, 1, 4096, 8192, size - 1])
            samples.append({"file": DATA, "length": length, "sealed": sealed})
        elif kind == 3:
            name = rng.choice(["epochs", "index.mdb/seal", "index.mdb/lock.mdb"])
            at = rng.randrange((template / name).stat().st_size)
            xor = 1 << rng.randrange(8)
            samples.append({"file": name, "at": at, "xor": xor, "sealed": sealed})
        else:
            xor = rng.randrange(1, 256)
            samples.append({"file": DATA, "at": at, "xor": xor, "sealed": sealed})
    return samples


def test_a_damaged_index_costs_blocks_never_the_daemon(tmp_path: Path) -> None:
    seed = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
    count = int(os.environ.get("KVSTORE_TEST_SAMPLES", "60"))
    template = tmp_path / "template"
    template.mkdir()
    written = {(r.key.hex(), r.slot, r.sequence) for r in fill(template, 800)}
    samples = damage(random.Random(seed), template, count)
    job = {
        "template": os.fspath(template),
        "scratch": os.fspath(tmp_path / "scratch"),
        "samples": samples,
    }
    worker = program("damage_worker.py", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = worker.communicate(json.dumps(job))
    lines = out.splitlines()
    kept = 0
    for index, sample in enumerate(samples):
        where = f"seed {seed}, sample {index}: {sample}"
        assert 2 * index + 1 < len(lines), f"{where}: exit {worker.returncode}: {err}"
        answer = json.loads(lines[2 * index + 1])
        loaded = {tuple(record) for record in answer["loaded"]}
        assert loaded <= written, where
        assert len({key for key, _, _ in loaded}) == len(loaded), where
        assert answer["goes_on"], where
        if sample["file"] != DATA:
            assert answer["note"] is None, where
            assert len(loaded) == 600, where
        elif len(loaded) < 600:
            assert answer["note"], where
        assert "\n" not in (answer["note"] or ""), where
        kept += len(loaded)
    assert worker.returncode == 0, err
    # A flipped byte seldom costs more than a page: this is recovery, not a clean slate.
    assert kept > 0.5 * 600 * count


def test_a_hundred_thousand_blocks_are_back_half_a_second_after_a_crash(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    store.commit_blocks(STORE, [make_block(n, n, n) for n in range(100_000)], [])
    store.close()
    # The child's own time on the processor: the machine that runs the tests may be busy.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = check_in_child(tmp_path, 60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.ok, result.records, result.damaged) == (True, 100_002, 0)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    store, note = MetaStore.open_or_reset(tmp_path)
    assert note is None
    assert len(store.load_blocks(STORE).records) == 100_000
    store.close()


def test_an_index_cut_short_is_put_aside_and_epochs_go_on(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    store.commit_blocks(STORE, [make_block(n, n, n) for n in range(500)], [])
    assert [store.bump_epoch(space_id) for _ in range(3)] == [2, 3, 4]
    store.close()
    cut = (tmp_path / DATA).stat().st_size // 2
    os.truncate(tmp_path / DATA, cut)
    with pytest.raises(StoreDamaged, match="lacks [0-9]+ bytes"):
        MetaStore.open(tmp_path)

    store, note = MetaStore.open_or_reset(tmp_path)
    assert note is not None
    aside = [p for p in tmp_path.iterdir() if p.name.startswith("index.mdb.damaged-")]
    assert len(aside) == 1
    assert note.endswith(f"starting empty, the old index is {aside[0].name}")
    assert (aside[0] / "data.mdb").stat().st_size == cut
    assert not store.was_clean
    assert store.spaces() == []
    assert store.put_space(SPEC).epoch == 4
    store.close()


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_with_both_copies_of_an_epoch_gone_it_jumps_instead_of_starting_over(
    tmp_path: Path, how: str
) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    assert [store.bump_epoch(space_id) for _ in range(3)] == [2, 3, 4]
    store.close()
    (tmp_path / DATA).write_bytes(b"no LMDB file at all" * 1000)
    epochs = tmp_path / "epochs"
    if how == "missing":
        epochs.unlink()
    else:
        data = bytearray(epochs.read_bytes())
        data[-1] ^= 1
        epochs.write_bytes(data)
    before = int(time.time())
    store, note = MetaStore.open_or_reset(tmp_path)
    assert note is not None
    epoch = store.put_space(SPEC).epoch
    assert epoch >= before
    store.close()
    # It stays there: the next start finds nothing wrong and does not jump again.
    store, note = MetaStore.open_or_reset(tmp_path)
    assert (note, store.put_space(SPEC).epoch) == (None, epoch)
    assert store.bump_epoch(space_id) == epoch + 1
    store.close()


def test_killed_once_the_loss_is_out_of_sight_an_epoch_still_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    assert [store.bump_epoch(space_id) for _ in range(3)] == [2, 3, 4]
    store.close()
    (tmp_path / DATA).write_bytes(b"no LMDB file at all" * 1000)
    (tmp_path / "epochs").unlink()
    before = int(time.time())

    def killed(path: Path) -> str:
        (path / "index.mdb").rename(path / "index.mdb.damaged-1")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lmdb_recovery, "put_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            MetaStore.open_or_reset(tmp_path)
    store, note = MetaStore.open_or_reset(tmp_path)
    assert note is None
    assert store.put_space(SPEC).epoch >= before
    store.close()


def test_an_epoch_bumped_but_not_committed_is_not_lost(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    store.close()
    EpochLog.open(tmp_path / "epochs").append(space_id, 2)  # and here the power fails
    for _ in range(2):
        store, note = MetaStore.open_or_reset(tmp_path)
        assert (note, [r.epoch for r in store.spaces()]) == (None, [2])
        store.close()


def start(path: Path) -> None:
    store, _ = MetaStore.open_or_reset(path)
    try:
        store.mark_open()
    finally:
        store.close()


@pytest.mark.parametrize("name", ["epochs", "index.mdb/seal"])
def test_a_directory_in_a_files_place_is_named_and_costs_nothing(tmp_path: Path, name: str) -> None:
    fill(tmp_path, 100)
    path = tmp_path / name
    before = path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreDamaged) as caught:
        start(tmp_path)
    assert str(caught.value) == f"{path}: Is a directory"
    path.rmdir()
    path.write_bytes(before)
    store, note = MetaStore.open_or_reset(tmp_path)
    assert (note, len(store.load_blocks(STORE).records)) == (None, 75)
    store.close()
    assert not [entry for entry in tmp_path.iterdir() if ".damaged-" in entry.name]


def test_a_walk_whose_parent_was_killed_never_writes_to_the_next_ones_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 100)
    (tmp_path / "index.mdb/seal").unlink()
    (tmp_path / "index.mdb.copy-left").mkdir()
    targets: list[Path] = []

    def killed(path: Path, timeout_s: float, target: Path | None = None) -> CheckResult:
        assert target is not None
        targets.append(target)
        raise KeyboardInterrupt

    monkeypatch.setattr(lmdb_recovery, "check_in_child", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            MetaStore.open_or_reset(tmp_path)
    assert targets[0] != targets[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epochs", "index.mdb"]


def test_a_missing_epochs_file_is_written_again_from_an_intact_index(tmp_path: Path) -> None:
    store = MetaStore.open(tmp_path)
    space_id = store.put_space(SPEC).space_id
    store.bump_epoch(space_id)
    store.close()
    (tmp_path / "epochs").unlink()
    store, _ = MetaStore.open_or_reset(tmp_path)
    assert [r.epoch for r in store.spaces()] == [2]
    store.close()
    assert EpochLog.open(tmp_path / "epochs").epoch(space_id) == 2


def test_a_torn_append_to_the_epochs_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "epochs"
    log = EpochLog.open(path)
    log.append(b"a" * 32, 2)
    whole = path.read_bytes()
    log.append(b"a" * 32, 3)
    for length in range(len(whole), len(whole) + 56):
        path.write_bytes((whole + b"\xff" * 56)[:length])
        log = EpochLog.open(path)
        assert log.epoch(b"a" * 32) == 2
        log.append(b"b" * 32, 7)
        log = EpochLog.open(path)
        assert (log.epoch(b"a" * 32), log.epoch(b"b" * 32), log.damaged) == (2, 7, 0)


def test_a_store_of_another_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    blocks = fill(tmp_path, 100)
    env = LmdbEnv(tmp_path / "index.mdb")
    body = (9).to_bytes(4, "little")
    later = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    env.write(b"meta", lambda txn: txn.put(b"format", later))
    env.close()
    before = (tmp_path / DATA).read_bytes()
    for opener in (MetaStore.open, MetaStore.open_or_reset):
        with pytest.raises(FormatVersionError, match="format version 9 is not supported"):
            opener(tmp_path)
    assert (tmp_path / DATA).read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epochs", "index.mdb"]
    assert blocks


def test_a_sealed_store_with_a_flipped_byte_is_not_trusted(tmp_path: Path) -> None:
    blocks = fill(tmp_path, 400)
    data = bytearray((tmp_path / DATA).read_bytes())
    # A record that is there twice, in a live page or a free one: change each.
    needle = blocks[402].key
    at = data.find(needle)
    while at >= 0:
        data[at + 20] ^= 0x40
        at = data.find(needle, at + 1)
    (tmp_path / DATA).write_bytes(data)
    store, note = MetaStore.open_or_reset(tmp_path)
    loaded = store.load_blocks(STORE)
    assert (len(loaded.records), loaded.damaged) == (299, 0)
    assert note is not None
    assert "1 damaged records; " in note
    assert "301 intact records kept" in note
    assert needle not in {r.key for r in loaded.records}
    store.close()


def test_no_room_for_a_copy_is_no_reason_to_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MetaStore.open(tmp_path)
    store.put_space(SPEC)
    store.commit_blocks(STORE, [make_block(n, n, n) for n in range(500)], [])
    store.close()
    target = tmp_path / "copy"
    target.mkdir()
    (target / "data.mdb").write_bytes(b"\xff" * 20_000)  # nothing can be copied to here
    result = walk(tmp_path / "index.mdb", target)
    assert (result.ok, result.records, result.copied) == (True, 502, False)

    monkeypatch.setattr(lmdb_recovery, "check_in_child", lambda *_: result)
    store, note = MetaStore.open_or_reset(tmp_path)
    assert (note, len(store.load_blocks(STORE).records)) == (None, 500)
    store.close()


def test_a_child_that_hangs_costs_the_index_not_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 100)
    (tmp_path / "index.mdb/seal").unlink()
    assert check_in_child(tmp_path, 0.0) == CheckResult(False, "not walked within 0 s")
    store, note = MetaStore.open_or_reset(tmp_path, timeout_s=0.0)
    assert note is not None
    assert "not walked within 0 s; starting empty" in note
    assert store.spaces() == []
    store.close()


def test_only_the_newest_few_damaged_indexes_are_kept(tmp_path: Path) -> None:
    for _ in range(5):
        (tmp_path / "index.mdb").mkdir(exist_ok=True)
        (tmp_path / DATA).write_bytes(b"x" * 10_000)
        MetaStore.open_or_reset(tmp_path)[0].close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len([n for n in names if ".damaged-" in n]) == 3
    assert [n for n in names if ".damaged-" not in n] == ["epochs", "index.mdb"]


def test_the_seal_of_version_1_still_holds(tmp_path: Path) -> None:
    golden = json.loads((HERE / "golden_v1.json").read_text())["seal"]
    fill(tmp_path, 10)
    seal = (tmp_path / "index.mdb/seal").read_bytes()
    data = (tmp_path / DATA).read_bytes()
    body = bytes.fromhex(golden["bytes"])[:8] + len(data).to_bytes(8, "little")
    body += xxhash.xxh3_128_digest(data)
    assert seal == body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def test_the_walk_ends_with_the_daemon_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "index.mdb").mkdir()
    os.mkfifo(tmp_path / DATA)  # held up for as long as it may take
    code = "import pathlib, sys; from kvstore.index.lmdb_store import check_in_child; "
    code += "print('walks', flush=True); check_in_child(pathlib.Path(sys.argv[1]), 60)"
    with subprocess.Popen(
        [sys.executable, "-c", code, os.fspath(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.fspath(HERE.parents[1])},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"walks\n"
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        deadline = time.monotonic() + 60
        while not (children := listed.read_text().split()):
            assert time.monotonic() < deadline, "it walks nowhere"
            time.sleep(0.01)
        walker = os.pidfd_open(int(children[0]))
        parent.kill()
    ended, _, _ = select.select([walker], [], [], 60)
    os.close(walker)
    assert ended
