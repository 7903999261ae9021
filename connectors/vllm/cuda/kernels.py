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

import contextlib
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

# Numbers that one program fetches, and its warps.
_FETCHED: Final = 1024
_FETCHING_WARPS: Final = 8
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


@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]  # noqa: ANN202
    host,  # noqa: ANN001
    rows,  # noqa: ANN001
    first,  # noqa: ANN001
    count,  # noqa: ANN001
    SIZE: tl.constexpr,
):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    # The CPU has written it since the last kernel read it.
    value = tl.load(host + first + at, mask=inside, volatile=True)
    tl.store(rows + first + at, value, mask=inside)


class Mover:
    """The kernel for one KV cache, and the rows that it works from.

    Attributes:
        anchor: address that all others are relative to.
    """

    def __init__(self, units: Units, device: Any, rows: NDArray[np.int64]) -> None:
        """Upload the units.

        Args:
            units: of the KV cache; must have been cut for `anchor_of(device)`.
            device: torch device.
            rows: where they are written for the kernel, shape (n, 2): host memory that the device
                reads.
        """
        self._units = units
        self._shift = units.element.bit_length() - 1
        self._device = torch.device(device)
        self._anchor = _anchor(self._device).view(_TYPES[units.element])
        self.anchor = int(self._anchor.data_ptr())
        self._table = torch.from_numpy(units.relative_to(self.anchor)).to(self._device)
        self._host = torch.from_numpy(rows)
        self._rows = torch.zeros(rows.shape, dtype=torch.int64, device=self._device)
        self._launches: dict[bool, _Launch] = {}
        self._launch_fetch: _Launch | None = None
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
        rows[:, 1] = (packed.view(np.int64) - self.anchor) >> self._shift
        return rows

    def aligned(self, packed: NDArray[np.uint64]) -> bool:
        """Return whether the kernel can work on these addresses."""
        return not (packed & np.uint64(self._units.alignment - 1)).any()

    def fetch(self, first_row: int, rows: int, *, stream: int) -> None:
        """Take rows over from host memory.

        Args:
            first_row: index of the first.
            rows: how many.
            stream: to run on.
        """
        first, count = 2 * first_row, 2 * rows
        grid = max(1, -(-count // _FETCHED))
        if self._launch_fetch is not None:
            self._launch_fetch(grid, stream, first, count)
            return
        with self._on(stream):
            _fetch[(grid,)](
                self._host, self._rows, first, count, SIZE=_FETCHED, num_warps=_FETCHING_WARPS
            )

    def move(
        self, first_row: int, rows: int, *, to_cache: bool, programs: int, stream: int
    ) -> None:
        """Move all blocks of some rows.

        Args:
            first_row: index of the first, among those fetched.
            rows: how many.
            to_cache: from packed bytes to the KV cache; else the other way.
            programs: how many would work on long pieces; the shorter, the more do.
            stream: to run on.
        """
        count = len(self._units.table)
        items = rows * count
        grid = max(1, min(programs * self._units.smallness, items))
        launch = self._launches.get(to_cache)
        if launch is not None:
            launch(grid, stream, first_row, count, items)
            return
        arguments = (self._anchor, self._rows, self._table, first_row, count, items)
        with self._on(stream):
            _move[(grid,)](*arguments, **self._options(to_cache))

    def _on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        on: contextlib.AbstractContextManager[object] = torch.cuda.stream(
            torch.cuda.ExternalStream(stream, device=self._device)
        )
        return on

    def _options(self, to_cache: bool) -> dict[str, Any]:
        return {
            "TO_CACHE": to_cache,
            "CHUNK": self._units.chunk,
            "EVEN": self._units.even,
            "MASKED": self._units.masked,
            "num_warps": self._units.warps,
        }

    def warm_up(self, stream: int) -> None:
        """Compile everything, moving nothing."""
        self.fetch(0, 0, stream=stream)
        for to_cache in (False, True):
            self.move(0, 0, to_cache=to_cache, programs=1, stream=stream)
        if self._device.type != "cuda":
            return
        rows, table = int(self._rows.data_ptr()), int(self._table.data_ptr())
        units = len(self._units.table)
        try:
            fetch = _Launch(
                _fetch.warmup(
                    self._host,
                    self._rows,
                    0,
                    0,
                    SIZE=_FETCHED,
                    num_warps=_FETCHING_WARPS,
                    grid=(1,),
                ),
                (int(self._host.data_ptr()), rows),
                2,
                _FETCHING_WARPS,
            )
            fetch(1, stream, 0, 0)
            moves = {}
            for to_cache in (False, True):
                arguments = (self._anchor, self._rows, self._table, 0, units, 0)
                kernel = _move.warmup(*arguments, grid=(1,), **self._options(to_cache))
                moves[to_cache] = _Launch(kernel, (self.anchor, rows, table), 3, self._units.warps)
                moves[to_cache](1, stream, 0, units, 0)
        except (AttributeError, OSError, TypeError, ValueError) as error:
            log_once(logging.INFO, "kernels are launched by Triton, more slowly: %r", error)
        else:
            self._launch_fetch, self._launches = fetch, moves


class _Launch:
    """Launches one compiled kernel through the driver. One thread at a time."""

    def __init__(self, kernel: Any, pointers: tuple[int, ...], numbers: int, warps: int) -> None:
        self._threads = 32 * warps
        if kernel.function is None:
            kernel._init_handles()
        self._function, self._shared = int(kernel.function), int(kernel.metadata.shared)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._pointers = [ctypes.c_uint64(pointer) for pointer in pointers]
        self._numbers = [ctypes.c_int32() for _ in range(numbers)]
        # Scratch memory that this kernel does not use; drivers read what the kernel declares.
        self._scratch = [ctypes.c_uint64() for _ in range(2)]
        values = [*self._pointers, *self._numbers, *self._scratch]
        self._arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def __call__(self, grid: int, stream: int, *numbers: int) -> None:
        """Launch. The driver copies the arguments before it returns."""
        for value, number in zip(self._numbers, numbers, strict=True):
            value.value = number
        code = self._driver.cuLaunchKernel(
            self._function, grid, 1, 1, self._threads, 1, 1, self._shared, stream,
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
