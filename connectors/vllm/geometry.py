"""Where a block's bytes lie in the engine's KV cache, from tensors' pointers and strides.

An engine block is a set of *segments*: runs of bytes that repeat every `stride` bytes from one
block to the next. A layout with the block outermost has one segment for all layers; one
allocation per layer has one segment a layer; heads outside of blocks make more.

In the store, an engine block is its segments one after the other (allocations in the order of
their layers, addresses ascending inside one), and a stored block is its engine blocks one after
the other. Nothing in that depends on how many blocks the engine has, so neither does the layout's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Geometry", "UnsupportedLayout", "describe"]

U64 = NDArray[np.uint64]

# More pieces than this per block cannot be copied at a useful speed.
_MAX_SEGMENTS: Final = 1 << 14


class UnsupportedLayout(Exception):
    """The engine keeps its KV cache in a way that cannot be described in segments."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """An engine's KV cache.

    Attributes:
        bases: address of each segment in block 0, shape (segments,).
        strides: bytes from a block's segment to the next block's, shape (segments,).
        lengths: bytes of each segment, shape (segments,).
        offsets: where each segment lies inside a stored engine block, shape (segments,).
        block_bytes: bytes of one engine block.
        blocks: engine blocks in the cache.
        layout: id of how a block's bytes are to be understood.
    """

    bases: U64
    strides: U64
    lengths: U64
    offsets: U64
    block_bytes: int
    blocks: int
    layout: str

    def pair(
        self, blocks: NDArray[np.int32], slots: U64, skip: int, group_blocks: int
    ) -> tuple[U64, U64, U64]:
        """Pair segments in the KV cache with their places in slots.

        Args:
            blocks: engine blocks, shape (n,).
            slots: addresses of the slots that hold them, `group_blocks` in each.
            skip: engine blocks of the first slot that come before `blocks[0]`.
            group_blocks: engine blocks per stored block.

        Returns:
            addresses in the cache, addresses in the slots, lengths; each (n * segments,).

        Raises:
            IndexError: a block is not in the cache, or there are too few slots.
        """
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.blocks:
            raise IndexError(f"engine blocks are not all within 0 … {self.blocks - 1}")
        at = np.arange(skip, skip + len(blocks))
        inside = (at % group_blocks).astype(np.uint64) * np.uint64(self.block_bytes)
        stored = slots[at // group_blocks] + inside
        cache = self.bases + blocks.astype(np.uint64)[:, None] * self.strides
        return (
            cache.ravel(),
            (stored[:, None] + self.offsets).ravel(),
            np.tile(self.lengths, len(blocks)),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's view: contiguous runs, and how its values lie in them."""

    storage: int
    runs: tuple[int, ...]  # offsets in the storage, in logical order
    run_bytes: int
    stride: int  # bytes from block to block
    order: str  # dtype, and the dimensions from the innermost outwards


