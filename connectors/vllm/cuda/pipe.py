"""One direction's streams, and the buffers that its bytes pass through.

Kernels run on one stream, DMA on one per buffer of the ring, so that a chunk is gathered or scattered
while the next ones are on the bus, and the bus never waits for the next chunk to be noticed. Events
between the streams say when a buffer is full and when it is free again; recording an event anew is
safe, because a wait refers to the record before it.

Where only one of bus and kernels can work, at a store's begin and at a load's end, chunks are small.
What kernels work from is fetched by a kernel too: DMA would queue behind what others copy.

Not thread-safe: whoever submits holds the pipe for the whole copy.
"""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate, pairwise
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.cuda.routes import LEAST_DMA_BYTES, Job, Route, pieces
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.cudart import CudaError
from kvstore.memory import copy_batch

__all__ = ["Bounce", "Device", "GivenUp", "Mover", "Pipe", "Runtime"]

U64 = NDArray[np.uint64]

_BUFFERS: Final = 3
# Rows that one upload may have, and uploads before the first one's pinned memory is used again.
_ROWS: Final = 2048
_UPLOADS: Final = 64
# How many programs a kernel is given. Between staging and KV cache a few keep up with the bus;
# over the bus itself more must be in flight; within the GPU's memory all multiprocessors work.
_RING_PROGRAMS: Final = 16
_BUS_PROGRAMS: Final = 132
# Pieces in one batch of DMA, in the first one and at most: the bus begins with the first while the
# next are submitted.
_FIRST_BATCH: Final = 8
_BATCH: Final = 64
# Of the chunk that the bus, or the last kernel, waits for.
_FIRST_CHUNK_BYTES: Final = 16 << 20
# Gathering and scattering for the bus takes few multiprocessors, but must not wait for others' work.
_RING_PRIORITY: Final = -1
_BOUNCE_THREADS: Final = 4


class GivenUp(Exception):
    """A copy was stopped between two chunks, as it was told to."""


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

    def event_create(self, *, timing: bool = False, spin: bool = False) -> int:
        """See `Cudart`."""

    def event_destroy(self, event: int) -> None:
        """See `Cudart`."""

    def event_record(self, event: int, stream: int) -> None:
        """See `Cudart`."""

    def event_synchronize(self, event: int) -> None:
        """See `Cudart`."""


class Device(Runtime, Protocol):
    """A runtime, and the engine's place in it."""

    def compute_stream(self) -> int:
        """Return the stream that the engine computes on, as seen from its thread."""


class Mover(Protocol):
    """What a pipe needs of `kernels.Mover`."""

    def encode(self, blocks: NDArray[np.int32], packed: U64) -> NDArray[np.int64]:
        """Return rows."""

    def aligned(self, packed: U64) -> bool:
        """Return whether the kernel can work on these addresses."""

    def fetch(self, first_row: int, rows: int, *, stream: int) -> None:
        """Take rows over from host memory."""

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
        """Copy pieces of some length; returns when all are there, or none is being copied."""
        parts = min(_BOUNCE_THREADS, len(to))
        pairs = zip(np.array_split(to, parts), np.array_split(of, parts), strict=True)
        copies = [self._copiers.submit(copy_batch, *pair, length) for pair in pairs]
        wait(copies)
        for copying in copies:
            copying.result()

    def close(self) -> None:
        """Give the memory back."""
        self._copiers.shutdown()
        self._cuda.host_free(self.address)


def _ramp(count: int, first: int, most: int) -> list[int]:
    """Return sizes that double from `first` up to `most` and add up to `count`."""
    sizes: list[int] = []
    size = min(first, most)
    while count:
        sizes.append(min(size, count))
        count -= sizes[-1]
        size = min(2 * size, most)
    return sizes


