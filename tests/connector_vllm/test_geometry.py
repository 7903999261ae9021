"""Where a block's bytes lie, for every layout that vLLM has been seen with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.connectors.vllm.geometry import UnsupportedLayout, describe
from kvstore.memory import copy_batch

Caches = dict[str, torch.Tensor]


def llama_v2_runner(blocks: int) -> Caches:
    """0.26, V2 runner: a storage per layer, (blocks, 8, 16, 256) token-major inside."""
    return {
        f"l{i}": torch.zeros((blocks, 16, 8, 256), dtype=torch.bfloat16).transpose(1, 2)
        for i in range(4)
    }


def llama_fp8(blocks: int) -> Caches:
    return {
        f"l{i}": torch.zeros((blocks, 16, 8, 256), dtype=torch.uint8).transpose(1, 2)
        for i in range(4)
    }


def cross_layers(blocks: int) -> Caches:
    """0.26, V1 runner: one tensor of all layers."""
    return {"all layers": torch.zeros((blocks, 4, 16, 8, 256), dtype=torch.bfloat16)}


def mla(blocks: int) -> Caches:
    return {f"l{i}": torch.zeros((blocks, 16, 576), dtype=torch.bfloat16) for i in range(4)}


def keys_and_values_apart(blocks: int) -> Caches:
    return {f"l{i}": torch.zeros((2, blocks, 16, 8, 64), dtype=torch.float16) for i in range(4)}


def _one_allocation(order: str) -> Callable[[int], Caches]:
    def make(blocks: int) -> Caches:
        sizes = {"L": 4, "B": blocks, "H": 3, "N": 16, "C": 32}
        whole = torch.zeros([sizes[d] for d in order], dtype=torch.float32)
        logical = whole.permute([order.index(d) for d in "LBHNC"])
        return {f"l{i}": logical[i] for i in range(4)}

    return make


def kernel_blocks(blocks: int) -> Caches:
    """The scheduler's block is two of the kernel's."""
    return {f"l{i}": torch.zeros((2 * blocks, 1, 32, 64), dtype=torch.float32) for i in range(4)}


def shared_layers(blocks: int) -> Caches:
    """The last layers use the cache of the first."""
    first = {f"l{i}": torch.zeros((blocks, 3, 16, 32), dtype=torch.float32) for i in range(2)}
    return {**first, "l2": first["l0"], "l3": first["l1"]}


# maker, segments of one engine block, bytes of one engine block
LAYOUTS: list[tuple[Callable[[int], Caches], int, int]] = [
    (llama_v2_runner, 4, 4 * 65536),
    (llama_fp8, 4, 4 * 32768),
    (cross_layers, 1, 4 * 65536),
    (mla, 4, 4 * 18432),
    (keys_and_values_apart, 8, 8 * 16384),
    (_one_allocation("LBHNC"), 4, 4 * 6144),
    (_one_allocation("LBNHC"), 4, 4 * 6144),
    (_one_allocation("LHBNC"), 12, 4 * 6144),
    (_one_allocation("BLHNC"), 1, 4 * 6144),
    (_one_allocation("BLNHC"), 1, 4 * 6144),
    (_one_allocation("BHLNC"), 1, 4 * 6144),
    (kernel_blocks, 4, 4 * 16384),
    (shared_layers, 2, 2 * 6144),
]


def block(caches: Caches, index: int, blocks: int) -> list[bytes]:
    """Return a block's values per layer in logical order, by indexing alone."""
    out = []
    for cache in caches.values():
        at = 1 if cache.shape[0] == 2 else 0
        ratio = cache.shape[at] // blocks
        part = cache.narrow(at, index * ratio, ratio).contiguous()
        out.append(part.view(torch.uint8).numpy().tobytes())
    return out


def fill(caches: Caches, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for cache in caches.values():
        values = torch.from_numpy(rng.integers(0, 100, tuple(cache.shape), np.int64))
        cache.copy_(values.to(cache.dtype))


@pytest.mark.parametrize(("make", "segments", "size"), LAYOUTS)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_blocks_come_back_where_they_were(
    make: Callable[[int], Caches], segments: int, size: int, skip: int
) -> None:
    group, source, target = 4, make(11), make(7)
    fill(source, 1)
    fill(target, 2)
    out, into = describe(source, 11), describe(target, 7)
    assert len(out.lengths) == segments
    assert out.block_bytes == into.block_bytes == size
    # Nothing about the layout depends on how many blocks an engine has.
    assert out.layout == into.layout
    pool = np.zeros((2, group * size), np.uint8)
    slots = np.array([row.ctypes.data for row in pool], np.uint64)
    chosen = np.array([3, 9, 1, 10, 0, 4, 5, 7], np.int32)
    cache, stored, lengths = out.pair(chosen, slots, 0, group)
    copy_batch(stored, cache, lengths)
    places = np.array([6, 2, 4, 1, 3], np.int32)[: 8 - skip]
    untouched = [block(target, i, 7) for i in (0, 5)]
    cache, stored, lengths = into.pair(places, slots, skip, group)
    copy_batch(cache, stored, lengths)
    for i, place in enumerate(places):
        assert block(target, int(place), 7) == block(source, int(chosen[skip + i]), 11)
    assert [block(target, i, 7) for i in (0, 5)] == untouched


def test_every_layout_has_its_own_id() -> None:
    ids = [describe(make(7), 7).layout for make, _, _ in LAYOUTS]
    # Layers outside or inside of blocks: in the store, the same bytes in the same order.
    assert ids[5] == ids[8]
    assert ids[6] == ids[9]
    assert len(set(ids)) == len(ids) - 2
    base = _one_allocation("LBHNC")
    assert describe(base(7), 7, "a").layout != describe(base(7), 7, "b").layout
    # Same bytes a block, heads and tokens the other way round.
    assert describe(base(7), 7).layout != describe(_one_allocation("LBNHC")(7), 7).layout


def test_where_the_allocations_are_does_not_matter() -> None:
    a = {f"l{i}": torch.zeros((7, 3, 16, 32)) for i in range(4)}
    b = _one_allocation("LBHNC")(9)
    assert describe(a, 7).layout == describe(b, 9).layout


@pytest.mark.parametrize(
    ("caches", "blocks"),
    [
        ({}, 4),
        ({"l0": torch.zeros((5, 3, 8))}, 4),
        ({"l0": torch.zeros((2, 2, 8))}, 2),
        ({"l0": torch.zeros((1, 8)).expand(4, 8)}, 3),
        ({"l0": torch.zeros(64).as_strided((4, 8, 4), (8, 2, 1))}, 4),
    ],
)
def test_what_cannot_be_described_is_refused(caches: dict[str, Any], blocks: int) -> None:
    with pytest.raises(UnsupportedLayout):
        describe(caches, blocks)


def test_hybrid_groups_on_one_memory_are_refused() -> None:
    """Gemma-like: another layer's view of the same bytes has another shape."""
    whole = torch.zeros(7 * 4 * 16 * 32)
    with pytest.raises(UnsupportedLayout):
        describe({"a": whole.view(7, 4, 16, 32), "b": whole.view(7, 2, 16, 64)[:, :1]}, 7)


def test_blocks_outside_the_cache_are_refused() -> None:
    geometry = describe(mla(7), 7)
    for bad in (-1, 7):
        with pytest.raises(IndexError):
            geometry.pair(np.array([bad], np.int32), np.zeros(1, np.uint64), 0, 1)
