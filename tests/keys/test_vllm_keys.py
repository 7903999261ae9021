"""vLLM's keys without vLLM are vLLM's keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequest
from kvstore.space import SpaceSpec
from kvstore.vllm_keys import has_vllm_keys, vllm_keys

# Made with vLLM 0.32: the root of PYTHONHASHSEED=0, and the keys of tokens 0 … 255, blocks of 128.
GOLDEN = {
    "sha256_cbor": (
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "06cca2105df1808804bad96e818693c8278369bdf012042793d1c30fce61dc5a",
        "848c60fcf5b861bc8e26d88d059a9de01f79eaf10b62d9b5d3efe989647187a0",
    ),
    "sha256": (
        "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        "d0295e5829af0bca6b6fae42c5870e9528ec6837214007e8a10b1b8bc8e08852",
        "598ddcb9f9a23683736b18b04996dead930614eb707d1b1660e5e112e7df1a93",
    ),
    "xxhash_cbor": (
        "1ebe36576dcb573f26b99533a20aaeca",
        "e1cbb6feea0acfafa15f5c52d7c7c50a",
        "694c65df5e7bf4f8db2b40ce91373235",
    ),
    "xxhash": (
        "6fb31cc38bba6066183f7f2104b9c051",
        "8f2542f755fe2eccec212f9d9df0e1f4",
        "5add91e374252e8c5b5943a55d4d61f5",
    ),
}


def spec_of(function: str, root: str) -> SpaceSpec:
    return SpaceSpec(
        model="m",
        dtype="bfloat16",
        block_tokens=128,
        shard_bytes=(4096,),
        hash_algorithm=f"vllm-{function}/16",
        root_seed=root,
        key_bytes=len(root) // 2,
    )


@pytest.mark.parametrize("function", GOLDEN)
def test_golden_values(function: str) -> None:
    root, *keys = GOLDEN[function]
    spec = spec_of(function, root)
    assert has_vllm_keys(spec)
    # Tokens that fill no block have no key.
    for tail in (0, 1, 127):
        found = vllm_keys(list(range(256 + tail)), spec)
        assert [key.hex() for key in found] == keys
    assert len(vllm_keys(list(range(127)), spec)) == 0


def test_keys_of_others_are_not_guessed() -> None:
    good = spec_of("sha256_cbor", GOLDEN["sha256_cbor"][0])
    for bad in (
        replace(good, hash_algorithm="sha256"),
        replace(good, hash_algorithm="vllm-md5/16"),
        replace(good, hash_algorithm="vllm-sha256_cbor"),
        replace(good, hash_algorithm="vllm-sha256_cbor/48"),
        replace(good, root_seed=""),
        replace(good, root_seed="not hexadecimal"),
        replace(good, root_seed="00" * 16),
    ):
        assert not has_vllm_keys(bad)
        with pytest.raises(InvalidRequest, match="^hash_algorithm: "):
            vllm_keys([1] * 128, bad)
    for token in (-1, 1 << 32):
        with pytest.raises(InvalidRequest, match="^tokens: must be within"):
            vllm_keys([token] * 128, good)
