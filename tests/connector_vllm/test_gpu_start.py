"""A worker whose KV cache is on a GPU, from its registration until it serves; the GPU is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.connectors.vllm import cuda
from kvstore.connectors.vllm.cuda.pins import SlabPins
from kvstore.connectors.vllm.metadata import StepMeta, WorkerReport
from kvstore.connectors.vllm.roster import Roster
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.worker_side import WorkerSide
from kvstore.proto import kvstore_pb2 as pb
from kvstore.space import SpaceSpec
from kvstore.units import MIB

GROUP = 4
# What the daemon calls its simulated device, which CUDA does not know.
GPU = "GPU-00000000-0000-0000-0000-000000000000"
# Bytes of an engine block, in one layer.
BLOCK = 16 * 1024


class OnCuda(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on a GPU."""

    device = SimpleNamespace(type="cuda", index=0)


class Runtime:
    def set_device(self, device: int) -> None:
        pass

    def relax_capture(self) -> None:
        pass

    def host_register(self, address: int, length: int) -> None:
        pass

    def host_unregister(self, address: int) -> None:
        pass


class Pins(SlabPins):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(Runtime(), 0)
        self.told: list[Any] = []

    def step(self, *, under_way: bool) -> None:
        super().step(under_way=under_way)
        self.told.append(under_way)


