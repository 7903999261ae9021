"""vLLM's keys without vLLM are vLLM's own, for tokens of every length in their encoding."""

from __future__ import annotations

import random

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from kvstore.space import SpaceSpec
from kvstore.vllm_keys import vllm_keys

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# Each head of a CBOR integer, and ids of real vocabularies.
_TOKENS = (0, 5, 23, 24, 255, 256, 65_535, 65_536, 151_000, (1 << 32) - 1)


@pytest.mark.parametrize("function", ["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"])
def test_the_same_as_vllm_s_own(function: str) -> None:
    digest = get_hash_fn_by_name(function)
    draws = random.Random(7)
    tokens = [draws.choice(_TOKENS) for _ in range(128 * 9)]
    root = parent = digest("1234")
    hashes = []
    for at in range(0, len(tokens), 16):
        parent = hash_block_tokens(digest, parent, tokens[at : at + 16])
        hashes.append(parent)
    spec = SpaceSpec(
        model="m",
        dtype="bfloat16",
        block_tokens=128,
        shard_bytes=(4096,),
        hash_algorithm=f"vllm-{function}/16",
        root_seed=root.hex(),
        key_bytes=len(root),
    )
    assert list(vllm_keys(tokens, spec)) == hashes[7::8]
