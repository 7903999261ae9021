"""The Attach stream: one per client process."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any, Final, assert_never

from kvstore.engine.counters import UsageCounts
from kvstore.engine.events import (
    ActiveEvent,
    BootEndEvent,
    GrantRevokedEvent,
    LeaseDoneEvent,
    LeaseGrownEvent,
    LeasesRevokedEvent,
    SlabEvent,
    SlabRetireEvent,
)
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.answers import fail
from kvstore.server.packing import pack_generation_slots
from kvstore.server.slab_messages import slab_messages
from kvstore.wire import MAX_KEYS, miss_to_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from grpc import aio

    from kvstore.engine import Engine
    from kvstore.engine.attachments import Attachment
    from kvstore.engine.events import Event

__all__ = ["AttachStream"]

log = logging.getLogger(__name__)

_NAME_CHARS: Final = 200
_MAX_DEVICES: Final = 1024
# Operations in one heartbeat; more than there are, for clients that know others.
_MAX_TIMES: Final = 64


def _printable(name: str) -> str:
    """Return a client's name as it may stand in a log line."""
    return "".join(c if c.isprintable() else "?" for c in name[:_NAME_CHARS])


class AttachStream:
    """Translates between an attachment's stream and the engine."""

    def __init__(self, engine: Engine, *, heartbeat_ms: int, ttl_ms: int) -> None:
        """Serve an engine; the intervals are told to the clients."""
        self._engine = engine
        self._heartbeat_ms = heartbeat_ms
        self._ttl_ms = ttl_ms

    async def serve(
        self, requests: AsyncIterator[pb.AttachUp], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AttachDown]:
        """Carry one stream from its first message to its end."""
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("open"):
            await fail(context, InvalidRequest("open", "must be the first message"), "attach")
            return
        attachments = self._engine.attachments
        attachment = attachments.open(
            _printable(first.open.client),
            first.open.pid,
            mapped=first.open.map_memory,
            shards=frozenset(first.open.shards),
        )
        self._set_devices(attachment, first.open.devices)
        reader = asyncio.create_task(self._read(attachment, requests), name="attach-reader")
        try:
            yield pb.AttachDown(
                attached=pb.Attached(
                    attachment_id=attachment.id,
                    control_path=str(self._engine.control.path),
                    lock_offset=self._engine.control.lock_offset(attachment.id),
                    heartbeat_interval_ms=self._heartbeat_ms,
                    lease_ttl_ms=self._ttl_ms,
                    lease_cap_bytes=self._engine.lease_cap_bytes,
                )
            )
            while (event := await attachment.outbox.get()) is not None:
                for message in self._messages(attachment, event):
                    yield message
            if reader.done() and not reader.cancelled():
                error = reader.exception()
                if isinstance(error, KVStoreError):
                    await fail(context, error, "attach")
        finally:
            reader.cancel()
            attachments.stream_ended(attachment)

    async def _read(self, attachment: Attachment, requests: AsyncIterator[pb.AttachUp]) -> None:
        """Handle what the client says until it stops talking."""
        attachments = self._engine.attachments
        try:
            async for message in requests:
                attachments.heard(attachment)
                match message.WhichOneof("event"):
                    case "locked":
                        attachments.locked(attachment)
                    case "heartbeat":
                        # An empty one is two bytes of a message and a microsecond of the loop.
                        if len(message.heartbeat.usage) > MAX_KEYS:
                            raise InvalidRequest("usage", f"names more than {MAX_KEYS} spaces")
                        for usage in message.heartbeat.usage:
                            self._report(usage)
                        if len(message.heartbeat.times) > _MAX_TIMES:
                            raise InvalidRequest("times", f"names more than {_MAX_TIMES}")
                        for times in message.heartbeat.times:
                            self._time(times)
                    case "unmapped":
                        groups = list(message.unmapped.groups)
                        attachment.groups.difference_update(groups)
                        self._engine.room.unmapped(attachment.id, groups)
                    case "devices":
                        self._set_devices(attachment, message.devices.uuids)
                    case "detach":
                        attachments.detach(attachment)
                        return
                    case other:
                        raise InvalidRequest("event", f"{other or 'unknown'} is not expected here")
        finally:
            # Ends the writer, and with it the stream.
            attachment.outbox.put_nowait(None)

    def _set_devices(self, attachment: Attachment, uuids: Sequence[str]) -> None:
        if len(uuids) > _MAX_DEVICES:
            raise InvalidRequest("devices", f"names more than {_MAX_DEVICES}")
        self._engine.attachments.set_devices(attachment, frozenset(uuids))

    def _report(self, usage: pb.Usage) -> None:
        counts = UsageCounts(
            requests=usage.requests,
            prompt_tokens=usage.prompt_tokens,
            reused_tokens_gpu=usage.reused_tokens_gpu,
            reused_tokens_host=usage.reused_tokens_host,
            reused_tokens_disk=usage.reused_tokens_disk,
            local_tokens=usage.local_tokens,
            load_failures=usage.load_failures,
            loaded_bytes=usage.loaded_bytes,
            stored_bytes=usage.stored_bytes,
        )
        self._engine.report_usage(usage.space.id, counts)

    def _time(self, times: pb.OperationTimes) -> None:
        buckets = self._engine.counters.client_times.get(times.operation)
        if buckets is None:
            return
        if len(times.buckets) > len(buckets.counts):
            raise InvalidRequest("buckets", f"are more than {len(buckets.counts)}")
        for name in ("total_seconds", "longest_seconds"):
            if not 0 <= getattr(times, name) < math.inf:
                raise InvalidRequest(name, f"{getattr(times, name)} is no time")
        buckets.merge(times.buckets, times.total_seconds, times.longest_seconds)

    def _messages(self, attachment: Attachment, event: Event) -> Iterator[pb.AttachDown]:
        match event:
            case ActiveEvent():
                yield pb.AttachDown(active=pb.Active())
            case SlabEvent(group=group):
                yield from slab_messages(attachment, group)
            case SlabRetireEvent(groups=groups):
                yield pb.AttachDown(retire=pb.SlabRetire(groups=groups))
            case LeaseGrownEvent():
                yield pb.AttachDown(
                    lease_grown=pb.LeaseGrown(
                        lease_id=event.lease_id,
                        first=event.first,
                        slots=pack_generation_slots(event.slots),
                        tiers=event.tiers,
                    )
                )
            case LeaseDoneEvent():
                yield pb.AttachDown(
                    lease_done=pb.LeaseDone(
                        lease_id=event.lease_id,
                        blocks=event.blocks,
                        miss=miss_to_message(event.miss),
                    )
                )
            case LeasesRevokedEvent(lease_ids=ids):
                yield pb.AttachDown(revoked=pb.LeasesRevoked(lease_ids=ids))
            case GrantRevokedEvent(owner_id=owner, grant_id=grant):
                yield pb.AttachDown(grant_revoked=pb.GrantRevoked(owner_id=owner, grant_id=grant))
            case BootEndEvent(reason=reason):
                yield pb.AttachDown(boot_end=pb.BootEnd(reason=reason))
            case _:
                assert_never(event)
