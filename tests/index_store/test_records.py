"""The bytes of LMDB's records: what version 1 wrote stays readable, and damage is seen."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FormatVersionError
from kvstore.index import records
from kvstore.index.epoch_log import EpochLog
from kvstore.index.limits import SpaceLimits
from kvstore.index.records import BlockRecord, DamagedRecord, PinRecord, SpaceRecord, UsesRecord
from kvstore.space import SpaceSpec

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_v1.json").read_text())
LATER: dict[str, Any] = json.loads(Path(__file__).with_name("golden_v2.json").read_text())
SPACE_ID = bytes.fromhex(GOLDEN["space"]["space_id"])
SPEC = SpaceSpec(**GOLDEN["space"]["spec"])


def golden_block(entry: dict[str, Any]) -> BlockRecord:
    return BlockRecord(
        space_id=SPACE_ID,
        key=bytes.fromhex(entry["key"]),
        parent=bytes.fromhex(entry["parent"]) if entry["parent"] else None,
        epoch=entry["epoch"],
        segment=entry["segment"],
        slot=entry["slot"],
        digests=tuple(entry["digests"]),
        sequence=entry["sequence"],
    )


@pytest.mark.parametrize("entry", GOLDEN["blocks"])
def test_blocks_of_version_1_are_written_and_read_as_ever(entry: dict[str, Any]) -> None:
    record = golden_block(entry)
    assert records.encode_block(record).hex() == entry["value"]
    assert records.decode_block(SPACE_ID, record.key, bytes.fromhex(entry["value"])) == record


def test_space_and_pins_of_version_1_are_written_and_read_as_ever() -> None:
    entry = GOLDEN["space"]
    record = SpaceRecord(entry["number"], SPEC, entry["epoch"])
    assert record.space_id == SPACE_ID
    assert records.encode_space(record).hex() == entry["value"]
    assert records.decode_space(entry["number"], bytes.fromhex(entry["value"])) == record
    for pin in GOLDEN["pins"]:
        expected = PinRecord(SPACE_ID, bytes.fromhex(pin["key"]), pin["expires_unix"])
        assert records.encode_pin(expected).hex() == pin["value"]
        value = bytes.fromhex(pin["value"])
        assert records.decode_pin(SPACE_ID, expected.key, value, 16) == expected


def test_format_and_epochs_of_version_1_are_read_as_ever(tmp_path: Path) -> None:
    assert records.format_version(bytes.fromhex(GOLDEN["format"]), "x") == 1
    assert records.encode_format(1).hex() == GOLDEN["format"]
    entry = GOLDEN["epochs"]
    (tmp_path / "epochs").write_bytes(bytes.fromhex(entry["entry"]))
    log = EpochLog.open(tmp_path / "epochs")
    assert log.epoch(SPACE_ID) == entry["epoch"]


def test_what_came_with_version_2_is_written_and_read_as_ever() -> None:
    assert records.format_version(bytes.fromhex(LATER["format"]), "x") == 2
    assert records.encode_format(2).hex() == LATER["format"]
    entry = LATER["pin"]
    pin = PinRecord(SPACE_ID, bytes.fromhex(entry["key"]), entry["expires_unix"], entry["owner"])
    name = bytes.fromhex(entry["name"])
    assert records.pin_name(pin.key, pin.owner) == name
    assert records.encode_pin(pin).hex() == entry["value"]
    assert records.decode_pin(SPACE_ID, name, bytes.fromhex(entry["value"]), 16) == pin
    for entry in LATER["limits"]:
        limits = SpaceLimits(*entry["values"])
        assert records.encode_limits(SPACE_ID, limits).hex() == entry["value"]
        assert records.decode_limits(SPACE_ID, bytes.fromhex(entry["value"])) == limits
    entry = LATER["uses"]
    numbers = (entry["seconds"], entry["clock"], entry["wall"], bytes.fromhex(entry["boot"]))
    uses = UsesRecord(*numbers, tuple((mark[0], mark[1]) for mark in entry["marks"]))
    assert records.encode_uses(uses).hex() == entry["value"]
    assert records.decode_uses(bytes.fromhex(entry["value"])) == uses


def test_the_layout_of_limits_and_uses_is_the_documented_one() -> None:
    value = bytes.fromhex(LATER["limits"][0]["value"])
    assert value[:2] == bytes([1, 0b1110])
    numbers = [int.from_bytes(value[at : at + 8], "little") for at in range(2, 34, 8)]
    assert numbers == [0, 1 << 33, (1 << 64) - 1, 10_800_000]
    assert value[34:] == xxhash.xxh3_64(SPACE_ID + value[:34]).intdigest().to_bytes(8, "little")
    entry = LATER["uses"]
    value = bytes.fromhex(entry["value"])
    assert value[:6] == bytes([1, 0, 2, 0, 0, 0])
    assert struct.unpack("<3d", value[6:30]) == (entry["seconds"], entry["clock"], entry["wall"])
    assert value[30:46].hex() == entry["boot"]
    assert [list(mark) for mark in struct.iter_unpack("<Qd", value[46:-8])] == entry["marks"]
    assert value[-8:] == xxhash.xxh3_64(b"uses" + value[:-8]).intdigest().to_bytes(8, "little")


def test_the_layout_is_the_documented_one_without_help_of_the_encoder() -> None:
    entry = GOLDEN["blocks"][1]
    value, key = bytes.fromhex(entry["value"]), bytes.fromhex(entry["key"])
    numbers = [
        int.from_bytes(value[a:b], "little")
        for a, b in [(0, 1), (1, 2), (2, 10), (10, 14), (14, 18), (18, 26), (26, 28)]
    ]
    assert numbers == [1, 1, entry["epoch"], entry["segment"], entry["slot"], 1 << 63, 2]
    assert [int.from_bytes(value[a : a + 8], "little") for a in (28, 36)] == entry["digests"]
    assert value[44:60].hex() == entry["parent"]
    checksum = xxhash.xxh3_64(SPACE_ID + key + value[:60]).intdigest()
    assert value[60:] == checksum.to_bytes(8, "little")


blocks = st.builds(
    BlockRecord,
    space_id=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=16, max_size=16),
    parent=st.none() | st.binary(min_size=16, max_size=16),
    epoch=st.integers(0, 2**64 - 1),
    segment=st.integers(0, 2**32 - 1),
    slot=st.integers(0, 2**32 - 1),
    digests=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=256).map(tuple),
    sequence=st.integers(0, 2**64 - 1),
)


@given(blocks)
def test_any_block_reads_back(record: BlockRecord) -> None:
    value = records.encode_block(record)
    assert records.decode_block(record.space_id, record.key, value) == record


def damaged_forms(value: bytes) -> list[bytes]:
    flips = [
        value[:at] + bytes([value[at] ^ (1 << bit)]) + value[at + 1 :]
        for at in range(len(value))
        for bit in range(8)
    ]
    return [*flips, *(value[:n] for n in range(len(value))), value + b"\0", value * 2]


def test_no_flipped_bit_and_no_truncation_of_a_record_passes() -> None:
    block = golden_block(GOLDEN["blocks"][1])
    for value in damaged_forms(records.encode_block(block)):
        with pytest.raises(DamagedRecord):
            records.decode_block(SPACE_ID, block.key, value)
    for value in damaged_forms(bytes.fromhex(GOLDEN["space"]["value"])):
        with pytest.raises(DamagedRecord):
            records.decode_space(3, value)
    for value in damaged_forms(bytes.fromhex(GOLDEN["pins"][1]["value"])):
        with pytest.raises(DamagedRecord):
            records.decode_pin(SPACE_ID, block.key, value, 16)
    for value in damaged_forms(bytes.fromhex(LATER["limits"][0]["value"])):
        with pytest.raises(DamagedRecord):
            records.decode_limits(SPACE_ID, value)
    for value in damaged_forms(bytes.fromhex(LATER["uses"]["value"])):
        with pytest.raises(DamagedRecord):
            records.decode_uses(value)
    for value in damaged_forms(bytes.fromhex(GOLDEN["format"])):
        assert records.format_version(value, "x") is None


def test_a_record_under_another_key_number_or_space_is_damage() -> None:
    block = golden_block(GOLDEN["blocks"][1])
    value = records.encode_block(block)
    for space_id, key in ((bytes(32), block.key), (SPACE_ID, bytes(16))):
        with pytest.raises(DamagedRecord):
            records.decode_block(space_id, key, value)
    with pytest.raises(DamagedRecord):
        records.decode_space(4, bytes.fromhex(GOLDEN["space"]["value"]))


def reseal(space_id: bytes, key: bytes, body: bytes) -> bytes:
    return body + xxhash.xxh3_64_intdigest(space_id + key + body).to_bytes(8, "little")


def test_an_intact_record_of_another_version_is_refused_not_skipped() -> None:
    block = golden_block(GOLDEN["blocks"][0])
    later = reseal(SPACE_ID, block.key, b"\x02" + records.encode_block(block)[1:-8])
    with pytest.raises(FormatVersionError, match="version 2 is not supported"):
        records.decode_block(SPACE_ID, block.key, later, "index.mdb")
    with pytest.raises(FormatVersionError):
        records.format_version(reseal(b"", b"", (9).to_bytes(4, "little")), "index.mdb")


def test_what_does_not_fit_a_record_is_refused_before_it_is_written() -> None:
    good = golden_block(GOLDEN["blocks"][1])
    for change in (
        {"segment": 1 << 32},
        {"slot": -1},
        {"digests": (1 << 64,)},
        {"digests": (0,) * 257},
        {"parent": b"short"},
    ):
        fields = {name: getattr(good, name) for name in BlockRecord.__dataclass_fields__}
        with pytest.raises(ValueError, match=r"fit|parent"):
            records.encode_block(BlockRecord(**{**fields, **change}))


def test_a_hundred_thousand_records_are_decoded_in_a_moment() -> None:
    rng = random.Random(1)
    pairs = []
    for i in range(100_000):
        key = rng.randbytes(16)
        record = BlockRecord(SPACE_ID, key, rng.randbytes(16), 1, 0, i, (i, i + 1), i)
        pairs.append((key, records.encode_block(record)))
    start = time.process_time()
    count = sum(records.decode_block(SPACE_ID, k, v).slot >= 0 for k, v in pairs)
    assert count == 100_000
    assert time.process_time() - start < 0.6