class Pipe:
    """Copies of one direction."""

    def __init__(
        self,
        cuda: Runtime,
        make_mover: Callable[[NDArray[np.int64]], Mover],
        geometry: Geometry,
        route: Route,
        *,
        to_cache: bool,
        chunk_bytes: int,
        device_programs: int,
        bounce: bool = False,
    ) -> None:
        """Take streams, events and buffers: all or none. The calling thread's device is used.

        Args:
            cuda: the runtime.
            make_mover: makes the kernel, given pinned host memory for its rows.
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
        with contextlib.ExitStack() as taken:
            self._take(taken, make_mover, chunk_bytes, bounce=bounce)
            # First of all when it is closed.
            taken.callback(self.synchronize)
            self._taken = taken.pop_all()

    def _take(
        self,
        taken: contextlib.ExitStack,
        make_mover: Callable[[NDArray[np.int64]], Mover],
        chunk_bytes: int,
        *,
        bounce: bool,
    ) -> None:
        """Take everything; `taken` gives it back."""
        cuda, geometry, ring = self._cuda, self._geometry, self._route is Route.RING

        def stream(priority: int = 0) -> int:
            number = cuda.stream_create(priority)
            taken.callback(cuda.stream_destroy, number)
            return number

        def events(count: int) -> list[int]:
            made = []
            for _ in range(count):
                made.append(cuda.event_create())
                taken.callback(cuda.event_destroy, made[-1])
            return made

        self.kernels = stream(_RING_PRIORITY if ring else 0)
        streams = {Route.RING: _BUFFERS, Route.DMA: 1, Route.KERNEL: 0}
        self.dma = [stream() for _ in range(streams[self._route])]
        # What the copy that is being submitted has put work on, and what it comes after.
        self._used: dict[int, None] = {}
        self._after = 0
        self._stop: Callable[[], bool] = lambda: False
        self._chunk_blocks = max(1, min(chunk_bytes // geometry.block_bytes, _ROWS))
        self._ring = 0
        if ring:
            self._ring = self._take_ring()
            taken.callback(cuda.free, self._ring)
        self._bounce: Bounce | None = None
        if bounce:
            self._bounce = Bounce(cuda, self._chunk_blocks * geometry.block_bytes)
            taken.callback(self._bounce.close)
        self._down: deque[tuple[int, U64, U64]] = deque()
        self._next = 0
        # Per buffer: the kernel is done with it; the bus is done with it.
        self._kernel_done = events(_BUFFERS)
        self._dma_done = events(_BUFFERS)
        self._joined = events(len(self.dma) + 1)
        self._upload_number = 0
        self._uploaded = events(_UPLOADS)
        rows_memory = cuda.host_alloc(_ROWS * _UPLOADS * 16)
        taken.callback(cuda.host_free, rows_memory)
        self._rows = np.ctypeslib.as_array(
            (ctypes.c_int64 * (_ROWS * _UPLOADS * 2)).from_address(rows_memory)
        ).reshape(_ROWS * _UPLOADS, 2)
        self._mover = make_mover(self._rows)
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

    def begin(self, after: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Begin a copy whose accesses to the KV cache wait for an event, on the GPU.

        Args:
            after: the event.
            stop: asked before each chunk: whether to give the copy up.
        """
        self._used.clear()
        # A copy that broke off may have left some: its slots are somebody else's by now.
        self._down.clear()
        self._after, self._stop = after, stop

    def _use(self, stream: int) -> int:
        """Return a stream that touches the KV cache, waiting for what the copy comes after."""
        if stream not in self._used:
            self._used[stream] = None
            self._cuda.stream_wait_event(stream, self._after)
        return stream

    def host(self, job: Job) -> None:
        """Copy between host slots and the KV cache."""
        if self._route is Route.RING:
            self._through_ring(job)
        elif self._route is Route.KERNEL:
            self._by_kernel(job, _BUS_PROGRAMS)
        else:
            self._by_dma(job)

    def device(self, job: Job) -> None:
        """Copy between slots in this GPU's memory and the KV cache."""
        self._by_kernel(job, self._device_programs)

    def end(self, done: int, read: int = 0) -> None:
        """Record that the copy is done, and for a store, that the KV cache has been read."""
        cuda = self._cuda
        ring = self._route is Route.RING
        if ring and read:
            # A later gather need not wait for this copy's DMA.
            cuda.event_record(read, self.kernels)
        # A load's kernels come after its DMA; a store's DMA, where there is any, after its kernels.
        last = [s for s in self._used if not ring or (s == self.kernels) == self._to_cache]
        into = last.pop() if last else self.kernels
        for stream, event in zip(last, self._joined, strict=False):
            cuda.event_record(event, stream)
            cuda.stream_wait_event(into, event)
        cuda.event_record(done, into)
        if read and not ring:
            cuda.event_record(read, into)

    def synchronize(self) -> None:
        """Wait until nothing is under way; also for the others when one cannot be waited for."""
        with contextlib.ExitStack() as each:
            for stream in (self.kernels, *self.dma):
                each.callback(self._cuda.stream_synchronize, stream)

    def close(self) -> None:
        """Wait, then give everything back; also the rest when something cannot be."""
        self._taken.close()

    def _copy(self, part: list[U64], stream: int) -> None:
        """Submit pieces: addresses on the GPU, addresses in host memory, lengths."""
        device, packed, lengths = part
        to, of = (device, packed) if self._to_cache else (packed, device)
        self._cuda.memcpy_batch_async(to, of, lengths, stream)

    def _upload(self, blocks: NDArray[np.int32], packed: U64) -> int:
        """Upload rows, `_ROWS` at most; return the first one's number."""
        slot = self._upload_number % _UPLOADS
        if self._upload_number >= _UPLOADS:
            # So many copies later its upload is over, unless the compute stream is far behind.
            self._cuda.event_synchronize(self._uploaded[slot])
        self._upload_number += 1
        first = slot * _ROWS
        self._rows[first : first + len(blocks)] = self._mover.encode(blocks, packed)
        self._mover.fetch(first, len(blocks), stream=self.kernels)
        self._cuda.event_record(self._uploaded[slot], self.kernels)
        return first

    def _by_kernel(self, job: Job, programs: int) -> None:
        if not self._mover.aligned(job.packed):
            raise ValueError("slots are not aligned as the KV cache is")
        stream = self._use(self.kernels)
        for begin in range(0, len(job), _ROWS):
            blocks = job.blocks[begin : begin + _ROWS]
            first = self._upload(blocks, job.packed[begin : begin + _ROWS])
            self._mover.move(
                first, len(blocks), to_cache=self._to_cache, programs=programs, stream=stream
            )

    def _by_dma(self, job: Job) -> None:
        geometry = self._geometry
        cache = geometry.bases[0] + job.blocks.astype(np.uint64) * geometry.strides[0]
        _, *found = pieces(cache, job.packed, job.stretches, geometry.block_bytes)
        [dma] = self.dma
        self._use(dma)
        for begin, end in pairwise(
            accumulate(_ramp(len(found[0]), _FIRST_BATCH, _BATCH), initial=0)
        ):
            self._copy([column[begin:end] for column in found], dma)

    def _through_ring(self, job: Job) -> None:
        size, bounce = np.uint64(self._geometry.block_bytes), self._bounce
        least = max(1, _FIRST_CHUNK_BYTES // self._geometry.block_bytes)
        sizes = _ramp(len(job), least, self._chunk_blocks)
        if self._to_cache:
            sizes.reverse()
        edges = [*accumulate(sizes, initial=0)]
        buffers = [(number + self._next) % _BUFFERS for number in range(len(sizes))]
        # How much further on a chunk's blocks lie than if there were one long buffer.
        ahead = [b * self._chunk_blocks - at for b, at in zip(buffers, edges, strict=False)]
        shifts = np.repeat(np.array(ahead, np.int64).view(np.uint64), sizes)
        places = (np.arange(len(job), dtype=np.uint64) + shifts) * size
        staged = np.uint64(self._ring) + places
        host = job.packed if bounce is None else np.uint64(bounce.address) + places
        first, *found = pieces(staged, host, job.stretches, int(size), edges[:-1])
        small = len(job) * int(size) < LEAST_DMA_BYTES * len(first)
        if bounce is None and small and self._mover.aligned(job.packed):
            self._by_kernel(job, _BUS_PROGRAMS)
            return
        bounds = np.searchsorted(first, edges).tolist()
        self._use(self.kernels)
        row = uploaded = 0
        for buffer, (number, (begin, end)) in zip(buffers, enumerate(pairwise(edges)), strict=True):
            if self._stop():
                raise GivenUp
            part = [column[bounds[number] : bounds[number + 1]] for column in found]
            bounced = None if bounce is None else (host[begin:end], job.packed[begin:end])
            if self._to_cache:
                # First: the bus need not wait for rows to be written.
                if bounced is not None:
                    self._fill(buffer, *bounced)
                self._ship(buffer, part)
            if end > uploaded:
                uploaded = edges[bisect_right(edges, begin + _ROWS) - 1]
                row = self._upload(job.blocks[begin:uploaded], staged[begin:uploaded]) - begin
            self._ring_kernel(buffer, row + begin, end - begin)
            if not self._to_cache:
                self._ship(buffer, part)
                if bounced is not None:
                    # While this chunk comes down, the one before goes on to its slots.
                    self._down.append((buffer, *bounced))
                    self._drain(1)
        self._next = (self._next + len(sizes)) % _BUFFERS
        self._drain(0)

    def _fill(self, buffer: int, bounced: U64, slots: U64) -> None:
        """Copy slots into a part of the bounce buffer, once that is free."""
        if self._bounce is not None:
            self._cuda.event_synchronize(self._dma_done[buffer])
            self._bounce.copy(bounced, slots, self._geometry.block_bytes)

    def _drain(self, most: int) -> None:
        """Copy what has come down into the bounce buffer to its slots, but for the last `most`."""
        while len(self._down) > most and self._bounce is not None:
            buffer, bounced, slots = self._down.popleft()
            self._cuda.event_synchronize(self._dma_done[buffer])
            self._bounce.copy(slots, bounced, self._geometry.block_bytes)

    def _ship(self, buffer: int, part: list[U64]) -> None:
        """Submit the DMA of one buffer of the ring, after its last kernel.

        Args:
            buffer: of the ring.
            part: pieces: addresses in the ring, addresses in host memory, lengths.
        """
        cuda, dma = self._cuda, self.dma[buffer]
        # The ring's DMA touches no KV cache: nothing to wait for.
        self._used[dma] = None
        cuda.stream_wait_event(dma, self._kernel_done[buffer])
        self._copy(part, dma)
        cuda.event_record(self._dma_done[buffer], dma)

    def _ring_kernel(self, buffer: int, first: int, count: int) -> None:
        """Submit the kernel of one buffer, whose blocks' rows begin at `first`, after its last DMA."""
        cuda, kernels = self._cuda, self.kernels
        cuda.stream_wait_event(kernels, self._dma_done[buffer])
        self._mover.move(
            first, count, to_cache=self._to_cache, programs=_RING_PROGRAMS, stream=kernels
        )
        cuda.event_record(self._kernel_done[buffer], kernels)
