"""A space's fingerprint covers every field, and nothing else decides it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.space import SpaceSpec

# Valid in every combination with one field replaced from OTHER.
BASE: dict[str, Any] = {
    "model": "llama-3-8b",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "shard_bytes": (8192, 8192),
    "layout": "LBHNC",
    "weights_version": "r1",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "pipeline_rank": 0,
    "context_parallel": 1,
    "kv_group": "0",
    "hash_algorithm": "xxh3-128",
    "root_seed": "seed",
    "tenant": "a",
    "key_bytes": 16,
}
OTHER: dict[str, Any] = {
    "model": "llama-3-8b-instruct",
    "dtype": "fp8_e4m3",
    "block_tokens": 32,
    "shard_bytes": (8192, 4096),
    "layout": "BLHNC",
    "weights_version": "r2",
    "tensor_parallel": 4,
    "pipeline_parallel": 3,
    "pipeline_rank": 1,
    "context_parallel": 2,
    "kv_group": "1",
    "hash_algorithm": "sha256_cbor",
    "root_seed": "other",
    "tenant": "b",
    "key_bytes": 32,
}
FIELDS = [field.name for field in dataclasses.fields(SpaceSpec)]
TEXT_FIELDS = [name for name in FIELDS if isinstance(BASE[name], str)]


def test_every_field_has_another_value_to_try() -> None:
    """A field added to the spec must be added here: that is what makes the next test total."""
    assert list(BASE) == list(OTHER) == FIELDS


@pytest.mark.parametrize("field", FIELDS)
def test_key_omitted_one_thing(field: str) -> None:
    """Flip one field: another space."""
    assert SpaceSpec(**BASE).fingerprint != SpaceSpec(**BASE | {field: OTHER[field]}).fingerprint


def test_all_single_flips_differ_from_each_other() -> None:
    flips = {SpaceSpec(**BASE | {field: OTHER[field]}).fingerprint for field in FIELDS}
    assert len(flips) == len(FIELDS)


@given(
    first=st.sampled_from(TEXT_FIELDS),
    second=st.sampled_from(TEXT_FIELDS),
    text=st.text(min_size=2, max_size=12),
    cut=st.integers(1, 11),
)
def test_equal_strings_in_two_fields_do_not_collide(
    first: str, second: str, text: str, cut: int
) -> None:
    """The same characters divided differently, or swapped, between two fields."""
    left, right = text[:cut], text[cut:]
    if first == second or not right or left == right:
        return
    whole = SpaceSpec(**BASE | {first: left, second: right}).fingerprint
    swapped = SpaceSpec(**BASE | {first: right, second: left}).fingerprint
    assert whole != swapped
    moved = SpaceSpec(**BASE | {first: left + right[:1], second: right[1:] or "x"}).fingerprint
    assert whole != moved


def test_shards_divided_differently_do_not_collide() -> None:
    one = SpaceSpec(**BASE | {"shard_bytes": (4096, 8192)})
    other = SpaceSpec(**BASE | {"shard_bytes": (8192, 4096)})
    joined = SpaceSpec(**BASE | {"shard_bytes": (12288,)})
    assert len({one.fingerprint, other.fingerprint, joined.fingerprint}) == 3


_PRINT_FINGERPRINTS = """
from kvstore.space import SpaceSpec
print(SpaceSpec(
    model="llama-3-8b", dtype="bfloat16", block_tokens=16, shard_bytes=[2_097_152]
).fingerprint.hex())
print(SpaceSpec(
    model="mé", dtype="fp8", block_tokens=128, shard_bytes=(1, 2, 3), layout="LBHNC",
    weights_version="r2", tensor_parallel=3, pipeline_parallel=2, pipeline_rank=1,
    context_parallel=2, kv_group="1", hash_algorithm="sha256_cbor", root_seed="seed",
    tenant="t", key_bytes=32,
).fingerprint.hex())
"""


@pytest.mark.parametrize("seed", ["0", "77", "random"])
def test_no_reuse_after_restart(seed: str) -> None:
    """Fingerprints written to disk by one process are found by the next one."""
    answer = subprocess.run(
        [sys.executable, "-c", _PRINT_FINGERPRINTS],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.split() == [
        "95ca452c3fcd92c7fe65ce8c8f011489085a55c5ffbc70b5a532cfb5e8b72005",
        "9d3080d924b9f17ee1663eba534f1f469dd78bae023aad507bf3a2d06470c694",
    ]


def test_spelled_out_defaults_name_the_same_space() -> None:
    short = SpaceSpec(model="m", dtype="d", block_tokens=1, shard_bytes=(1,))
    full = SpaceSpec(
        model="m",
        dtype="d",
        block_tokens=1,
        shard_bytes=[1],  # type: ignore[arg-type] # any sequence is taken
        layout="opaque",
        hash_algorithm="xxh3-128",
        key_bytes=16,
    )
    assert short.fingerprint == full.fingerprint


@pytest.mark.parametrize(
    ("shard_bytes", "slot_bytes", "block_bytes"),
    [((1,), 4096, 1), ((4096,), 4096, 4096), ((4097, 1), 8192, 4098), ((5, 5, 5), 4096, 15)],
)
def test_slots_are_whole_pages_of_the_largest_shard(
    shard_bytes: tuple[int, ...], slot_bytes: int, block_bytes: int
) -> None:
    spec = SpaceSpec(model="m", dtype="d", block_tokens=1, shard_bytes=shard_bytes)
    assert spec.shape.slot_bytes == slot_bytes
    assert spec.shape.shards == len(shard_bytes)
    assert spec.shape.block_bytes == slot_bytes * len(shard_bytes)
    assert spec.block_bytes == block_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", ""),
        ("layout", ""),
        ("hash_algorithm", ""),
        ("tenant", "x" * 4097),
        ("block_tokens", 0),
        ("tensor_parallel", 0),
        ("pipeline_parallel", 0),
        ("context_parallel", -1),
        ("pipeline_rank", 2),
        ("pipeline_rank", -1),
        ("shard_bytes", ()),
        ("shard_bytes", (4096, 0)),
        ("shard_bytes", (1 << 32, 1)),
        ("shard_bytes", (1,) * 257),
        ("key_bytes", 20),
    ],
)
def test_impossible_specs_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as caught:
        SpaceSpec(**BASE | {field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
