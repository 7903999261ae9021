"""Put and Get: blocks whose bytes travel over gRPC, for clients that cannot map the pool.

A slot's memory is viewed for one piece at a time: the frames of a call that ended in an error live
until garbage is collected, and a view in one of them would keep a slab from being given back.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest
from kvstore.miss import Miss, MissReason
from kvstore.outcomes import CommitOutcome
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import CHUNK_BYTES, miss_to_message, unpack_keys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from kvstore.engine import Engine
    from kvstore.engine.grants import Grant
    from kvstore.index import SpaceIndex

__all__ = ["ByteStreams"]

# Bytes held in place while they are sent.
_WINDOW_BYTES = 64 << 20
_POOL_PART = 8


class _Incoming:
    """One streamed block on its way into a slot."""

    def __init__(self, engine: Engine, grant: Grant) -> None:
        self._engine = engine
        self._grant = grant
        [self._slot] = grant.slots
        self._lengths = grant.space.spec.shard_bytes

    def write(self, offset: int, data: bytes) -> None:
        """Copy a piece of the block, `offset` counted over its shards, into the slot."""
        views = self._engine.host.views(self._slot)
        for view, length in zip(views, self._lengths, strict=True):
            if offset < length:
                part = data[: length - offset]
                view[offset : offset + len(part)] = part
                data = data[len(part) :]
                offset = 0
            else:
                offset -= length
            if not data:
                return

    def commit(self, key: bytes, parent: bytes | None) -> bool:
        """Make it a block; say whether the block is there now."""
        shards = (1 << len(self._lengths)) - 1
        [outcome] = self._engine.grants.commit(self._grant, shards, [(self._slot, key, parent)])
        return outcome in (CommitOutcome.COMMITTED, CommitOutcome.EXISTS)

    def abort(self) -> None:
        """Give the slot back."""
        self._engine.grants.abort(self._grant, (1 << len(self._lengths)) - 1)


class _Patience:
    """Gives up on a client that neither sends nor reads for too long while it holds slots."""

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It is the client's turn."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._give_up)

    def stop(self) -> None:
        """The client did something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ByteStreams:
    """The two byte streams.

    What a stream holds comes back when its client is silent for too long, as leases do. Only the
    daemon touches the slots here, so that it may take them away at any time.
    """

    def __init__(self, engine: Engine, *, patience_seconds: float) -> None:
        """Serve an engine.

        Args:
            engine: started.
            patience_seconds: how long a client that holds slots may be silent.
        """
        self._engine = engine
        self._patience_seconds = patience_seconds

    async def put(self, requests: AsyncIterator[pb.PutRequest]) -> pb.PutResponse:
        """Store blocks from a stream; the whole stream is read even when there is no room."""
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("header"):
            raise InvalidRequest("header", "must be the first message")
        header = first.header
        space = self._engine.space(header.space.id, header.space.epoch)
        keys = unpack_keys(header.keys, space.spec.key_bytes, header.parent)
        size = space.spec.block_bytes
        loop = asyncio.get_running_loop()
        deadline = loop.time() + header.deadline_ms / 1e3
        expected = (0, 0)
        incoming: _Incoming | None = None
        refused = False

        def give_up() -> None:
            nonlocal incoming, refused
            if incoming is not None:
                incoming.abort()
                self._engine.counters.counts["streams_given_up"] += 1
            incoming, refused = None, True

        patience = _Patience(self._patience_seconds, give_up)
        try:
            async for request in requests:
                patience.stop()
                if not request.HasField("chunk"):
                    raise InvalidRequest("part", "one header, then chunks")
                chunk = request.chunk
                if (chunk.block, chunk.offset) != expected or chunk.block >= len(keys):
                    raise InvalidRequest(
                        "chunk", f"block {chunk.block} offset {chunk.offset}: expected {expected}"
                    )
                end = chunk.offset + len(chunk.data)
                if not chunk.data or end > size:
                    raise InvalidRequest("chunk", f"block {chunk.block} is {size} bytes")
                if chunk.offset == 0:
                    # A bumped epoch must not let bytes of the old weights in.
                    self._engine.space(header.space.id, header.space.epoch)
                    parent = keys.parent if chunk.block == 0 else keys[chunk.block - 1]
                    refused = refused or not self._reachable(space, parent)
                    if not refused and keys[chunk.block] not in space.blocks:
                        left = max(0.0, deadline - loop.time())
                        grant = await self._engine.reservations.take_for_put(
                            space, header.space.epoch, left, parent
                        )
                        if grant is None:
                            refused = True
                        else:
                            incoming = _Incoming(self._engine, grant)
                if incoming is not None:
                    incoming.write(chunk.offset, chunk.data)
                expected = (chunk.block, end)
                if end == size:
                    expected = (chunk.block + 1, 0)
                    if incoming is not None:
                        parent = keys.parent if chunk.block == 0 else keys[chunk.block - 1]
                        done, incoming = incoming, None
                        refused = not done.commit(keys[chunk.block], parent)
                if incoming is not None:
                    patience.start()
        finally:
            patience.stop()
            if incoming is not None:
                incoming.abort()
        tiers, _ = self._engine.lookup(space, keys, keys.parent)
        return pb.PutResponse(blocks=len(tiers))

    @staticmethod
    def _reachable(space: SpaceIndex, parent: bytes | None) -> bool:
        return parent is None or parent in space.blocks

    async def get(
        self,
        space: SpaceIndex,
        epoch: int,
        keys: Sequence[bytes],
        deadline_seconds: float,
        parent: bytes | None = None,
    ) -> AsyncGenerator[pb.GetResponse]:
        """Stream the leading run; each block's bytes stay in place while they are read.

        `parent` is that of `SpaceIndex.run`.

        Raises:
            InvalidRequest: a key is named twice.
            StaleEpoch: the space's epoch was bumped meanwhile.
        """
        # What is held while it waits for its turn must leave room for what others wait for.
        share = self._engine.host.usage().capacity_bytes // _POOL_PART
        held_bytes = min(_WINDOW_BYTES, share, self._engine.lease_cap_bytes)
        window = max(1, held_bytes // space.shape.block_bytes)
        sent = 0
        miss = Miss()
        while sent < len(keys):
            part = keys[sent : sent + window]
            count = 0
            # The same keys may name blocks of other weights by now.
            self._engine.space(space.id, epoch)
            # Closed at once when the client goes away, so that nothing stays held.
            before = keys[sent - 1] if sent else parent
            window_of = self._window(space, part, sent, deadline_seconds, before)
            async with aclosing(window_of) as stream:
                async for item in stream:
                    if isinstance(item, Miss):
                        miss = item
                    else:
                        message, finished = item
                        yield message
                        count += finished
            sent += count
            if count < len(part):
                break
        reason = miss.reason.value
        self._engine.counters.miss(reason, len(keys) - sent, space.spec.block_tokens)
        yield pb.GetResponse(end=pb.GetEnd(blocks=sent, miss=miss_to_message(miss)))

    async def _window(
        self,
        space: SpaceIndex,
        keys: Sequence[bytes],
        first: int,
        deadline_seconds: float,
        parent: bytes | None,
    ) -> AsyncGenerator[tuple[pb.GetResponse, bool] | Miss]:
        counts = self._engine.counters.counts
        read = self._engine.start_read(space, keys, parent)

        def give_up() -> None:
            read.close()
            counts["streams_given_up"] += 1

        patience = _Patience(self._patience_seconds, give_up)
        try:
            for i in range(len(read.run)):
                if miss := await read.wait(i, deadline_seconds):
                    yield miss
                    return
                block = read.run[i]
                assert block.host is not None
                tier = read.tier(i).name.lower()
                counts[f"hit_blocks_{tier}"] += 1
                counts[f"hit_tokens_{tier}"] += space.spec.block_tokens
                offset = 0
                for shard, length in enumerate(space.spec.shard_bytes):
                    for at in range(0, length, CHUNK_BYTES):
                        end = min(at + CHUNK_BYTES, length)
                        data = bytes(self._engine.host.views(block.host)[shard][at:end])
                        offset += len(data)
                        chunk = pb.Chunk(block=first + i, offset=offset - len(data), data=data)
                        finished = offset == space.spec.block_bytes
                        patience.start()
                        yield pb.GetResponse(chunk=chunk), finished
                        patience.stop()
                        if read.closed and not (finished and i + 1 == len(read.run)):
                            # The slot is somebody else's now.
                            yield Miss(MissReason.LEASE_LOST, "host")
                            return
                read.let_go(i)
            if read.miss:
                yield read.miss
        finally:
            patience.stop()
            read.close()
