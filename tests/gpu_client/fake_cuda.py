"""A GPU that is as late as it may be: streams of operations on host memory.

Nothing submitted runs before somebody waits for it; then operations run one by one, in a random
order that respects streams and events, and that likes to run far ahead on one stream. What a
missing wait would allow on a real GPU, happens here for some seed.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.geometry import Geometry
from kvstore.cudart import CudaError
from kvstore.memory import copy_batch, copy_block

COMPUTE = 1


@dataclass
class Event:
    """Counts its records, and knows those that the device has come to.

    Of records on several streams a later one may be reached first: who waits for the earlier one
    goes on waiting.
    """

    recorded: int = 0
    reached: set[int] = field(default_factory=lambda: {0})


@dataclass
class FakeCuda:
    """See `pipe.Runtime` and `copier.Device`."""

    seed: int = 0
    streams: dict[int, deque[tuple[str, Any]]] = field(default_factory=lambda: {COMPUTE: deque()})
    events: dict[int, Event] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    fail_after: int = -1
    room: int = 1 << 40
    # Sees every batch of DMA.
    batch: Callable[..., None] = lambda *_: None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.RLock()
        self.numbers = itertools.count(10)
        self.destroyed: set[int] = set()
        self.favourite: deque[tuple[str, Any]] = deque()

    # Memory.

    def malloc(self, length: int) -> int:
        if length > self.room:
            raise CudaError(2, "cudaMalloc: out of memory (2)")
        return self.host_alloc(length)

    def host_alloc(self, length: int) -> int:
        buffer = np.full(length, 0xEE, np.uint8)
        with self.lock:
            self.memory[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def free(self, address: int) -> None:
        with self.lock:
            del self.memory[address]

    host_free = free

    # Streams.

    def set_device(self, device: int) -> None:
        assert device == 0

    def relax_capture(self) -> None:
        pass

    def compute_stream(self) -> int:
        return COMPUTE

    def stream_create(self, priority: int = 0) -> int:
        with self.lock:
            number = next(self.numbers)
            self.streams[number] = deque()
            return number

    def stream_destroy(self, stream: int) -> None:
        with self.lock:
            assert not self.streams.pop(stream)

    def launch(self, stream: int, call: Callable[[], None]) -> None:
        with self.lock:
            if self.fail_after == 0:
                raise CudaError(719, "cudaMemcpyAsync: unspecified launch failure (719)")
            self.fail_after -= 1
            self.streams[stream].append(("call", call))

    def memcpy_async(self, destination: int, source: int, length: int, stream: int) -> None:
        self.launch(stream, lambda: copy_block(destination, source, length))

    def memcpy_batch_async(
        self, destinations: Any, sources: Any, lengths: Any, stream: int
    ) -> None:
        self.batch(destinations, sources, lengths)
        to, of, size = destinations.copy(), sources.copy(), lengths.copy()
        self.launch(stream, lambda: copy_batch(to, of, size))

    def stream_wait_event(self, stream: int, event: int) -> None:
        with self.lock:
            self.streams[stream].append(("wait", (event, self.events[event].recorded)))

    def event_create(self, *, timing: bool = False, spin: bool = False) -> int:
        with self.lock:
            number = next(self.numbers)
            self.events[number] = Event()
            return number

    def event_destroy(self, event: int) -> None:
        with self.lock:
            # Who waits for it already goes on waiting.
            assert event not in self.destroyed
            self.destroyed.add(event)

    def event_record(self, event: int, stream: int) -> None:
        with self.lock:
            self.events[event].recorded += 1
            self.streams[stream].append(("record", (event, self.events[event].recorded)))

    def event_synchronize(self, event: int) -> None:
        with self.lock:
            wanted = self.events[event].recorded
            self.run(lambda: wanted in self.events[event].reached)

    def stream_synchronize(self, stream: int) -> None:
        with self.lock:
            self.run(lambda: not self.streams[stream])

    def drain(self) -> None:
        with self.lock:
            self.run(lambda: not any(self.streams.values()))

    def _ready(self, operation: tuple[str, Any]) -> bool:
        kind, what = operation
        return kind != "wait" or what[1] in self.events[what[0]].reached

    def run(self, enough: Callable[[], bool]) -> None:
        while not enough():
            ready = [queue for queue in self.streams.values() if queue and self._ready(queue[0])]
            assert ready, "everybody waits for somebody else"
            if self.random.random() < 0.1 or not any(queue is self.favourite for queue in ready):
                self.favourite = self.random.choice(ready)
            kind, what = self.favourite.popleft()
            if kind == "call":
                what()
            elif kind == "record":
                event, number = what
                self.events[event].reached.add(number)


class FakeMover:
    """The kernels, by the CPU. Rows are read when they run, as the real ones do."""

    def __init__(self, cuda: FakeCuda, geometry: Geometry, rows: NDArray[np.int64]) -> None:
        self.cuda, self.geometry, self.host = cuda, geometry, rows
        self.rows = np.zeros(rows.shape, np.int64)

    def encode(self, blocks: NDArray[np.int32], packed: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.stack([blocks.astype(np.int64), packed.astype(np.int64)], axis=1)

    def aligned(self, packed: NDArray[np.uint64]) -> bool:
        return True

    def warm_up(self, stream: int) -> None:
        pass

    def fetch(self, first_row: int, rows: int, *, stream: int) -> None:
        these = slice(first_row, first_row + rows)

        def kernel() -> None:
            self.rows[these] = self.host[these]

        self.cuda.launch(stream, kernel)

    def move(
        self, first_row: int, rows: int, *, to_cache: bool, programs: int, stream: int
    ) -> None:
        def kernel() -> None:
            part = self.rows[first_row : first_row + rows]
            blocks, packed = part[:, 0].astype(np.int32), part[:, 1].astype(np.uint64)
            cache, stored, lengths = self.geometry.pair(blocks, packed, 0, 1)
            if to_cache:
                copy_batch(cache, stored, lengths)
            else:
                copy_batch(stored, cache, lengths)

        self.cuda.launch(stream, kernel)


def bytes_at(address: int, length: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
