"""The copy kernel: between blocks scattered over the KV cache and bytes packed one after the other.

A block's segments are cut into *units* once. The kernel is told rows of (engine block, address of
the block's packed bytes) and moves every unit of every row. All addresses are in elements,
relative to one anchor, because Triton vectorises what it reaches from a pointer argument by an
offset that is known to be even, and nothing else: this way each thread moves 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvstore.connectors.vllm.cuda.units import Units

__all__ = ["Mover"]

_WARPS: Final = 8
_TYPES: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Triton compiles the source and takes annotations for its own.
@triton.jit(do_not_specialize=["first_row", "units_per_block", "items"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]  # noqa: ANN202
    anchor,  # noqa: ANN001
    rows,  # noqa: ANN001
    units,  # noqa: ANN001
    first_row,  # noqa: ANN001
    units_per_block,  # noqa: ANN001
    items,  # noqa: ANN001
    TO_CACHE: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):
    lanes = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = rows + 2 * (first_row + item // units_per_block)
        unit = units + 4 * (item % units_per_block)
        block = tl.load(row)
        cache = tl.multiple_of(tl.load(unit) + block * tl.load(unit + 1), EVEN)
        packed = tl.multiple_of(tl.load(row + 1) + tl.load(unit + 2), EVEN)
        count = tl.multiple_of(tl.load(unit + 3), EVEN)
        if TO_CACHE:
            source = anchor + packed
            target = anchor + cache
        else:
            source = anchor + cache
            target = anchor + packed
        for at in range(0, count, CHUNK):
            if MASKED:
                inside = at + lanes < count
                value = tl.load(source + at + lanes, mask=inside)
                tl.store(target + at + lanes, value, mask=inside)
            else:
                value = tl.load(source + at + lanes)
                tl.store(target + at + lanes, value)


class Mover:
    """The kernel for one KV cache, and the rows that it works from.

    Attributes:
        anchor: address that all others are relative to.
        rows_address: where rows are to be uploaded.
        row_bytes: of one.
    """

    row_bytes: Final = 16

    def __init__(self, units: Units, device: Any, rows: int) -> None:
        """Upload the units.

        Args:
            units: of the KV cache; must have been cut for `anchor_of(device)`.
            device: torch device.
            rows: room for so many.
        """
        self._units = units
        self._device = torch.device(device)
        self._anchor = _anchor(self._device).view(_TYPES[units.element])
        self.anchor = int(self._anchor.data_ptr())
        self._table = torch.from_numpy(units.relative_to(self.anchor)).to(self._device)
        self._rows = torch.zeros((rows, 2), dtype=torch.int64, device=self._device)
        self.rows_address = int(self._rows.data_ptr())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def encode(self, blocks: NDArray[np.int32], packed: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return rows, shape (n, 2).

        Args:
            blocks: engine blocks, shape (n,).
            packed: address of each block's packed bytes, shape (n,).
        """
        rows = np.empty((len(blocks), 2), np.int64)
        rows[:, 0] = blocks
        rows[:, 1] = (packed.astype(np.int64) - self.anchor) // self._units.element
        return rows

    def aligned(self, packed: NDArray[np.uint64]) -> bool:
        """Return whether the kernel can work on these addresses."""
        return not (packed % np.uint64(self._units.alignment)).any()

    def move(
        self, first_row: int, rows: int, *, to_cache: bool, programs: int, stream: int
    ) -> None:
        """Move all blocks of some rows.

        Args:
            first_row: index of the first, among those at `rows_address`.
            rows: how many.
            to_cache: from packed bytes to the KV cache; else the other way.
            programs: how many work on it; about as many multiprocessors are busy.
            stream: to run on.
        """
        units = self._units
        items = rows * len(units.table)
        arguments = (self._anchor, self._rows, self._table, first_row, len(units.table), items)
        options: dict[str, Any] = {
            "TO_CACHE": to_cache,
            "CHUNK": units.chunk,
            "EVEN": units.even,
            "MASKED": units.masked,
            "num_warps": _WARPS,
        }
        grid = (max(1, min(programs, items)),)
        if self._device.type != "cuda":
            _move[grid](*arguments, **options)
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            _move[grid](*arguments, **options)

    def warm_up(self, stream: int) -> None:
        """Compile both directions, moving nothing."""
        for to_cache in (False, True):
            self.move(0, 0, to_cache=to_cache, programs=1, stream=stream)


_anchors: dict[torch.device, Any] = {}


def _anchor(device: torch.device) -> Any:
    """Return a little memory on the device, always the same."""
    if device not in _anchors:
        _anchors[device] = torch.zeros(512, dtype=torch.int8, device=device)
    return _anchors[device]