class Copier:
    """Copies nothing, and sees that no range is pinned while it is asked to."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins

    def reuse(self, blocks: Any) -> None:
        self.pins.told.append(self.pins._submitting)

    def close(self) -> None:
        pass


def engine(ranks: int, stages: int = 1, layers: tuple[int, ...] = ()) -> EngineShape:
    return EngineShape(
        engine_block_tokens=16,
        group_blocks=GROUP,
        ranks=ranks * stages,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        replicas=1,
        model="m",
        weights="1",
        dtype="bfloat16",
        hash_algorithm="sha256_cbor",
        prefix_caching=True,
        step_tokens=8192,
        delayed_stores=False,
        refusal="",
        layer_bytes=BLOCK,
        stage_layers=layers,
    )


@pytest.fixture
def daemon(start_daemon: Callable[..., Any]) -> Any:
    return start_daemon(
        *("--host-pool", "32MiB", "--gpu-pool", "4MiB", "--gpu-devices", "simulated:1")
    )


@pytest.fixture
def start(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[WorkerSide, Pins, Client]]]:
    workers: list[WorkerSide] = []

    def one(
        shape: EngineShape, stage: int = 0, layers: int = 1, **options: Any
    ) -> tuple[WorkerSide, Pins, Client]:
        pins, client = Pins(), Client(daemon.address, shards=[shape.shard(stage, 0)])

        def make_copier(geometry: Any, attachment: Any, *_: Any) -> Any:
            attachment.use_devices([GPU], pins)
            return Copier(pins), GPU, pins

        monkeypatch.setattr(cuda, "make_copier", make_copier)
        mine: Any = client
        worker = WorkerSide(shape, mine, tensor_rank=0, pipeline_rank=stage, **options)
        workers.append(worker)
        caches = {
            f"layer {layer}": torch.zeros((8, BLOCK), dtype=torch.uint8).as_subclass(OnCuda)
            for layer in range(layers)
        }
        worker.register(caches, 8, "made up")
        return worker, pins, client

    yield one
    for worker in workers:
        worker.close()


def allocated(client: Client) -> int:
    [host] = [tier for tier in client.stats().tiers if tier.tier == pb.TIER_HOST]
    return int(host.allocated_bytes)


def test_the_pool_is_asked_for_with_the_kv_cache_and_there_when_the_engine_serves(
    start: Callable[..., tuple[WorkerSide, Pins, Client]], until: Callable[..., None]
) -> None:
    worker, pins, client = start(engine(2), pool_wait_seconds=600.0)
    until(lambda: allocated(client) == 32 * MIB)
    info = worker.introduce()
    assert (info.device_uuid, info.mappable) == (GPU, True)
    assert info.shard_bytes == GROUP * BLOCK
    assert pins.pinned_bytes == 16 * MIB  # this rank's half of each block
    assert pins.threads() == 1
    worker.prepare(StepMeta(1, handed_out=None))
    worker.load()
    worker.finish()
    assert pins.told == [True, 1, False]


def test_every_stage_of_a_pipeline_asks_for_the_same_and_waits_for_it(
    start: Callable[..., tuple[WorkerSide, Pins, Client]], until: Callable[..., None]
) -> None:
    """Of different numbers of layers; whichever comes first has it made for all."""
    shape = engine(2, stages=2, layers=(2, 3))
    workers = [
        start(shape, stage, layers, pool_wait_seconds=600.0) for stage, layers in ((1, 3), (0, 2))
    ]
    *_, client = workers[0]
    until(lambda: allocated(client) > 0)
    for (worker, pins, _), layers in zip(workers, (3, 2), strict=True):
        assert worker.introduce().shard_bytes == layers * GROUP * BLOCK
        # Slots are as large as the longest shard, and two of four shards are this stage's.
        assert pins.pinned_bytes * 4 == allocated(client)
        assert 0 <= 32 * MIB - allocated(client) < 4 * 3 * GROUP * BLOCK
    spec = SpaceSpec(
        model="m",
        dtype="bfloat16",
        block_tokens=64,
        shard_bytes=tuple(shape.shard_bytes(0, 2 * BLOCK)),
        tensor_parallel=2,
        pipeline_parallel=2,
    )
    made = allocated(client)
    granted = client.open_space(spec).reserve(10, deadline_s=30.0).result(60.0)
    assert len(granted.slots) == 10
    assert allocated(client) == made


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (engine(2), 0.0),
        (engine(2, stages=2), 600.0),
        # It has more than the model's layers, or its layers are others.
        (engine(2, stages=2, layers=(2, 2)), 600.0),
    ],
)
def test_who_must_not_wait_or_knows_no_shape_has_memory_made_when_it_is_needed(
    start: Callable[..., tuple[WorkerSide, Pins, Client]], shape: EngineShape, seconds: float
) -> None:
    worker, pins, client = start(shape, pool_wait_seconds=seconds)
    assert worker.introduce().mappable
    assert allocated(client) == 0
    assert pins.threads() == 1


def test_a_worker_that_cannot_open_the_gpu_pool_gets_blocks_from_host_memory(
    start: Callable[..., tuple[WorkerSide, Pins, Client]], until: Callable[..., None], daemon: Any
) -> None:
    """Leases would go on naming slots that it cannot read, and it would compute everything again."""
    worker, *_ = start(engine(1))
    roster = Roster(engine(1))
    roster.admit([worker.introduce()])
    assert roster.devices == [GPU]
    spec = SpaceSpec(model="m", dtype="bfloat16", block_tokens=64, shard_bytes=(GROUP * BLOCK,))
    with Client(daemon.address) as scheduler:
        scheduler.attachment.use_devices(roster.devices)
        space = scheduler.open_space(spec)
        keys = [bytes([key]) * 16 for key in range(1, 5)]
        assert space.put(keys, [bytes(GROUP * BLOCK)] * 4) == 4
        space.prefetch(keys, "gpu", deadline_s=None)

        def tiers() -> set[int]:
            lease = space.acquire(keys).result(60.0)
            lease.wait(60.0)
            lease.release()
            return set(lease.tiers)

        until(lambda: tiers() == {pb.TIER_GPU})
        reports: list[WorkerReport] = []

        def told() -> bool:
            reports.extend(filter(None, [worker.report()]))
            return any(not info.device_uuid for report in reports for info in report.infos)

        until(told)
        for report in reports:
            roster.update(report.infos)
        assert roster.devices == []
        scheduler.attachment.use_devices(roster.devices)
        until(lambda: tiers() == {pb.TIER_HOST})