def _tensors(caches: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in caches.items():
        if isinstance(value, list | tuple):
            yield from ((f"{name}/{i}", tensor) for i, tensor in enumerate(value))
        else:
            yield name, value


def _block_dimension(name: str, shape: tuple[int, ...], blocks: int) -> int:
    """Return which dimension counts blocks (or kernel blocks)."""
    found = [d for d in (0, 1) if d < len(shape) and shape[d] and shape[d] % blocks == 0]
    # Keys and values apart, blocks second; nothing else has so small a first dimension.
    if shape and shape[0] == 2 and 1 in found:
        if 0 in found and blocks <= 2:
            raise UnsupportedLayout(f"{name}: cannot tell blocks from keys and values in {shape}")
        return 1
    if 0 not in found:
        raise UnsupportedLayout(f"{name}: no dimension of {shape} counts {blocks} blocks")
    return 0


def _layer(name: str, tensor: Any, blocks: int) -> _Layer:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    item = int(tensor.element_size())
    at = _block_dimension(name, shape, blocks)
    ratio = shape[at] // blocks
    dims = [
        (f"{d if d < at else d - 1}:{shape[d]}", shape[d], strides[d] * item)
        for d in range(len(shape))
        if d != at and shape[d] > 1
    ]
    if ratio > 1:
        dims.append((f"kernel:{ratio}", ratio, strides[at] * item))
    dims.sort(key=lambda dim: dim[2])
    order = f"{tensor.dtype} " + " ".join(label for label, _, _ in dims)
    run, outer = item, 0
    for _, size, stride in dims:
        if stride != run:
            break
        run *= size
        outer += 1
    reach = run
    for _, size, stride in dims[outer:]:
        if stride < reach:
            raise UnsupportedLayout(f"{name}: dimensions of {shape} overlap, strides {strides}")
        reach = stride * (size - 1) + reach
    begin = int(tensor.data_ptr()) - int(tensor.untyped_storage().data_ptr())
    steps = [range(0, stride * size, stride) for _, size, stride in reversed(dims[outer:])]
    runs = tuple(begin + sum(offsets) for offsets in product(*steps))
    if len(runs) > _MAX_SEGMENTS:
        raise UnsupportedLayout(f"{name}: a block is in {len(runs)} pieces")
    storage = int(tensor.untyped_storage().data_ptr())
    return _Layer(storage, runs, run, strides[at] * item * ratio, order)


def describe(caches: Mapping[str, Any], blocks: int, context: str = "") -> Geometry:
    """Describe the tensors that vLLM registers.

    Args:
        caches: layer name to tensor, or to several tensors; layers may share one allocation, or
            be the same memory.
        blocks: engine blocks in the cache; a tensor may count smaller kernel blocks.
        context: what else decides how bytes are understood; it goes into the layout's id.

    Raises:
        UnsupportedLayout: naming the layer.
    """
    layers = [(name, _layer(name, tensor, blocks)) for name, tensor in _tensors(caches)]
    if not layers or blocks < 1:
        raise UnsupportedLayout("no KV cache was registered")
    storages: dict[int, dict[int, tuple[int, int]]] = {}
    for name, layer in layers:
        pieces = storages.setdefault(layer.storage, {})
        for run in layer.runs:
            # Layers may share their cache; everything else that overlaps is found below.
            if pieces.setdefault(run, (layer.run_bytes, layer.stride)) != (
                layer.run_bytes,
                layer.stride,
            ):
                raise UnsupportedLayout(f"{name}: shares memory with a layer of another shape")
    segments: list[list[int]] = []  # address, stride, length, offset in the stored block
    places: dict[tuple[int, int], int] = {}
    packed = 0
    for storage, pieces in storages.items():
        end = -1
        for run, (length, stride) in sorted(pieces.items()):
            if run < end:
                raise UnsupportedLayout("layers overlap inside a block")
            last = segments[-1] if segments else None
            if last is not None and run == end and stride == last[1]:
                last[2] += length
            else:
                segments.append([storage + run, stride, length, packed])
            places[storage, run] = packed
            packed += length
            end = run + length
    if len(segments) > _MAX_SEGMENTS:
        raise UnsupportedLayout(f"a block is in {len(segments)} pieces")
    for _, stride, length, _ in segments:
        if length > stride > 0:
            raise UnsupportedLayout("blocks overlap")
    digest = hashlib.sha256(repr((context, packed)).encode())
    for name, layer in layers:
        offsets = tuple(places[layer.storage, run] for run in layer.runs)
        digest.update(repr((name, layer.order, layer.run_bytes, offsets)).encode())
    bases, strides, lengths, offsets = np.array(segments, np.uint64).T
    return Geometry(
        bases=np.ascontiguousarray(bases),
        strides=np.ascontiguousarray(strides),
        lengths=np.ascontiguousarray(lengths),
        offsets=np.ascontiguousarray(offsets),
        block_bytes=packed,
        blocks=blocks,
        layout=f"vllm/{len(layers)}x{packed}/{digest.hexdigest()[:24]}",
    )
