"""The `Admin` service: statistics, flushing, draining, the doctor."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc
from kvstore.server.answers import answering, streaming
from kvstore.server.doctor import Doctor
from kvstore.server.limits import list_pins, set_limits
from kvstore.server.stats import space_infos, stats_message
from kvstore.server.verify import verify_message
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc import aio

    from kvstore.config import ServeConfig
    from kvstore.engine import Engine

    Context = aio.ServicerContext[Any, Any]

__all__ = ["AdminService"]

_LISTED = 1000
_DEFAULT_WAIT_MS = 3_600_000
_MIN_INTERVAL_MS = 100
_PROGRESS_SECONDS = 0.25
_RESIZE_MS = 60_000


class AdminService(rpc.AdminServicer):
    """Handlers; each translates, calls the engine, translates back."""

    def __init__(self, engine: Engine, boot_id: bytes, config: ServeConfig) -> None:
        """Serve an engine that is started."""
        self.engine = engine
        self._boot_id = boot_id
        self._started = time.monotonic()
        self._doctor = Doctor(config, engine)

    @answering
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        """Return one picture."""
        return stats_message(self.engine, self._boot_id, self._started)

    @streaming
    async def WatchStats(
        self, request: pb.WatchStatsRequest, context: Context
    ) -> AsyncIterator[pb.StatsResponse]:
        """Return a picture at every interval."""
        interval = max(_MIN_INTERVAL_MS, request.interval_ms or 1000) / 1e3
        while True:
            yield stats_message(self.engine, self._boot_id, self._started)
            await asyncio.sleep(interval)

    @answering
    async def ListSpaces(
        self, request: pb.ListSpacesRequest, context: Context
    ) -> pb.ListSpacesResponse:
        """List the spaces."""
        return pb.ListSpacesResponse(spaces=space_infos(self.engine))

    @answering
    async def SetLimits(
        self, request: pb.SetLimitsRequest, context: Context
    ) -> pb.SetLimitsResponse:
        """Set quotas and times to live of a space."""
        return await set_limits(self.engine, request)

    @answering
    async def ListPins(self, request: pb.ListPinsRequest, context: Context) -> pb.ListPinsResponse:
        """List pins per space and owner."""
        return await list_pins(self.engine, request)

    @answering
    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        """Make everything durable."""
        try:
            blocks, skipped = await self.engine.flush(
                (request.deadline_ms or _DEFAULT_WAIT_MS) / 1e3
            )
        except TimeoutError:
            return pb.FlushResponse(done=False)
        skipped = self.engine.without_disk() or skipped
        return pb.FlushResponse(
            done=True,
            blocks=blocks,
            skipped=len(skipped),
            skipped_blocks=[
                pb.SkippedBlock(space_id=b.space.id, key=b.key, reason=self.engine.skip_reason(b))
                for b in skipped[:_LISTED]
            ],
        )

    @answering
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Stop granting, settle, flush."""
        done, grants, skipped = await self.engine.drain(
            (request.deadline_ms or _DEFAULT_WAIT_MS) / 1e3
        )
        return pb.DrainResponse(done=done, grants=grants, skipped=len(skipped))

    @answering
    async def SetCapacity(
        self, request: pb.SetCapacityRequest, context: Context
    ) -> pb.SetCapacityResponse:
        """Grow or shrink a tier."""
        if request.tier not in (pb.TIER_HOST, pb.TIER_DISK):
            problem = "host or disk"
            if request.tier == pb.TIER_GPU:
                problem = "the gpu pool keeps its size while it serves; restart with --gpu-pool"
            raise InvalidRequest("tier", problem)
        resized = await self.engine.resizer.resize(
            TierName(request.tier), request.bytes, (request.deadline_ms or _RESIZE_MS) / 1e3
        )
        return pb.SetCapacityResponse(
            bytes=resized.capacity_bytes, done=resized.done, evicted=resized.evicted
        )

    @streaming
    async def Verify(
        self, request: pb.VerifyRequest, context: Context
    ) -> AsyncIterator[pb.VerifyResponse]:
        """Check what is on disk; the check ends with the call."""
        scrubber = self.engine.scrubber
        if scrubber is None:
            raise InvalidRequest("verify", "this daemon has no disk tier")
        scrub = scrubber.begin(request.fraction or 1.0, request.bytes_per_second)
        # However the call ends: a generator that nobody asks for more is closed late, if ever.
        context.add_done_callback(lambda _: scrub.cancel())  # type: ignore[arg-type] # the stubs'
        over = False
        while not over:
            await scrub.wait(_PROGRESS_SECONDS)
            faults = scrub.take_faults(_LISTED)
            over = scrub.over and len(faults) < _LISTED
            if over and scrub.error is not None:
                raise scrub.error
            yield verify_message(scrub, faults, done=over and scrub.done)

    @answering
    async def Doctor(self, request: pb.DoctorRequest, context: Context) -> pb.DoctorResponse:
        """Check the machine."""
        return await self._doctor.examine()
