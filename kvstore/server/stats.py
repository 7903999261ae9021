"""The engine's state as a StatsResponse."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Final, TypeVar

import kvstore
from kvstore.engine.attachments import State
from kvstore.engine.counters import UsageCounts
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.limits import limits_in_force, limits_message, unix_ms
from kvstore.tiers.base import TierName
from kvstore.wire import spec_to_message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.engine import Engine
    from kvstore.engine.hot_prefixes import HotPrefix
    from kvstore.index import SpaceIndex
    from kvstore.tiers.gpu import GpuTier

__all__ = ["space_infos", "stats_message"]


# Every part of a picture must fit one message, however many spaces and clients there are.
_MAX_SPACES: Final = 2048
_SPACES_BYTES: Final = 2 << 20
_CLIENTS_BYTES: Final = 1 << 20
_PREFIXES: Final = 20

_Item = TypeVar("_Item", pb.SpaceInfo, pb.ClientStats)


def _fitting(messages: Iterable[_Item], limit_bytes: int) -> list[_Item]:
    """Return as many leading messages as fit."""
    taken: list[_Item] = []
    for message in messages:
        # Tag and length come on top.
        limit_bytes -= message.ByteSize() + 6
        if limit_bytes < 0:
            break
        taken.append(message)
    return taken


def _usage(counts: UsageCounts) -> pb.Usage:
    return pb.Usage(**counts.values())


def space_infos(engine: Engine) -> list[pb.SpaceInfo]:
    """Return one entry per space; of too many for a message, those with the most blocks."""
    spaces = list(engine.index.spaces.values())
    if len(spaces) > _MAX_SPACES:
        spaces = heapq.nlargest(_MAX_SPACES, spaces, key=lambda space: len(space.blocks))
    pinned = engine.pins.counts()

    def info(space: SpaceIndex) -> pb.SpaceInfo:
        size = space.shape.block_bytes
        return pb.SpaceInfo(
            space=pb.SpaceRef(id=space.id, epoch=space.epoch),
            spec=spec_to_message(space.spec),
            blocks=len(space.blocks),
            blocks_gpu=space.gpu_blocks,
            blocks_host=space.host_blocks,
            blocks_disk=space.disk_blocks,
            pinned=pinned.get(space.id, 0),
            usage=_usage(engine.usage.get(space.id, UsageCounts())),
            bytes_gpu=space.gpu_blocks * size,
            bytes_host=space.host_blocks * size,
            bytes_disk=space.disk_blocks * size,
            pinned_bytes=pinned.get(space.id, 0) * size,
            pins_end_unix_ms=unix_ms(engine, engine.pins.first_end(space.id)),
            limits=limits_in_force(space.in_force) if space.in_force else None,
            own_limits=limits_message(space.limits) if space.limits else None,
        )

    infos = [info(space) for space in spaces]
    fitting = _fitting(infos, _SPACES_BYTES)
    if len(fitting) < len(infos):
        infos.sort(key=lambda listed: -listed.blocks)
        fitting = _fitting(infos, _SPACES_BYTES)
    return fitting


def _gpu_tier(engine: Engine, gpu: GpuTier) -> pb.TierStats:
    counts = engine.counters.counts
    usage = gpu.usage()
    return pb.TierStats(
        tier=pb.TIER_GPU,
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        allocated_bytes=usage.allocated_bytes,
        blocks=sum(s.gpu_blocks for s in engine.index.spaces.values()),
        free_blocks=sum(gpu.free_blocks(s) for s in {g.shape for g in gpu.groups()}),
        hit_blocks=counts["hit_blocks_gpu"],
        hit_tokens=counts["hit_tokens_gpu"],
        evicted_blocks=counts["evicted_blocks_gpu"],
        read_bytes=gpu.copied_out_bytes,
        written_bytes=gpu.copied_in_bytes,
        state=gpu.state,
        io_engine="host" if engine.gpu_reader is None else engine.gpu_reader.name,
        devices=[
            pb.DeviceStats(
                uuid=device.uuid,
                name=device.name,
                capacity_bytes=part.capacity_bytes,
                allocated_bytes=part.allocated_bytes,
            )
            for device, part in zip(gpu.devices, gpu.device_usage(), strict=True)
        ],
    )


def _tiers(engine: Engine) -> list[pb.TierStats]:
    counts = engine.counters.counts
    spaces = engine.index.spaces.values()
    shapes = {space.shape for space in spaces}
    host = engine.host
    usage = host.usage()
    tiers = [] if engine.gpu is None else [_gpu_tier(engine, engine.gpu)]
    tiers.append(
        pb.TierStats(
            tier=pb.TIER_HOST,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            allocated_bytes=usage.allocated_bytes,
            blocks=sum(s.host_blocks for s in spaces),
            free_blocks=sum(host.free_blocks(shape) for shape in shapes),
            hit_blocks=counts["hit_blocks_host"],
            hit_tokens=counts["hit_tokens_host"],
            dirty_blocks=engine.dirty_blocks(),
            evicted_blocks=counts["evicted_blocks_host"],
            state=host.state,
        )
    )
    disk = engine.disk
    if disk is not None:
        usage = disk.usage()
        tiers.append(
            pb.TierStats(
                tier=pb.TIER_DISK,
                capacity_bytes=usage.capacity_bytes,
                used_bytes=usage.used_bytes,
                allocated_bytes=usage.allocated_bytes,
                blocks=sum(s.disk_blocks for s in spaces),
                free_blocks=sum(disk.free_blocks(shape) for shape in shapes),
                hit_blocks=counts["hit_blocks_disk"],
                hit_tokens=counts["hit_tokens_disk"],
                evicted_blocks=counts["evicted_blocks_disk"],
                read_bytes=disk.read_bytes,
                written_bytes=disk.written_bytes,
                io_errors=disk.io_errors,
                corrupt_blocks=disk.corrupt,
                state=engine.disk_state,
                io_engine=disk.io_engine,
                budget_bytes=0 if engine.budget is None else engine.budget.day_bytes,
                budget_left_bytes=0 if engine.budget is None else engine.budget.left_bytes,
            )
        )
    return tiers


def _prefix(prefix: HotPrefix) -> pb.HotPrefix:
    spec, shape = prefix.space.spec, prefix.space.shape
    return pb.HotPrefix(
        space_id=prefix.space.id,
        root=prefix.root,
        key=prefix.key,
        requests=prefix.requests,
        hit_blocks=prefix.hit_blocks,
        hit_tokens=prefix.hit_blocks * spec.block_tokens,
        shared_blocks=prefix.shared_blocks,
        shared_tokens=prefix.shared_blocks * spec.block_tokens,
        shared_bytes=prefix.shared_blocks * shape.block_bytes,
        blocks_gpu=prefix.tiers[TierName.GPU],
        blocks_host=prefix.tiers[TierName.HOST],
        blocks_disk=prefix.tiers[TierName.DISK],
        idle_seconds=prefix.idle_seconds,
    )


def stats_message(engine: Engine, boot_id: bytes, started: float) -> pb.StatsResponse:
    """Return one consistent picture; `started` is `time.monotonic()` at start."""
    total = UsageCounts.total(list(engine.usage.values()))
    stuck_slots, stuck_bytes = engine.quarantine.stuck
    clients = []
    for attachment in engine.attachments.snapshot():
        stuck = engine.grants.open_slots_of(attachment)
        if attachment.state in (State.PRESUMED_DEAD, State.SILENT):
            stuck_slots += stuck.slots
            stuck_bytes += stuck.bytes
        clients.append(
            pb.ClientStats(
                attachment_id=attachment.id,
                client=attachment.client,
                pid=attachment.pid,
                state=attachment.state.value,
                leases=len(attachment.leases),
                leased_bytes=attachment.leased_bytes,
                granted_slots=stuck.slots,
                granted_bytes=stuck.bytes,
            )
        )
    return pb.StatsResponse(
        boot_id=boot_id,
        server_version=kvstore.__version__,
        uptime_seconds=time.monotonic() - started,
        tiers=_tiers(engine),
        spaces=space_infos(engine),
        clients=_fitting(clients, _CLIENTS_BYTES),
        counters={**engine.counters.counts, "spaces": len(engine.index.spaces)},
        misses_blocks=dict(engine.counters.miss_blocks),
        misses_tokens=dict(engine.counters.miss_tokens),
        timings=[
            pb.Timing(
                name=t.name,
                count=t.count,
                p50_seconds=t.p50,
                p95_seconds=t.p95,
                p99_seconds=t.p99,
                max_seconds=t.longest,
            )
            for t in engine.counters.timings()
        ],
        usage=_usage(total),
        leases=engine.leases.count,
        grants=len(engine.grants),
        granted_slots=engine.grants.slot_count,
        stuck_slots=stuck_slots,
        stuck_bytes=stuck_bytes,
        prefixes=[_prefix(prefix) for prefix in engine.hot_prefixes.hottest(_PREFIXES)],
        draining=engine.reservations.closed,
    )
