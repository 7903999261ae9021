"""The saved host index: its bytes, and what becomes of damaged ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.host_index import (
    BusySlot,
    DamagedHostIndex,
    HostIndex,
    SavedBlock,
    SavedSpace,
    decode,
    encode,
    read_host_index,
    remove_host_index,
    write_host_index,
)
from kvstore.errors import FormatVersionError
from kvstore.space import BlockShape
from kvstore.tiers.base import Slot
from kvstore.tiers.slab import KeptGroup

_GOLDEN = Path(__file__).with_name("host_index_v1.hex")

_u64 = st.integers(0, 2**64 - 1)
_u32 = st.integers(0, 2**32 - 1)
_slots = st.builds(Slot, _u32, _u32)


@st.composite
def _groups(draw: st.DrawFn) -> KeptGroup:
    shards, slots = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    generations = draw(st.lists(_u64, min_size=slots, max_size=slots))
    return KeptGroup(
        group=draw(_u32),
        shape=BlockShape(draw(st.integers(1, 2**20)) * 4096, shards),
        slots=slots,
        lengths=tuple(draw(st.lists(_u64, min_size=shards, max_size=shards))),
        generations=np.array(generations, np.uint64),
    )


@st.composite
def _spaces(draw: st.DrawFn) -> SavedSpace:
    key_bytes, shards = draw(st.sampled_from([16, 32])), draw(st.integers(1, 4))
    keys = st.binary(min_size=key_bytes, max_size=key_bytes)
    digests = st.lists(_u64, min_size=shards, max_size=shards).map(tuple)
    blocks = st.builds(SavedBlock, keys, st.none() | keys, _slots, _u64, digests)
    return SavedSpace(
        space_id=draw(st.binary(min_size=32, max_size=32)),
        epoch=draw(_u64),
        key_bytes=key_bytes,
        shards=shards,
        blocks=draw(st.lists(blocks, max_size=5)),
    )


_indexes = st.builds(
    HostIndex,
    machine=st.text(max_size=40),
    pool=st.text("abc/é", min_size=1, max_size=40).map(lambda name: Path("/") / name),
    control_inode=_u64,
    last_attachment=_u64,
    last_group=_u32,
    groups=st.lists(_groups(), max_size=3),
    spaces=st.lists(_spaces(), max_size=3),
    busy=st.lists(
        st.builds(BusySlot, _slots, st.lists(_u64, min_size=1, max_size=4).map(tuple)), max_size=3
    ),
)


def _same(one: HostIndex, other: HostIndex) -> bool:
    def plain(index: HostIndex) -> tuple[object, ...]:
        groups = [
            (g.group, g.shape, g.slots, g.lengths, g.generations.tolist()) for g in index.groups
        ]
        return (
            (index.machine, index.pool, index.control_inode, index.last_attachment),
            (index.last_group, groups, list(index.spaces), list(index.busy)),
        )

    return plain(one) == plain(other)


@settings(max_examples=60)
@given(_indexes)
def test_what_is_read_is_what_was_written(index: HostIndex) -> None:
    assert _same(decode(encode(index)), index)


@settings(max_examples=60)
@given(_indexes, st.data())
def test_no_damage_goes_unnoticed(index: HostIndex, data: st.DataObject) -> None:
    whole = encode(index)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), whole[:at], whole + b"\0"):
        with pytest.raises(DamagedHostIndex):
            decode(damaged)


@settings(max_examples=60)
@given(_indexes, st.data())
def test_bytes_that_contradict_themselves_are_damage_and_no_crash(
    index: HostIndex, data: st.DataObject
) -> None:
    """Even under a checksum that holds."""
    body = bytearray(encode(index)[:-8])
    for _ in range(3):
        body[data.draw(st.integers(12, len(body) - 1))] = data.draw(st.integers(0, 255))
    sealed = bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    with contextlib.suppress(DamagedHostIndex):
        decode(sealed)


def _example() -> HostIndex:
    shape = BlockShape(8192, 2)
    return HostIndex(
        machine="f3a0b1c2-boot",
        pool=Path("/dev/shm/kvstore-0-0123456789ab-cdef01234567"),
        control_inode=77,
        last_attachment=65541,
        last_group=3,
        groups=[
            KeptGroup(3, shape, 4, (36864, 36864), np.array([5, 0, 2**40, 1], np.uint64)),
        ],
        spaces=[
            SavedSpace(
                space_id=bytes(range(32)),
                epoch=2,
                key_bytes=16,
                shards=2,
                blocks=[
                    SavedBlock(b"k" * 16, None, Slot(3, 0), 901, (1, 2**64 - 1)),
                    SavedBlock(b"l" * 16, b"k" * 16, Slot(3, 2), 900, (3, 4)),
                ],
            )
        ],
        busy=[BusySlot(Slot(3, 3), (4, 5))],
    )


def test_version_1_is_read_for_ever() -> None:
    golden = bytes.fromhex(_GOLDEN.read_text())
    assert encode(_example()) == golden
    assert _same(decode(golden), _example())


def test_another_version_is_told_from_damage() -> None:
    body = bytearray(encode(_example())[:-8])
    body[8] = 2
    sealed = bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    with pytest.raises(FormatVersionError):
        decode(sealed)


def test_a_key_of_another_length_is_refused() -> None:
    index = _example()
    bad = SavedSpace(bytes(32), 1, 32, 2, index.spaces[0].blocks)
    with pytest.raises(ValueError, match="another length"):
        encode(HostIndex("m", Path("/p"), 1, 1, 1, [], [bad], []))


def test_a_file_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "host-index"
    assert read_host_index(path) is None
    remove_host_index(path)
    write_host_index(path, encode(_example()))
    found = read_host_index(path)
    assert found is not None
    assert _same(found, _example())
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "host-index.tmp").touch()  # a crash in the middle
    remove_host_index(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        write_host_index(tmp_path / "gone" / "host-index", b"")
