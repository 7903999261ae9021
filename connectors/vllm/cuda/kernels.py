"""The copy kernel: between blocks scattered over the KV cache and bytes packed one after the other.

A block's segments are cut into *units* once. The kernel is told rows of (engine block, address of
the block's packed bytes) and moves every unit of every row. All addresses are in elements,
relative to one anchor, because Triton vectorises what it reaches from a pointer argument by an
offset that is known to be even, and nothing else: this way each thread moves 16 bytes at a time.

Triton's own launch takes 100 µs and more of Python, which a copy of many chunks would pay for each.
So the compiled kernel is launched through the driver; should a release of Triton keep its handle
elsewhere, Triton launches.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvstore.connectors.vllm.cuda.units import Units
from kvstore.connectors.vllm.guard import log_once
from kvstore.cudart import CudaError

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
        self._launches: dict[bool, _Launch] = {}
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
        count = len(self._units.table)
        items = rows * count
        grid = max(1, min(programs, items))
        launch = self._launches.get(to_cache)
        if launch is not None:
            launch(grid, stream, first_row, count, items)
            return
        arguments = (self._anchor, self._rows, self._table, first_row, count, items)
        if self._device.type != "cuda":
            _move[(grid,)](*arguments, **self._options(to_cache))
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            _move[(grid,)](*arguments, **self._options(to_cache))

    def _options(self, to_cache: bool) -> dict[str, Any]:
        return {
            "TO_CACHE": to_cache,
            "CHUNK": self._units.chunk,
            "EVEN": self._units.even,
            "MASKED": self._units.masked,
            "num_warps": _WARPS,
        }

    def warm_up(self, stream: int) -> None:
        """Compile both directions, moving nothing."""
        for to_cache in (False, True):
            self.move(0, 0, to_cache=to_cache, programs=1, stream=stream)
            if self._device.type != "cuda":
                continue
            try:
                launch = self._compiled(to_cache)
                launch(1, stream, 0, len(self._units.table), 0)
            except (AttributeError, OSError, TypeError, ValueError) as error:
                log_once(logging.INFO, "kernels are launched by Triton, more slowly: %r", error)
            else:
                self._launches[to_cache] = launch

    def _compiled(self, to_cache: bool) -> _Launch:
        arguments = (self._anchor, self._rows, self._table, 0, len(self._units.table), 0)
        kernel = _move.warmup(*arguments, grid=(1,), **self._options(to_cache))
        if kernel.function is None:
            kernel._init_handles()
        pointers = (self.anchor, self.rows_address, int(self._table.data_ptr()))
        return _Launch(int(kernel.function), int(kernel.metadata.shared), pointers)


class _Launch:
    """Launches one compiled kernel through the driver. One thread at a time."""

    def __init__(self, function: int, shared_bytes: int, pointers: tuple[int, int, int]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._function, self._shared = function, shared_bytes
        self._pointers = [ctypes.c_uint64(pointer) for pointer in pointers]
        self._numbers = [ctypes.c_int32() for _ in range(3)]
        # Scratch memory that this kernel does not use; drivers read what the kernel declares.
        self._scratch = [ctypes.c_uint64() for _ in range(2)]
        values = [*self._pointers, *self._numbers, *self._scratch]
        self._arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def __call__(self, grid: int, stream: int, *numbers: int) -> None:
        """Launch. The driver copies the arguments before it returns."""
        for value, number in zip(self._numbers, numbers, strict=True):
            value.value = number
        code = self._driver.cuLaunchKernel(
            self._function, grid, 1, 1, 32 * _WARPS, 1, 1, self._shared, stream,
            self._arguments, None,
        )  # fmt: skip
        if code:
            raise CudaError(code, f"cuLaunchKernel: error {code}")


_anchors: dict[torch.device, Any] = {}


def _anchor(device: torch.device) -> Any:
    """Return a little memory on the device, always the same."""
    if device not in _anchors:
        _anchors[device] = torch.zeros(512, dtype=torch.int8, device=device)
    return _anchors[device]
