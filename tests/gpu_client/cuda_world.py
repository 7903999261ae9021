"""A KV cache, slots, and a copier between them, on a GPU that runs everything as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from fake_cuda import COMPUTE, FakeCuda, FakeMover
from numpy.typing import NDArray

from kvstore.attach.mapped import PINNED
from kvstore.connectors.vllm.copier import SlotRun
from kvstore.connectors.vllm.cuda.copier import CudaCopier
from kvstore.connectors.vllm.cuda.routes import Route, route_of
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost

BOOT = b"boot"
GROUP_BLOCKS = 4
SLOTS = 12
# Slots that are pinned at a time.
TOGETHER = 3
BLOCKS = 40
# One contiguous piece of 512 KiB; four pieces and large slots; four pieces and small slots.
SHAPES = {Route.DMA: (1, 1 << 19), Route.RING: (4, 1 << 15), Route.KERNEL: (4, 1 << 10)}


@dataclass
class World:
    """A KV cache, slots, and who may read them."""

    route: Route
    seed: int
    reach: int = PINNED
    boot_id: bytes = BOOT
    alive: bool = True
    found_late: bool = False
    waits: int = 0
    users: int = 0
    # How long what is not `mapped` is waited for.
    announcement_s: float = 60.0
    inbound_blocks: int = 1 << 20
    room: int = 1 << 40
    gpu: FakeCuda | None = None

    def __post_init__(self) -> None:
        segments, length = SHAPES[self.route]
        self.cache = np.zeros((segments, BLOCKS, length), np.uint8)
        one = np.ones(segments, np.uint64)
        self.geometry = Geometry(
            bases=np.uint64(self.cache.ctypes.data)
            + np.arange(segments, dtype=np.uint64) * np.uint64(BLOCKS * length),
            strides=one * np.uint64(length),
            lengths=one * np.uint64(length),
            offsets=np.arange(segments, dtype=np.uint64) * np.uint64(length),
            block_bytes=segments * length,
            blocks=BLOCKS,
            layout="test",
        )
        assert route_of(self.geometry, GROUP_BLOCKS) is self.route
        self.mapped = threading.Event()
        self.mapped.set()
        self.memory = np.zeros((SLOTS, GROUP_BLOCKS * self.geometry.block_bytes), np.uint8)
        self.generations = np.zeros(SLOTS, np.uint64)
        self.pieces: list[int] = []
        self.cuda = self.gpu or FakeCuda(self.seed, room=self.room)
        self.cuda.batch = self.batch
        self.copier = CudaCopier(
            self.cuda,
            lambda rows: FakeMover(self.cuda, self.geometry, rows),
            self.geometry,
            self,  # type: ignore[arg-type]
            0,
            GROUP_BLOCKS,
            device_number=0,
            multiprocessors=2,
            chunk_bytes=3 * self.geometry.block_bytes,
            bounce_chunk_bytes=2 * self.geometry.block_bytes,
            inbound_bytes=self.inbound_blocks * self.geometry.block_bytes,
        )

    def batch(self, *columns: NDArray[np.uint64]) -> None:
        """See that no piece of DMA crosses from one range of pinned memory to another."""
        begin, range_bytes = self.memory.ctypes.data, TOGETHER * self.memory.shape[1]
        for address, other, length in zip(*(c.tolist() for c in columns), strict=True):
            self.pieces.append(length)
            for at in (address, other):
                if begin <= at < begin + self.memory.nbytes:
                    assert (at - begin) // range_bytes == (at + length - 1 - begin) // range_bytes

    def slots(self, *indices: int) -> Any:
        kind = [("group", "<u4"), ("index", "<u4"), ("generation", "<u8")]
        return np.array([(1, i, self.generations[i]) for i in indices], kind)

    def using(self, slots: Any, *, boot_id: bytes, writer_id: int = 0) -> Held:
        if boot_id != self.boot_id:
            raise AttachmentLost("another run")
        self.users += 1
        return Held(self, slots)

    def wait_run(self, boot_id: bytes, timeout_s: float) -> bool:
        self.waits += 1
        if self.found_late:
            self.boot_id, self.alive = boot_id, True
        return self.alive and self.boot_id == boot_id

    def compute(self, blocks: list[int], value: int) -> None:
        """A step that fills blocks; each gets bytes of its own."""

        def kernel() -> None:
            for block in blocks:
                self.cache[:, block] = pattern(value, block)

        self.cuda.launch(COMPUTE, kernel)

    def seen(self, blocks: list[int]) -> list[NDArray[np.uint8]]:
        """A step that reads blocks; filled in when it runs."""
        into: list[NDArray[np.uint8]] = []
        self.cuda.launch(
            COMPUTE, lambda: into.extend(self.cache[:, block].copy() for block in blocks)
        )
        return into

    def fill(self, slot: int, value: int) -> None:
        for i, row in enumerate(self.memory[slot].reshape(GROUP_BLOCKS, -1)):
            row[:] = pattern(value, i)

    def store(self, blocks: list[int], *slots: int) -> Result:
        result = Result()
        run = SlotRun(self.slots(*slots), BOOT, 7)
        table = np.array(blocks, np.int32).reshape(-1, GROUP_BLOCKS)
        self.copier.store(table, run, result.take)
        return result

    def load(self, blocks: list[int], *slots: int, skip: int = 0, **options: Any) -> Result:
        result = Result()
        run = SlotRun(self.slots(*slots), BOOT)
        result.early = self.copier.load(
            np.array(blocks, np.int32), run, skip, result.take, result.land, **options
        )
        return result

    def close(self) -> None:
        self.copier.close()
        self.cuda.drain()
        assert not self.users
        assert not self.cuda.memory
        assert set(self.cuda.events) == self.cuda.destroyed


class Held:
    def __init__(self, world: World, slots: Any) -> None:
        self.world, self.named = world, slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.done()

    def done(self) -> None:
        self.world.users -= 1

    def mapped(self, shard: int) -> bool:
        return self.world.mapped.is_set()

    def map(self, shard: int, timeout_s: float) -> None:
        if not self.world.mapped.wait(min(timeout_s, self.world.announcement_s)):
            raise AttachmentLost("never announced")

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        self.map(shard, 60.0)
        memory = self.world.memory
        base, stride = np.uint64(memory.ctypes.data), np.uint64(memory.shape[1])
        addresses = base + self.named["index"].astype(np.uint64) * stride
        return addresses, np.full(len(addresses), self.world.reach, np.uint8)

    def stretches(self, shard: int) -> NDArray[np.int64]:
        together: NDArray[np.int64] = self.named["index"].astype(np.int64) // TOGETHER
        return together

    def current(self, shard: int) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (
            self.world.generations[self.named["index"]] == self.named["generation"]
        )
        return same


@dataclass
class Result:
    said: list[Any] = field(default_factory=list)
    landed: list[bool] = field(default_factory=list)
    early: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, what: Any) -> None:
        self.said.append(what)
        if not self.early:
            self.over.set()

    def land(self, right: bool) -> None:
        self.landed.append(right)
        self.over.set()

    def wait(self) -> Any:
        assert self.over.wait(60)
        (what,) = self.said
        return what


def pattern(value: int, salt: int) -> int:
    return (31 * value + 7 * salt) % 251 + 1


def failing_once(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """Return a call of the runtime that fails the first time that its arguments are like that."""
    failed = list[bool]()

    def once(*arguments: Any, **options: Any) -> Any:
        if not failed and when(*arguments, **options):
            failed.append(True)
            raise CudaError(2, "out of memory (2)")
        return call(*arguments, **options)

    return once


Make = Callable[..., World]
