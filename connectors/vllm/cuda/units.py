"""A KV cache's segments, cut into equal pieces that the copy kernel takes one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.geometry import Geometry

__all__ = ["Units", "cut"]

_UNIT_BYTES: Final = 64 * 1024
# One step of a program: 64 bytes in flight per thread.
_CHUNK_BYTES: Final = 32 * 1024
_MOST_WARPS: Final = 16
# Where lengths have a smaller common divisor, the last step of a unit is masked instead.
_LEAST_WHOLE_BYTES: Final = 8 * 1024
_VECTOR_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Units:
    """Pieces of one block.

    Attributes:
        element: bytes of an element: 1, 2, 4 or 8.
        even: elements that addresses are a multiple of: 2 makes vectors of 16 bytes.
        chunk: elements that a program moves in one step.
        masked: whether a unit may end inside a step.
        table: per unit: address in block 0, bytes to the next block, offset among the block's
            packed bytes, bytes; shape (units, 4).
    """

    element: int
    even: int
    chunk: int
    masked: bool
    table: NDArray[np.uint64]

    @property
    def warps(self) -> int:
        """How many warps move a step, 16 bytes a thread at least."""
        return max(1, min(_MOST_WARPS, self.chunk * self.element // (32 * _VECTOR_BYTES)))

    @property
    def smallness(self) -> int:
        """How many programs move as much at a time as one whose steps are as long as can be."""
        return max(1, _CHUNK_BYTES // (self.chunk * self.element))

    @property
    def alignment(self) -> int:
        """Bytes that every address is a multiple of."""
        return self.element * self.even

    def relative_to(self, anchor: int) -> NDArray[np.int64]:
        """Return the table in elements, addresses relative to `anchor`."""
        table = self.table.astype(np.int64)
        table[:, 0] -= anchor
        return np.ascontiguousarray(table // self.element)


def cut(geometry: Geometry) -> Units:
    """Cut a KV cache's segments."""
    numbers = (geometry.bases, geometry.strides, geometry.lengths, geometry.offsets)
    common = math.gcd(_VECTOR_BYTES, geometry.block_bytes, *(int(n) for a in numbers for n in a))
    element = min(common, 8)
    divisor = math.gcd(_CHUNK_BYTES, *(int(n) for n in geometry.lengths))
    masked = divisor < _LEAST_WHOLE_BYTES
    longest = min(int(geometry.lengths.max()), _CHUNK_BYTES)
    chunk = max(1 << (longest - 1).bit_length(), common) if masked else divisor
    rows = [
        (base + at, stride, offset + at, min(_UNIT_BYTES, length - at))
        for base, stride, offset, length in zip(
            geometry.bases.tolist(),
            geometry.strides.tolist(),
            geometry.offsets.tolist(),
            geometry.lengths.tolist(),
            strict=True,
        )
        for at in range(0, length, _UNIT_BYTES)
    ]
    return Units(
        element=element,
        even=common // element,
        chunk=chunk // element,
        masked=masked,
        table=np.array(rows, np.uint64),
    )
