"""The caller's block bytes: rows in memory, checked once, known by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest

__all__ = ["Blocks", "Rows"]

Blocks = NDArray[np.uint8] | Sequence[bytes | bytearray | memoryview]


class Rows:
    """n rows of `block_bytes` bytes each, anywhere in memory, kept alive.

    Attributes:
        addresses: of each row, shape (n,).
    """

    def __init__(self, addresses: NDArray[np.uint64], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Wrap rows that are checked already."""
        self.addresses = addresses
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.addresses)

    def view(self, row: int, start: int, stop: int) -> memoryview:
        """Return some bytes of a row, without copying."""
        return self._rows[row].data[start:stop]

    @classmethod
    def of(cls, field: str, blocks: Any, count: int, block_bytes: int, *, write: bool) -> Rows:
        """Check what a caller passed as blocks.

        Args:
            field: the parameter's name, for messages.
            blocks: uint8, shape (n, block_bytes), each row contiguous (rows may be strided); or,
                for reading, a sequence of n bytes-like objects of block_bytes each.
            count: n for reading from; for writing to, the least n.
            block_bytes: bytes of a block.
            write: the rows will be written to.

        Raises:
            InvalidRequest: naming what does not fit.
        """
        if isinstance(blocks, np.ndarray):
            return cls._of_array(field, blocks, count, block_bytes, write=write)
        if write or not isinstance(blocks, Sequence) or isinstance(blocks, str | bytes):
            wanted = "a uint8 ndarray" if write else "a uint8 ndarray or a list of bytes"
            raise InvalidRequest(field, f"must be {wanted}, not {type(blocks).__name__}")
        if len(blocks) != count:
            raise InvalidRequest(field, f"are {len(blocks)} for {count} keys")
        rows = []
        for i, block in enumerate(blocks):
            try:
                row = np.frombuffer(block, np.uint8)
            except (TypeError, ValueError, BufferError) as error:
                raise InvalidRequest(field, f"block {i} is not bytes: {error}") from error
            if len(row) != block_bytes:
                raise InvalidRequest(
                    field, f"block {i} has {len(row)} bytes, the space's have {block_bytes}"
                )
            rows.append(row)
        return cls(np.array([row.ctypes.data for row in rows], np.uint64), rows)

    @classmethod
    def _of_array(
        cls, field: str, array: NDArray[Any], count: int, block_bytes: int, *, write: bool
    ) -> Rows:
        if array.dtype != np.uint8:
            raise InvalidRequest(field, f"must have dtype uint8, not {array.dtype}")
        if array.ndim != 2 or array.shape[1] != block_bytes:
            raise InvalidRequest(
                field, f"must have shape (n, {block_bytes}), not {tuple(array.shape)}"
            )
        if array.shape[0] < count or (not write and array.shape[0] != count):
            raise InvalidRequest(field, f"has {array.shape[0]} rows for {count} keys")
        if count and block_bytes > 1 and array.strides[1] != 1:
            raise InvalidRequest(field, "each row must be contiguous")
        if write and not array.flags.writeable:
            raise InvalidRequest(field, "is read-only")
        if write and count > 1 and abs(array.strides[0]) < block_bytes:
            raise InvalidRequest(field, "its rows overlap")
        start, stride = array.ctypes.data, array.strides[0]
        addresses = np.array([start + stride * i for i in range(count)], np.uint64)
        return cls(addresses, array)  # type: ignore[arg-type]  # indexing gives rows
