"""How copies are cut into pieces and chunks."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_world import BLOCKS, GROUP_BLOCKS, Make, pattern
from fake_cuda import FakeMover

from kvstore.attach.mapped import PINNED
from kvstore.connectors.vllm.cuda import pipe
from kvstore.connectors.vllm.cuda.routes import Job, Route, pieces


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (1, [1]), (2, [2]), (7, [2, 4, 1]), (40, [2, 4, 8, 10, 10, 6])],
)
def test_a_ramp_doubles_up_to_the_most(count: int, sizes: list[int]) -> None:
    assert pipe._ramp(count, 2, 10) == sizes


def test_pieces_are_merged_only_where_both_sides_go_on_and_nothing_says_apart() -> None:
    device = np.array([0, 10, 20, 40, 50], np.uint64)
    packed = np.array([100, 110, 120, 130, 140], np.uint64)
    apart = np.array([1, 1, 2, 2, 2], np.int64)
    first, of, to, lengths = pieces(device, packed, apart, 10)
    assert first.tolist() == [0, 2, 3]
    assert of.tolist() == [0, 20, 40]
    assert to.tolist() == [100, 120, 130]
    assert lengths.tolist() == [20, 10, 20]
    first, *_ = pieces(device, packed, apart, 10, [0, 1, 4])
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert [len(column) for column in pieces(device[:0], packed[:0], apart[:0], 10)] == [0] * 4


@pytest.mark.parametrize("seed", range(4))
def test_slots_that_lie_together_go_at_once_and_small_ones_apart_by_kernel(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(Route.RING, seed)
    block = world.geometry.block_bytes
    blocks = np.random.default_rng(seed).permutation(BLOCKS)[:24].tolist()
    world.compute(blocks, 1)
    together = world.store(blocks[:12], 4, 5, 6)
    assert sum(world.pieces) == 12 * block
    # Chunks of 1, 2, 3, 3, 3 blocks, and a range that ends behind the eighth.
    assert [length // block for length in world.pieces] == [1, 2, 3, 2, 1, 3]
    world.pieces.clear()
    with monkeypatch.context() as patch:
        patch.setattr(pipe, "LEAST_DMA_BYTES", 1 << 30)
        apart = world.store(blocks[12:], 9, 0, 7)
        assert not world.pieces
        assert together.wait() is True
        assert apart.wait() is True
        world.compute(blocks, 2)
        loads = [world.load(blocks[12:], 9, 0, 7)]
    loads.append(world.load(blocks[:12], 4, 5, 6))
    assert all(load.wait().all() for load in loads)
    for block in blocks:
        assert (world.cache[:, block] == pattern(1, block)).all()


@pytest.mark.parametrize("seed", range(4))
def test_rows_stay_as_they_are_until_the_gpu_has_fetched_them(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "_UPLOADS", 2)
    monkeypatch.setattr(pipe, "_ROWS", 3)
    world = make(Route.KERNEL, seed)
    cuda, size = world.cuda, world.geometry.block_bytes
    for slot in range(6):
        world.fill(slot, slot)
    one = pipe.Pipe(
        cuda,
        lambda rows: FakeMover(cuda, world.geometry, rows),
        world.geometry,
        Route.KERNEL,
        to_cache=True,
        chunk_bytes=size,
        device_programs=1,
    )
    after, done = cuda.event_create(), cuda.event_create()
    packed = np.uint64(world.memory.ctypes.data) + np.arange(24, dtype=np.uint64) * np.uint64(size)
    blocks = np.random.default_rng(seed).permutation(BLOCKS)[:24].astype(np.int32)
    reach = np.full(24, PINNED, np.uint8)
    # Nobody waits between these: eight uploads in the memory of two.
    for at in (0, 6, 12, 18):
        part = slice(at, at + 6)
        one.begin(after)
        one.host(
            Job(blocks[part], packed[part], np.zeros(6, np.int64), reach[part], PINNED, PINNED)
        )
        one.end(done)
    cuda.event_synchronize(done)
    for i, block in enumerate(blocks.tolist()):
        slot, inside = divmod(i, GROUP_BLOCKS)
        assert (world.cache[:, block] == pattern(slot, inside)).all()
    one.close()
    cuda.event_destroy(after)
    cuda.event_destroy(done)
