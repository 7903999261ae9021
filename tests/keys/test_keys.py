"""Keys are the same in every process, and cover every token before them."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.keys import HASH_ALGORITHMS, KEY_BYTES, Keys, chain_keys, root_key

# Changing one of these orphans every cache in the field.
GOLDEN: dict[str, dict[str, Any]] = {
    "xxh3-128": {
        "root": "eef8ea806414f6bda8c392388e25246c",
        "salted root": "7ba5a89a36f97faa1e4bb852dd30d6e8",
        "chain": [
            "f86d1cf5ae7d76eabe8e7f720471b3a4",
            "f78297f51589eda24726ad34bc2c1c6a",
            "6091575ff60cd5fa19b12cb339f34f75",
            "e0fd50e9df1d1f377a3d8ee6c88d7183",
        ],
        "salted chain": ["195236763b58f98c2cf6d7f2335b1267", "48a52e6dc064e91d6c90f32b9ed5bad9"],
    },
    "sha256": {
        "root": "e0c1a91d0665a8d8bfb8fa348f35326a627f1276f0da9d3be16b9ffd75d96904",
        "salted root": "9ffeacc1c4e6298f32de8a6846617c357396fe0a37286332c0f251eadde27d78",
        "chain": [
            "66b5a51390f743f8436805e2659857cada6e66f8b318974aecefaf7f5ee77225",
            "f5a6bb37081f94327fcc13f0b82f6cc1eb5745abf5b70835edb849dbb4952b30",
            "9b8a206d843a59452c84f88505ad25a931ca6c4c95705db2f5df7e39da781c56",
            "de08644960bf01bcf6033276d4174e3e430d2a191cab38a682f42a8b81bb3a4b",
        ],
        "salted chain": [
            "cf2c445d52f1c06e490dd5d20528aa99d166ee293f2d088217f477129bb2b1ea",
            "d7da565d1f89be5784e950f44f40ef8d8b57bd0c14d3cbe206247c6b22b6a03a",
        ],
    },
}

_PRINT_KEYS = """
import json
from kvstore.keys import HASH_ALGORITHMS, chain_keys, root_key
print(json.dumps({
    name: {
        "root": root_key(algorithm=name).hex(),
        "salted root": root_key(b"user-7", name).hex(),
        "chain": [k.hex() for k in chain_keys(range(70), 16, algorithm=name)],
        "salted chain": [
            k.hex() for k in chain_keys([2**32 - 1, 0, 1, 2], 2, b"user-7", name)
        ],
    }
    for name in HASH_ALGORITHMS
}))
"""


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_hits_always_zero_across_processes(seed: str) -> None:
    """Another process, another PYTHONHASHSEED: the same keys as ever."""
    answer = subprocess.run(
        [sys.executable, "-c", _PRINT_KEYS],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(answer.stdout) == GOLDEN


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_tokens=st.integers(1, 9),
    salt=st.binary(max_size=20),
)
def test_definition_holds(tokens: list[int], block_tokens: int, salt: bytes) -> None:
    """The documented formula, written down a second time without the code under test."""
    key = hashlib.sha256(b"kvstore.chain.v1\x00" + salt).digest()
    expected = []
    for at in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        block = tokens[at : at + block_tokens]
        key = hashlib.sha256(key + struct.pack(f"<{block_tokens}I", *block)).digest()
        expected.append(key)
    assert list(chain_keys(tokens, block_tokens, salt, "sha256")) == expected


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (48, 3)])
def test_only_full_blocks_have_keys(algorithm: str, tokens: int, blocks: int) -> None:
    keys = chain_keys(range(tokens), 16, algorithm=algorithm)
    assert len(keys) == blocks
    assert keys.key_bytes == KEY_BYTES[algorithm]


@pytest.mark.parametrize("changed", [0, 15, 16, 47])
def test_a_key_covers_every_token_before_it(changed: int) -> None:
    tokens = list(range(48))
    tokens[changed] += 1
    before, after = chain_keys(range(48), 16), chain_keys(tokens, 16)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [block < changed // 16 for block in range(3)]


def test_key_omitted_the_salt() -> None:
    """Same tokens under another salt (LoRA, image, user): nothing in common."""
    plain, salted = chain_keys(range(64), 16), chain_keys(range(64), 16, salt=b"lora-3")
    assert not set(plain) & set(salted)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda r: np.array(r, dtype=np.uint16)])
def test_tokens_of_any_integer_type_give_the_same_keys(kind: Any) -> None:
    tokens: Sequence[int] = kind(range(64))
    assert chain_keys(tokens, 16) == chain_keys(range(64), 16)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([-1], "within"),
        ([1 << 32], "within"),
        ([1.5], "integers"),
        ([True], "integers"),
        ([[1, 2]], "one-dimensional"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^tokens: .*{problem}"):
        chain_keys(tokens, 1)


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(InvalidRequest, match="^block_tokens: "):
        chain_keys([1], 0)
    with pytest.raises(InvalidRequest, match=r"^algorithm: 'md5' is not one of xxh3-128, sha256"):
        chain_keys([1], 1, algorithm="md5")


def test_two_million_tokens() -> None:
    """Keys of a prompt this long exceed one message; making them must stay cheap."""
    keys = chain_keys(np.arange(2_000_000, dtype=np.uint32), 16)
    assert len(keys) == 125_000
    assert keys[124_999] == list(keys)[-1]


def test_slices_keep_the_chain() -> None:
    keys = chain_keys(range(160), 16)
    assert keys.parent is None
    assert keys[:4].parent is None
    assert keys[4:].parent == keys[3]
    assert keys[4:][2:].parent == keys[5]
    assert keys[4:8] == list(keys)[4:8]
    assert keys[-2:].parent == keys[7]
    empty = keys[10:]
    assert len(empty) == 0
    assert empty.parent == keys[9]


@given(start=st.integers(-12, 12), stop=st.integers(-12, 12))
def test_slices_are_those_of_a_list(start: int, stop: int) -> None:
    keys = chain_keys(range(160), 16)
    listed = list(keys)
    assert list(keys[start:stop]) == listed[start:stop]


def test_keys_behave_as_a_sequence() -> None:
    keys = chain_keys(range(64), 16)
    assert keys[-1] == keys[3]
    assert keys[1] in keys
    assert keys == list(keys)
    assert keys == Keys.of(list(keys), 16)
    assert hash(keys) == hash(Keys.of(list(keys), 16))
    assert keys != keys[:3]
    with pytest.raises(IndexError):
        keys[4]
    with pytest.raises(InvalidRequest, match="contiguous"):
        keys[::2]


def test_packed_keys_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="^key_bytes: "):
        Keys(b"", 20)
    with pytest.raises(InvalidRequest, match="^keys: 17 bytes"):
        Keys(b"x" * 17, 16)
    with pytest.raises(InvalidRequest, match="^parent: has 4 bytes"):
        Keys(b"", 16, b"abcd")
    with pytest.raises(InvalidRequest, match="^keys: key 1 has 3 bytes"):
        Keys.of([b"x" * 16, b"abc"], 16)
    with pytest.raises(InvalidRequest, match="^keys: have 16 bytes"):
        Keys.of(Keys(b"", 16), 32)
    # A bytes object is a sequence of integers: easily passed by mistake.
    with pytest.raises(InvalidRequest, match="^keys: pass a sequence"):
        Keys.of(b"x" * 16, 16)  # type: ignore[arg-type]


def test_root_depends_on_the_salt_alone() -> None:
    assert root_key() == root_key(b"")
    assert root_key(b"a") != root_key(b"b")
