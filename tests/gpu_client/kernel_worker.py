"""Moves blocks of every layout out of a KV cache and back; a process, for Triton's interpreter.

Usage: kernel_worker.py cpu|cuda. Prints a line per layout; exits 1 when a byte is wrong.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

warnings.simplefilter("ignore")
import torch

from kvstore.connectors.vllm.cuda.kernels import Mover
from kvstore.connectors.vllm.cuda.units import cut
from kvstore.connectors.vllm.geometry import describe

BLOCKS = 11


def strided(shape: tuple[int, ...], order: tuple[int, ...], dtype: Any, device: str) -> Any:
    """Return a tensor of a shape whose dimensions lie in memory in `order`, outermost first."""
    memory = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    back = [order.index(d) for d in range(len(shape))]
    return memory.permute(back)


def layouts(device: str) -> dict[str, dict[str, Any]]:
    """Return KV caches as vLLM's versions lay them out, smaller where that changes nothing."""
    bf16, u8 = torch.bfloat16, torch.uint8
    tokens_outside = (0, 2, 1, 3)

    def layers(count: int, shape: tuple[int, ...], order: tuple[int, ...], dtype: Any) -> Any:
        return {str(i): strided(shape, order, dtype, device) for i in range(count)}

    one = torch.empty((BLOCKS, 3, 16, 2, 64), dtype=bf16, device=device)
    hybrid = torch.empty((3, BLOCKS, 2, 16, 64), dtype=bf16, device=device)
    odd = torch.empty((BLOCKS, 5, 3, 7), dtype=u8, device=device)
    return {
        "0.26, V2, Llama": layers(3, (BLOCKS, 8, 16, 256), tokens_outside, bf16),
        "0.26, V2, fp8": layers(2, (BLOCKS, 8, 16, 256), tokens_outside, u8),
        "0.26, V1, across layers": {"all layers": one},
        "0.26, MLA": layers(3, (BLOCKS, 16, 576), (0, 1, 2), bf16),
        "0.32, layers outermost": {str(i): hybrid[i] for i in range(3)},
        "0.32, blocks outermost": {str(i): one[:, i] for i in range(3)},
        "keys and values apart": layers(2, (2, BLOCKS, 16, 2, 64), (0, 1, 2, 3, 4), bf16),
        "odd sizes": {"odd": odd},
    }


def check(name: str, caches: dict[str, Any], device: str) -> bool:
    """Move some blocks out and into others; compare every byte of the cache."""
    geometry = describe(caches, BLOCKS)
    units = cut(geometry)
    rows = torch.zeros((64, 2), dtype=torch.int64, pin_memory=device == "cuda").numpy()
    mover = Mover(units, device, rows)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in caches.values()}
    views = [torch.tensor([], dtype=torch.uint8, device=device).set_(s) for s in storages.values()]
    for view in views:
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, device=device))
    packed = torch.full(
        (4, geometry.block_bytes + (-geometry.block_bytes) % 16),
        7,
        dtype=torch.uint8,
        device=device,
    )
    addresses = np.uint64(packed.data_ptr()) + np.arange(4, dtype=np.uint64) * np.uint64(
        packed.shape[1]
    )
    stream = 0
    if device == "cuda":
        stream = torch.cuda.current_stream().cuda_stream
        mover.warm_up(stream)
        launched = mover._launch_fetch is not None and len(mover._launches) == 2
        assert launched, "Triton keeps its kernels elsewhere"
    wanted = [view.clone() for view in views]

    def run(first: int, blocks: list[int], to_cache: bool) -> None:
        rows[first : first + 4] = mover.encode(np.array(blocks, np.int32), addresses)
        mover.fetch(first, 4, stream=stream)
        mover.move(first, 4, to_cache=to_cache, programs=3, stream=stream)

    source, target = [7, 1, 10, 4], [0, 2, 3, 9]
    run(8, source, to_cache=False)
    run(20, target, to_cache=True)
    if device == "cuda":
        torch.cuda.synchronize()
    # What the geometry says, segment by segment.
    bases = {address: i for i, address in enumerate(storages)}
    right = True
    for segment in range(len(geometry.bases)):
        base, stride, length, offset = (
            int(column[segment])
            for column in (geometry.bases, geometry.strides, geometry.lengths, geometry.offsets)
        )
        at = max(address for address in bases if address <= base)
        view, before, begin = views[bases[at]], wanted[bases[at]], base - at
        for row, (old, new) in enumerate(zip(source, target, strict=True)):
            moved = before[begin + old * stride :][:length]
            right &= bool((packed[row, offset : offset + length] == moved).all())
            before[begin + new * stride :][:length] = moved
        del view
    right &= all(bool((a == b).all()) for a, b in zip(views, wanted, strict=True))
    right &= bool((packed[:, geometry.block_bytes :] == 7).all())
    print(f"{name}: {len(units.table)} units, {units.alignment}-byte: {'ok' if right else 'WRONG'}")
    return right


def mend_interpreter() -> None:
    """Let kernels loop up to what they have loaded, whatever the versions.

    The interpreter of Triton 3.6 makes an index of an array of one element in a way that NumPy 2.4
    refuses; later ones do as is done here.
    """
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    place = sys.argv[1]
    if place == "cpu":
        mend_interpreter()
    sys.exit(not all(list(starmap(partial(check, device=place), layouts(place).items()))))
