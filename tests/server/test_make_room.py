"""`MakeRoom`: what a client hears, and what it costs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from raw_calls import MIB, UINT64_MAX, Raw, chain, status

from kvstore import Client, InvalidRequest
from kvstore.aio import AsyncClient
from kvstore.proto import kvstore_pb2 as pb

POOL = 64 * MIB
SHARDS = (65536, 65536)


@pytest.fixture
def served(raw: Callable[..., Raw]) -> Raw:
    return raw("--host-pool", "64MiB")


def test_all_of_the_pool_is_made_for_one_shape_and_its_blocks_lie_there(
    served: Raw, until: Callable[..., None]
) -> None:
    with Client(served.daemon.address) as client:
        until(lambda: client.make_room(SHARDS).made_bytes == POOL)
        whole = client.make_room(SHARDS)
        assert whole.expected_bytes == POOL
        assert len(set(whole.groups)) == len(whole.groups) > 0
        space = served.open("m", SHARDS)
        keys = chain("a", 8)
        assert served.put(space, keys, sum(SHARDS)) == 8
        assert client.make_room(SHARDS) == whole
        (host,) = client.stats().tiers
        assert (host.allocated_bytes, host.evicted_blocks) == (POOL, 0)

        async def ask() -> pb.MakeRoomResponse:
            async with AsyncClient(served.daemon.address) as other:
                return await other.make_room(SHARDS)

        assert asyncio.run(ask()) == whole


def test_another_shape_still_gets_its_share(served: Raw, until: Callable[..., None]) -> None:
    """Nobody maps anything here: groups that are empty are given up at once."""
    with Client(served.daemon.address) as client:
        until(lambda: client.make_room(SHARDS).made_bytes == POOL)
        until(lambda: client.make_room((262144,)).made_bytes == POOL // 2)
        assert client.make_room(SHARDS).made_bytes == POOL // 2
        # And a third one that asks for nothing.
        third = served.open("third", (131072,) * 3)
        assert served.put(third, chain("t", 40), 3 * 131072) == 40
        assert client.stats().tiers[0].evicted_blocks == 0


def test_what_is_no_block_is_refused_in_one_line(served: Raw) -> None:
    before = served.stats().tiers[0].allocated_bytes
    for shards in ((), (0,), (UINT64_MAX,), (1,) * 1000, (65 * MIB,)):
        request = pb.MakeRoomRequest(shard_bytes=shards)
        code, message = status(lambda request=request: served.kv.MakeRoom(request))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith("shard_bytes: ")
        assert "\n" not in message
    with Client(served.daemon.address) as client, pytest.raises(InvalidRequest, match="at least 1"):
        client.make_room((-1,))
    assert served.stats().tiers[0].allocated_bytes == before
