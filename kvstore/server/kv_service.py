"""The `KVStore` service: spaces, leases, grants, streams."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.address import machine_id
from kvstore.engine.explainer import explain_keys, explain_request
from kvstore.engine.long_calls import in_turns, lookup_in_turns, pin_in_turns
from kvstore.errors import InvalidRequest, UnknownSpace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc
from kvstore.server.answers import answering, streaming
from kvstore.server.attach_stream import AttachStream
from kvstore.server.byte_streams import ByteStreams
from kvstore.server.explain import explanation_message
from kvstore.server.packing import pack_generation_slots
from kvstore.space import BlockShape
from kvstore.tiers.base import Slot, TierName
from kvstore.wire import (
    ALL_SHARDS,
    MAX_KEYS,
    PROTOCOL_VERSION,
    SLOT_NAME_DTYPE,
    miss_to_message,
    spec_from_message,
    unpack_keys,
    unpack_parents,
    unpack_slot_names,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc import aio

    from kvstore.engine import Engine
    from kvstore.engine.attachments import Attachment
    from kvstore.index import SpaceIndex
    from kvstore.keys import Keys

    Context = aio.ServicerContext[Any, Any]

__all__ = ["KVStoreService"]

_MAX_COUNT = 1 << 20
# Of a grant: about 2 µs each. Who asks for more asks again.
_MOST_SLOTS = 16_384
_COMMIT_ITEMS = 2_048
_MOST_TICKETS = 4_096
_MAX_WAIT_MS = 3_600_000
_REQUEST_ID_CHARS = 256
_OWNER_BYTES = 128
_SLOT_BYTES = SLOT_NAME_DTYPE.itemsize


def _slots(packed: bytes) -> list[Slot]:
    names = unpack_slot_names(packed)
    return [
        Slot(g, i) for g, i in zip(names["group"].tolist(), names["index"].tolist(), strict=True)
    ]


class KVStoreService(rpc.KVStoreServicer):
    """Handlers; each translates, calls the engine, translates back."""

    def __init__(self, engine: Engine, boot_id: bytes, *, heartbeat_ms: int, ttl_ms: int) -> None:
        """Serve an engine that is started."""
        self.engine = engine
        self._boot_id = boot_id
        self._attach = AttachStream(engine, heartbeat_ms=heartbeat_ms, ttl_ms=ttl_ms)
        self._streams = ByteStreams(engine, patience_seconds=ttl_ms / 1e3)

    def _space(self, ref: pb.SpaceRef) -> SpaceIndex:
        return self.engine.space(ref.id, ref.epoch)

    def _keys(self, space: SpaceIndex, packed: bytes, *, may_be_empty: bool = False) -> Keys:
        keys = unpack_keys(packed, space.spec.key_bytes)
        if not len(keys) and not may_be_empty:
            raise InvalidRequest("keys", "must name at least one key")
        return keys

    @staticmethod
    def _parent(space: SpaceIndex, parent: bytes) -> bytes | None:
        """Return the parent of a run as `SpaceIndex.run` takes it."""
        if not parent:
            return None
        if len(parent) != space.spec.key_bytes:
            raise InvalidRequest(
                "parent", f"has {len(parent)} bytes, keys have {space.spec.key_bytes}"
            )
        return parent if any(parent) else b""

    @staticmethod
    def _check_request_id(request_id: str) -> None:
        if len(request_id) > _REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"is longer than {_REQUEST_ID_CHARS} characters")

    @staticmethod
    def _owner(owner: str) -> str:
        if len(owner.encode()) > _OWNER_BYTES or not owner.isprintable():
            raise InvalidRequest("owner", f"must be printable, of at most {_OWNER_BYTES} bytes")
        return owner

    def _check_gpu(self, tier: int) -> None:
        if tier == pb.TIER_GPU and self.engine.gpu is None:
            raise InvalidRequest("tier", "this daemon has no gpu tier")

    def _writer(self, attachment_id: int) -> Attachment:
        return self.engine.attachments.writer(attachment_id)

    @answering
    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloResponse:
        """Answer who is there."""
        if request.protocol_version not in (0, PROTOCOL_VERSION):
            raise InvalidRequest(
                "protocol_version", f"{request.protocol_version} is not {PROTOCOL_VERSION}"
            )
        tiers = [TierName.GPU] if self.engine.gpu is not None else []
        tiers += [TierName.HOST] + ([TierName.DISK] if self.engine.disk is not None else [])
        return pb.HelloResponse(
            protocol_version=PROTOCOL_VERSION,
            server_version=kvstore.__version__,
            boot_id=self._boot_id,
            machine_id=machine_id(),
            tiers=[pb.Tier.Name(t) for t in tiers],
        )

    @streaming
    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachUp], context: Context
    ) -> AsyncIterator[pb.AttachDown]:
        """Carry one attachment's events."""
        async for message in self._attach.serve(request_iterator, context):
            yield message

    @answering
    async def OpenSpace(
        self, request: pb.OpenSpaceRequest, context: Context
    ) -> pb.OpenSpaceResponse:
        """Register a space."""
        if not request.HasField("spec"):
            raise InvalidRequest("spec", "is missing")
        space = await self.engine.open_space(spec_from_message(request.spec))
        return pb.OpenSpaceResponse(
            space=pb.SpaceRef(id=space.id, epoch=space.epoch),
            key_bytes=space.spec.key_bytes,
            block_bytes=space.spec.block_bytes,
            slot_bytes=space.shape.slot_bytes,
        )

    @answering
    async def MakeRoom(self, request: pb.MakeRoomRequest, context: Context) -> pb.MakeRoomResponse:
        """Have memory made ahead of need."""
        made = self.engine.make_room(BlockShape.of(request.shard_bytes))
        return pb.MakeRoomResponse(
            made_bytes=made.made_bytes, expected_bytes=made.expected_bytes, groups=made.groups
        )

    @answering
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """Say how long a run is."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys, may_be_empty=True)
        tiers, miss = await lookup_in_turns(
            self.engine, space, request.space.epoch, keys, self._parent(space, request.parent)
        )
        return pb.LookupResponse(blocks=len(tiers), tiers=tiers, miss=miss_to_message(miss))

    @answering
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        """Lease a run."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys)
        if not 0 < request.lease_id < 1 << 63:
            raise InvalidRequest("lease_id", "must be a non-zero 63-bit number")
        rate = request.prefill_tokens_per_second
        if not 0 <= rate < math.inf:
            raise InvalidRequest("prefill_tokens_per_second", f"{rate} is no rate")
        self._check_request_id(request.request_id)
        acquired = self.engine.acquire(
            self._writer(request.attachment_id),
            space,
            request.lease_id,
            keys,
            min(request.deadline_ms, _MAX_WAIT_MS) / 1e3,
            request.priority,
            None if request.remembered_rate and not rate else rate,
            self._parent(space, request.parent),
            request.request_id,
            min(request.queued_ms, _MAX_WAIT_MS) / 1e3,
        )
        return pb.AcquireResponse(
            blocks=acquired.blocks,
            slots=pack_generation_slots(acquired.slots),
            tiers=acquired.tiers,
            growing=acquired.growing,
            miss=miss_to_message(acquired.miss),
            present=acquired.present,
        )

    @answering
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """End leases."""
        attachment = self.engine.attachments.find(request.attachment_id)
        for lease_id in request.lease_ids:
            self.engine.leases.release(attachment, lease_id)
        return pb.ReleaseResponse()

    @answering
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        """Grant slots."""
        space = self._space(request.space)
        owner = self._writer(request.attachment_id)
        if not 0 < request.grant_id < 1 << 63:
            raise InvalidRequest("grant_id", "must be a non-zero 63-bit number")
        if not 1 <= request.count <= _MAX_COUNT:
            raise InvalidRequest("count", f"must be within 1 … {_MAX_COUNT}")
        shards = space.shape.shards
        if len(request.writers) not in (0, shards):
            raise InvalidRequest(
                "writers", f"names {len(request.writers)}, the space has {shards} shards"
            )
        writers = [self._writer(writer) for writer in request.writers]
        protect = list(unpack_keys(request.protect, space.spec.key_bytes))
        count, present = min(request.count, _MOST_SLOTS), 0
        if request.keys:
            keys = unpack_keys(request.keys, space.spec.key_bytes, request.parent)
            parent = keys.parent or b""
            tiers, _ = await lookup_in_turns(self.engine, space, request.space.epoch, keys, parent)
            present = len(tiers)
            owner = self._writer(request.attachment_id)
            count = min(count, len(keys) - present)
            if not space.has_parent(keys.parent):
                return pb.ReserveResponse(shortage=pb.ReserveResponse.ORPHAN)
        if not count:
            return pb.ReserveResponse(present=present)
        slots, shortage = await self.engine.reservations.reserve(
            owner,
            space,
            request.grant_id,
            count,
            writers,
            min(request.deadline_ms, _MAX_WAIT_MS) / 1e3,
            protect,
        )
        return pb.ReserveResponse(
            slots=pack_generation_slots(self.engine.with_generations(slots)),
            shortage=pb.ReserveResponse.Shortage.Name(shortage),
            present=present,
        )

    @answering
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """Bind keys to written slots."""
        space = self.engine.index.spaces.get(request.space.id)
        if space is None:
            space = self._space(request.space)
        keys = self._keys(space, request.keys)
        size = space.spec.key_bytes
        slots = len(unpack_slot_names(request.slots))
        if not len(keys) * size == len(request.parents) == slots * size:
            raise InvalidRequest(
                "slots", f"{slots} slots, {len(keys)} keys, {len(request.parents)} bytes of parents"
            )
        if request.shard != ALL_SHARDS and request.shard >= space.shape.shards:
            raise InvalidRequest("shard", f"{request.shard}, the space has {space.shape.shards}")
        outcomes = bytearray()
        async for at, end in in_turns(slots, _COMMIT_ITEMS):
            writer = self._writer(request.attachment_id)
            parents = unpack_parents(request.parents[at * size : end * size], size)
            items = zip(
                _slots(request.slots[at * _SLOT_BYTES : end * _SLOT_BYTES]),
                keys[at:end],
                parents,
                strict=True,
            )
            outcomes += bytes(
                self.engine.commit(
                    writer,
                    request.owner_id or writer.id,
                    request.grant_id,
                    None if request.shard == ALL_SHARDS else 1 << request.shard,
                    list(items),
                    space,
                )
            )
        return pb.CommitResponse(outcomes=bytes(outcomes))

    @answering
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Take granted slots back."""
        caller = self.engine.attachments.find(request.attachment_id)
        self.engine.abort(
            caller,
            request.owner_id or caller.id,
            request.grant_id,
            _slots(request.slots) if request.slots else None,
            all_shards=request.all_shards,
        )
        return pb.AbortResponse()

    @answering
    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        """Promote a run."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys)
        if request.tier not in (pb.TIER_UNSPECIFIED, pb.TIER_HOST, pb.TIER_GPU):
            raise InvalidRequest("tier", "must be host or gpu")
        self._check_gpu(request.tier)
        if not 0 < request.ticket_id < 1 << 63:
            raise InvalidRequest("ticket_id", "must be a non-zero 63-bit number")
        blocks, done, miss = await self.engine.tickets.prefetch(
            space,
            keys,
            request.ticket_id,
            request.deadline_ms / 1e3,
            request.priority,
            min(request.wait_ms, _MAX_WAIT_MS) / 1e3,
            TierName(request.tier or pb.TIER_HOST),
        )
        return pb.PrefetchResponse(blocks=blocks, done=done, miss=miss_to_message(miss))

    @answering
    async def CancelPrefetch(
        self, request: pb.CancelPrefetchRequest, context: Context
    ) -> pb.CancelPrefetchResponse:
        """Forget tickets."""
        if len(request.ticket_ids) > _MOST_TICKETS:
            raise InvalidRequest("ticket_ids", f"are more than {_MOST_TICKETS} in one call")
        for ticket_id in request.ticket_ids:
            self.engine.tickets.cancel(ticket_id)
        return pb.CancelPrefetchResponse()

    @answering
    async def Put(
        self, request_iterator: AsyncIterator[pb.PutRequest], context: Context
    ) -> pb.PutResponse:
        """Store streamed blocks."""
        return await self._streams.put(request_iterator)

    @streaming
    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetResponse]:
        """Stream blocks."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys, may_be_empty=True)
        deadline = min(request.deadline_ms, _MAX_WAIT_MS) / 1e3
        parent = self._parent(space, request.parent)
        stream = self._streams.get(space, request.space.epoch, keys, deadline, parent)
        async with contextlib.aclosing(stream):
            async for message in stream:
                yield message

    @answering
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        """Pin a run."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys)
        owner = self._owner(request.owner)
        if owner and not request.ttl_ms:
            raise InvalidRequest("ttl_ms", "a pin with an owner needs one: its owner may be gone")
        blocks = await pin_in_turns(
            self.engine, space, request.space.epoch, keys, request.ttl_ms / 1e3, owner
        )
        return pb.PinResponse(blocks=blocks)

    @answering
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        """Undo pins."""
        owner = self._owner(request.owner) or None
        if owner is not None and not request.HasField("space"):
            if request.keys:
                raise InvalidRequest("space", "is missing; keys are those of one space")
            return pb.UnpinResponse(blocks=await self.engine.pins.unpin_owner(owner))
        space = self._space(request.space)
        keys = self._keys(space, request.keys, may_be_empty=True)
        named = keys if len(keys) else None
        return pb.UnpinResponse(blocks=await self.engine.pins.unpin(space, named, owner))

    @answering
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        """Remove copies."""
        space = self._space(request.space)
        keys = self._keys(space, request.keys, may_be_empty=True)
        if request.tier not in pb.Tier.values():
            raise InvalidRequest("tier", f"{request.tier} is no tier")
        self._check_gpu(request.tier)
        tier = TierName(request.tier) if request.tier else None
        named = keys if len(keys) else None
        copies, skipped = await self.engine.removal.evict(space, named, tier)
        return pb.EvictResponse(copies=copies, skipped=skipped)

    @answering
    async def BumpEpoch(
        self, request: pb.BumpEpochRequest, context: Context
    ) -> pb.BumpEpochResponse:
        """Make the space's blocks unreachable."""
        space = self._space(request.space)
        epoch = await self.engine.removal.bump_epoch(space)
        return pb.BumpEpochResponse(space=pb.SpaceRef(id=space.id, epoch=epoch))

    @answering
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Say why a run ends."""
        if request.request_id:
            self._check_request_id(request.request_id)
            return explanation_message(explain_request(self.engine, request.request_id))
        space = self.engine.index.spaces.get(request.space.id)
        if space is None:
            raise UnknownSpace(f"space {request.space.id.hex()[:12]} is unknown: open it")
        keys = self._keys(space, request.keys)
        explanation = explain_keys(self.engine, space, request.space.epoch, keys[:MAX_KEYS])
        return explanation_message(explanation)
