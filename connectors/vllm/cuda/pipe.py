"""One direction's streams, and the buffers that its bytes pass through.

Kernels run on one stream, DMA on one per buffer of the ring, so that a chunk is gathered or scattered
while the next ones are on the bus, and the bus never waits for the next chunk to be noticed. Events
between the streams say when a buffer is full and when it is free again; recording an event anew is
safe, because a wait refers to the record before it.

Not thread-safe: whoever submits holds the pipe for the whole copy.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.cuda.routes import Job, Route, pieces
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.cudart import CudaError
from kvstore.memory import copy_batch

__all__ = ["Bounce", "Mover", "Pipe", "Runtime"]

U64 = NDArray[np.uint64]

_BUFFERS: Final = 3
# Rows that one upload may have, and uploads before the first one's pinned memory is used again.
_ROWS: Final = 2048
_UPLOADS: Final = 16
# How many programs a kernel is given. Between staging and KV cache a few keep up with the bus;
# over the bus itself more must be in flight; within the GPU's memory all multiprocessors work.
_RING_PROGRAMS: Final = 16
_BUS_PROGRAMS: Final = 64
# Pieces in one batch of DMA: the bus begins with the first while the next are submitted.
_BATCH: Final = 64
_BOUNCE_THREADS: Final = 4


class Runtime(Protocol):
    """What a pipe needs of `kvstore.cudart.Cudart`."""

    def malloc(self, length: int) -> int:
        """See `Cudart`."""

    def free(self, address: int) -> None:
        """See `Cudart`."""

    def host_alloc(self, length: int) -> int:
        """See `Cudart`."""

    def host_free(self, address: int) -> None:
        """See `Cudart`."""

    def memcpy_async(self, destination: int, source: int, length: int, stream: int) -> None:
        """See `Cudart`."""

    def memcpy_batch_async(
        self, destinations: U64, sources: U64, lengths: U64, stream: int
    ) -> None:
        """See `Cudart`."""

    def set_device(self, device: int) -> None:
        """See `Cudart`."""

    def relax_capture(self) -> None:
        """See `Cudart`."""

    def stream_create(self, priority: int = 0) -> int:
        """See `Cudart`."""

    def stream_destroy(self, stream: int) -> None:
        """See `Cudart`."""

    def stream_synchronize(self, stream: int) -> None:
        """See `Cudart`."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """See `Cudart`."""

    def event_create(self, *, timing: bool = False) -> int:
        """See `Cudart`."""

    def event_destroy(self, event: int) -> None:
        """See `Cudart`."""

    def event_record(self, event: int, stream: int) -> None:
        """See `Cudart`."""

    def event_synchronize(self, event: int) -> None:
        """See `Cudart`."""


class Mover(Protocol):
    """What a pipe needs of `kernels.Mover`."""

    @property
    def rows_address(self) -> int:
        """Where rows are to be uploaded."""

    def encode(self, blocks: NDArray[np.int32], packed: U64) -> NDArray[np.int64]:
        """Return rows."""

    def aligned(self, packed: U64) -> bool:
        """Return whether the kernel can work on these addresses."""

    def move(
        self, first_row: int, rows: int, *, to_cache: bool, programs: int, stream: int
    ) -> None:
        """Move all blocks of some rows."""

    def warm_up(self, stream: int) -> None:
        """Compile."""


class Bounce:
    """Pinned buffers for what is not pinned, one for each buffer of a ring.

    The thread that submits waits for copies between them and the slots, which several threads make
    without the GIL: one copies 4 GB/s where shared memory has small pages.

    Attributes:
        address: of the first.
    """

    def __init__(self, cuda: Runtime, buffer_bytes: int) -> None:
        """Take pinned memory."""
        self._cuda = cuda
        self.address = cuda.host_alloc(_BUFFERS * buffer_bytes)
        self._copiers = ThreadPoolExecutor(_BOUNCE_THREADS, thread_name_prefix="kvstore-bounce")

    def copy(self, to: U64, of: U64, length: int) -> None:
        """Copy pieces of some length; returns when all are there."""
        parts = min(_BOUNCE_THREADS, len(to))
        pairs = zip(np.array_split(to, parts), np.array_split(of, parts), strict=True)
        for copying in [self._copiers.submit(copy_batch, *pair, length) for pair in pairs]:
            copying.result()

    def close(self) -> None:
        """Give the memory back."""
        self._copiers.shutdown()
        self._cuda.host_free(self.address)


class Pipe:
    """Copies of one direction."""

    def __init__(
        self,
        cuda: Runtime,
        make_mover: Callable[[int], Mover],
        geometry: Geometry,
        route: Route,
        *,
        to_cache: bool,
        chunk_bytes: int,
        device_programs: int,
        bounce: bool = False,
    ) -> None:
        """Take streams, events and buffers. The calling thread's device is the one to work on.

        Args:
            cuda: the runtime.
            make_mover: makes the kernel, with room for so many rows.
            geometry: of the KV cache.
            route: for slots in host memory.
            to_cache: loads; else stores.
            chunk_bytes: of a buffer of the ring.
            device_programs: for kernels within the GPU's memory.
            bounce: for slots that are not pinned.
        """
        self._cuda = cuda
        self._geometry = geometry
        self._to_cache = to_cache
        self._route = Route.RING if bounce else route
        self._device_programs = device_programs
        self._mover = make_mover(_ROWS * _UPLOADS)
        self.kernels: Final = cuda.stream_create()
        self.dma: Final = [cuda.stream_create() for _ in range(_BUFFERS)]
        self._chunk_blocks = max(1, min(chunk_bytes // geometry.block_bytes, _ROWS))
        self._ring = self._take_ring() if self._route is Route.RING else 0
        buffer_bytes = self._chunk_blocks * geometry.block_bytes
        self._bounce = Bounce(cuda, buffer_bytes) if bounce else None
        self._down: deque[tuple[int, U64, U64]] = deque()
        self._next = 0
        # Per buffer: the kernel is done with it; the bus is done with it.
        self._kernel_done = [cuda.event_create() for _ in range(_BUFFERS)]
        self._dma_done = [cuda.event_create() for _ in range(_BUFFERS)]
        self._joined = [cuda.event_create() for _ in range(_BUFFERS)]
        self._upload = 0
        self._uploaded = [cuda.event_create() for _ in range(_UPLOADS)]
        self._rows_memory = cuda.host_alloc(_ROWS * _UPLOADS * 16)
        self._rows = np.ctypeslib.as_array(
            (ctypes.c_int64 * (_ROWS * _UPLOADS * 2)).from_address(self._rows_memory)
        ).reshape(_UPLOADS, _ROWS, 2)
        self._mover.warm_up(self.kernels)

    def _take_ring(self) -> int:
        """Take the ring's memory, less where the engine has left little."""
        while True:
            try:
                size = self._chunk_blocks * self._geometry.block_bytes
                return self._cuda.malloc(_BUFFERS * size)
            except CudaError:
                if self._chunk_blocks == 1:
                    raise
                self._chunk_blocks //= 2

    def begin(self, after: int) -> None:
        """Let everything submitted from now on wait for an event, on the GPU."""
        for stream in (self.kernels, *self.dma):
            self._cuda.stream_wait_event(stream, after)

    def host(self, job: Job) -> None:
        """Copy between host slots and the KV cache."""
        if self._route is Route.RING:
            self._through_ring(job)
        elif self._route is Route.KERNEL:
            self._by_kernel(job, _BUS_PROGRAMS)
        else:
            geometry = self._geometry
            cache = geometry.bases[0] + job.blocks.astype(np.uint64) * geometry.strides[0]
            _, *found = pieces(cache, job.packed, job.slots, geometry.block_bytes)
            for at in range(0, len(found[0]), _BATCH):
                self._next = (self._next + 1) % _BUFFERS
                self._copy([column[at : at + _BATCH] for column in found], self.dma[self._next])

    def device(self, job: Job) -> None:
        """Copy between slots in this GPU's memory and the KV cache."""
        self._by_kernel(job, self._device_programs)

    def end(self, done: int, read: int = 0) -> None:
        """Record that the copy is done, and for a store, that the KV cache has been read."""
        cuda = self._cuda
        if not self._to_cache and self._route is not Route.DMA:
            # A later gather need not wait for this copy's DMA.
            cuda.event_record(read, self.kernels)
            cuda.stream_wait_event(self.dma[0], read)
            self._join(self.dma[1:], self.dma[0])
            cuda.event_record(done, self.dma[0])
            return
        self._join(self.dma, self.kernels)
        cuda.event_record(done, self.kernels)
        if read:
            cuda.event_record(read, self.kernels)

    def _join(self, streams: Sequence[int], into: int) -> None:
        for stream, event in zip(streams, self._joined, strict=False):
            self._cuda.event_record(event, stream)
            self._cuda.stream_wait_event(into, event)

    def synchronize(self) -> None:
        """Wait until nothing is under way."""
        for stream in (self.kernels, *self.dma):
            self._cuda.stream_synchronize(stream)

    def close(self) -> None:
        """Wait, then give everything back."""
        cuda = self._cuda
        self.synchronize()
        for event in (*self._kernel_done, *self._dma_done, *self._uploaded, *self._joined):
            cuda.event_destroy(event)
        for stream in (self.kernels, *self.dma):
            cuda.stream_destroy(stream)
        if self._ring:
            cuda.free(self._ring)
        if self._bounce is not None:
            self._bounce.close()
        del self._rows
        cuda.host_free(self._rows_memory)

    def _copy(self, part: list[U64], stream: int) -> None:
        """Submit pieces: addresses on the GPU, addresses in host memory, lengths."""
        device, packed, lengths = part
        to, of = (device, packed) if self._to_cache else (packed, device)
        self._cuda.memcpy_batch_async(to, of, lengths, stream)

    def _uploads(
        self, blocks: NDArray[np.int32], packed: U64, multiple: int = 1
    ) -> Iterator[tuple[int, int, int]]:
        """Upload rows, as many at a time as fit; yield the first row, begin, and end of each."""
        cuda, most = self._cuda, _ROWS // multiple * multiple
        for begin in range(0, len(blocks), most):
            end = min(begin + most, len(blocks))
            upload = self._upload % _UPLOADS
            if self._upload >= _UPLOADS:
                # Sixteen copies later its upload is over, unless the compute stream is far behind.
                cuda.event_synchronize(self._uploaded[upload])
            self._upload += 1
            rows = self._rows[upload]
            rows[: end - begin] = self._mover.encode(blocks[begin:end], packed[begin:end])
            first = upload * _ROWS
            cuda.memcpy_async(
                self._mover.rows_address + first * 16,
                self._rows_memory + first * 16,
                (end - begin) * 16,
                self.kernels,
            )
            cuda.event_record(self._uploaded[upload], self.kernels)
            yield first, begin, end

    def _by_kernel(self, job: Job, programs: int) -> None:
        if not self._mover.aligned(job.packed):
            raise ValueError("slots are not aligned as the KV cache is")
        for first, begin, end in self._uploads(job.blocks, job.packed):
            self._mover.move(
                first,
                end - begin,
                to_cache=self._to_cache,
                programs=programs,
                stream=self.kernels,
            )

    def _through_ring(self, job: Job) -> None:
        size, chunk, bounce = (
            np.uint64(self._geometry.block_bytes),
            self._chunk_blocks,
            self._bounce,
        )
        # A copy that is no whole number of chunks ends early in its last buffer.
        chunks, inside = np.divmod(np.arange(len(job)), chunk)
        buffers = (chunks + self._next) % _BUFFERS
        places = (buffers * chunk + inside).astype(np.uint64) * size
        staged = np.uint64(self._ring) + places
        host = job.packed if bounce is None else np.uint64(bounce.address) + places
        first, *found = pieces(staged, host, job.slots + chunks * len(job), int(size))
        bounds = np.searchsorted(first, np.arange(0, len(job) + chunk, chunk)).tolist()
        for row, begin, end in self._uploads(job.blocks, staged, chunk):
            for at in range(begin, end, chunk):
                number, stop = at // chunk, min(at + chunk, end)
                mine = slice(bounds[number], bounds[number + 1])
                part = [column[mine] for column in found]
                buffer = (number + self._next) % _BUFFERS
                slots = None if bounce is None else (host[at:stop], job.packed[at:stop])
                self._chunk(buffer, row + at - begin, stop - at, part, slots)
        self._next = (self._next + -(-len(job) // chunk)) % _BUFFERS
        self._drain(0)

    def _drain(self, most: int) -> None:
        """Copy what has come down into the bounce buffer to its slots, but for the last `most`."""
        while len(self._down) > most and self._bounce is not None:
            buffer, bounced, slots = self._down.popleft()
            self._cuda.event_synchronize(self._dma_done[buffer])
            self._bounce.copy(slots, bounced, self._geometry.block_bytes)

    def _chunk(
        self,
        buffer: int,
        first: int,
        count: int,
        part: list[U64],
        bounced: tuple[U64, U64] | None,
    ) -> None:
        """Submit one buffer's bytes.

        Args:
            buffer: of the ring.
            first: row of its first block.
            count: blocks.
            part: pieces: addresses in the ring, addresses in host memory, lengths.
            bounced: for what is not pinned: addresses in the bounce buffer, and in slots.
        """
        cuda, dma = self._cuda, self.dma[buffer]
        if self._to_cache:
            if bounced is not None and self._bounce is not None:
                cuda.event_synchronize(self._dma_done[buffer])
                self._bounce.copy(*bounced, self._geometry.block_bytes)
            cuda.stream_wait_event(dma, self._kernel_done[buffer])
            self._copy(part, dma)
            cuda.event_record(self._dma_done[buffer], dma)
            cuda.stream_wait_event(self.kernels, self._dma_done[buffer])
            self._ring_kernel(first, count)
            cuda.event_record(self._kernel_done[buffer], self.kernels)
            return
        cuda.stream_wait_event(self.kernels, self._dma_done[buffer])
        self._ring_kernel(first, count)
        cuda.event_record(self._kernel_done[buffer], self.kernels)
        cuda.stream_wait_event(dma, self._kernel_done[buffer])
        self._copy(part, dma)
        cuda.event_record(self._dma_done[buffer], dma)
        if bounced is not None:
            # While this chunk comes down, the one before goes on to its slots.
            self._down.append((buffer, *bounced))
            self._drain(1)

    def _ring_kernel(self, first: int, count: int) -> None:
        self._mover.move(
            first, count, to_cache=self._to_cache, programs=_RING_PROGRAMS, stream=self.kernels
        )
