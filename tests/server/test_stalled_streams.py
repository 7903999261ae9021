"""Put and Get streams whose clients stop, cancel, vanish, or meet an epoch bump."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from raw_calls import MIB, Raw, chain, content, put_messages, status

from kvstore.proto import kvstore_pb2 as pb

TTL = ("--lease-ttl", "1s", "--heartbeat", "0.3s")


def _get(raw: Raw, space: pb.SpaceRef, keys: bytes) -> Iterator[pb.GetResponse]:
    request = pb.GetRequest(space=space, keys=keys, deadline_ms=2000)
    stream: Iterator[pb.GetResponse] = raw.kv.Get(request, timeout=60)
    return stream


def _read(stream: Iterator[pb.GetResponse], keys: bytes, size: int) -> int:
    """Check what a Get delivers; return how many blocks count."""
    blocks: dict[int, bytearray] = {}
    for message in stream:
        if message.HasField("end"):
            for i in range(message.end.blocks):
                assert blocks[i] == content(keys[16 * i : 16 * i + 16], size)
            return message.end.blocks
        blocks.setdefault(message.chunk.block, bytearray()).extend(message.chunk.data)
    raise AssertionError("no end")


def test_putters_that_stop_lose_their_slots_and_nobody_else_waits(
    raw: Callable[..., Raw], until: Callable[..., None]
) -> None:
    server = raw("--host-pool", "16MiB", *TTL)
    space = server.open("s", (MIB,))
    go_on = threading.Event()

    def slow(name: str) -> Iterator[pb.PutRequest]:
        whole = content(chain(name, 1), MIB)
        yield pb.PutRequest(header=pb.PutHeader(space=space, keys=chain(name, 2), deadline_ms=2000))
        yield pb.PutRequest(chunk=pb.Chunk(block=0, offset=0, data=whole[:1000]))
        go_on.wait(30)
        yield pb.PutRequest(chunk=pb.Chunk(block=0, offset=1000, data=whole[1000:]))
        yield pb.PutRequest(chunk=pb.Chunk(block=1, offset=0, data=whole))

    # Each holds a slot; together all of them.
    puts = [server.kv.Put.future(slow(f"slow{i}"), timeout=60) for i in range(12)]
    until(lambda: server.stats().granted_slots == 12)
    until(lambda: server.stats().granted_slots == 0)
    keys = chain("quick", 10)
    assert server.put(space, keys, MIB) == 10
    assert _read(_get(server, space, keys), keys, MIB) == 10
    # Whoever goes on in the end is told that nothing of it is there.
    go_on.set()
    assert [put.result().blocks for put in puts] == [0] * 12
    assert server.stats().counters["streams_given_up"] == 12


def test_readers_that_stop_hold_nothing_for_ever_and_get_no_foreign_byte(
    raw: Callable[..., Raw], until: Callable[..., None]
) -> None:
    server = raw("--host-pool", "16MiB", *TTL)
    space = server.open("s", (MIB,))
    chains = [chain(f"c{i}", 4) for i in range(3)]
    for keys in chains:
        assert server.put(space, keys, MIB) == 4
    connections = [server.again() for _ in range(6)]
    readers = []
    for i, connection in enumerate(connections):
        keys = chains[i % 3]
        stream = _get(connection, space, keys)
        first = next(stream)
        assert first.chunk.data == content(keys[:16], MIB)
        readers.append((stream, keys, first))
    until(lambda: server.stats().counters["streams_given_up"] > 0)
    # Everything else is pushed out, also from under the readers that were given up.
    for i in range(3):
        new = chain(f"new{i}", 4)
        assert server.put(space, new, MIB) == 4
    for stream, keys, first in readers:

        def from_first(
            first: pb.GetResponse = first, stream: Iterator[pb.GetResponse] = stream
        ) -> Iterator[pb.GetResponse]:
            yield first
            yield from stream

        assert _read(from_first(), keys, MIB) <= 4
    for connection in connections:
        connection.close()


def test_gets_that_are_cancelled_midway_let_go_and_leave_no_traceback(
    raw: Callable[..., Raw], until: Callable[..., None]
) -> None:
    server = raw("--host-pool", "16MiB")
    space = server.open("s", (MIB,))
    keys = chain("c", 8)
    assert server.put(space, keys, MIB) == 8
    for i in range(40):
        connection = server.again()
        stream = _get(connection, space, keys)
        for _ in range(i % 5):
            next(stream)
        if i % 2:
            connection.close()
        else:
            stream.cancel()  # type: ignore[attr-defined]
            connection.close()
    # All slots can be taken again: none is held.
    full = chain("full", 12)
    until(lambda: server.put(space, full, MIB) == 12)
    assert _read(_get(server, space, full), full, MIB) == 12
    assert "Traceback" not in server.daemon.log.read_text()


def test_a_get_that_meets_an_epoch_bump_never_serves_the_next_epoch(
    raw: Callable[..., Raw],
) -> None:
    # A window of one block: the next one is looked up after the bump.
    server = raw("--host-pool", "16MiB")
    size = 4 * MIB
    old = server.open("s", (size,))
    keys = chain("c", 3)
    assert server.put(old, keys, size) == 3
    stream = _get(server, old, keys)
    seen = [next(stream)]
    new = server.kv.BumpEpoch(pb.BumpEpochRequest(space=old)).space
    assert new.epoch == old.epoch + 1
    served = threading.Thread(
        target=lambda: server.kv.Put(
            put_messages(new, keys, size, salt=b"other weights"), timeout=30
        )
    )
    served.start()
    served.join(2.0)
    code, _ = status(lambda: seen.extend(stream))
    served.join()
    for message in seen:
        if message.HasField("chunk"):
            at, block = message.chunk.offset, message.chunk.block
            whole = content(keys[16 * block : 16 * block + 16], size)
            assert message.chunk.data == whole[at : at + len(message.chunk.data)]
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert status(lambda: server.put(old, keys, size))[0] is code
    # The new epoch's own readers get its own bytes.
    got = b"".join(m.chunk.data for m in _get(server, new, keys) if m.HasField("chunk"))
    assert got[:size] == content(keys[:16], size, b"other weights")


@pytest.mark.parametrize("bumps", [5])
def test_bumps_during_puts_store_nothing_under_the_old_epoch(
    raw: Callable[..., Raw], bumps: int
) -> None:
    server = raw()
    keys = chain("c", 64)
    space = server.open()
    for _ in range(bumps):
        put = server.kv.Put.future(put_messages(space, keys, 65536), timeout=30)
        bumped = server.kv.BumpEpoch(pb.BumpEpochRequest(space=space)).space
        code, _ = status(put.result)
        assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OK)
        looked = server.kv.Lookup(pb.LookupRequest(space=bumped, keys=keys))
        assert looked.blocks == 0
        space = bumped
    assert server.stats().granted_slots == 0
    assert server.put(space, keys, 65536) == 64


def test_clients_that_leave_while_they_are_refused_leave_no_traceback(
    raw: Callable[..., Raw], until: Callable[..., None]
) -> None:
    server = raw()
    space = server.open()
    first = pb.AttachUp(open=pb.AttachOpen(map_memory=True))
    for i in range(60):
        connection = server.again()
        kv = connection.kv
        calls = [
            kv.Attach(iter([pb.AttachUp()])),
            kv.Attach(iter([first, pb.AttachUp(locked=pb.AttachLocked())])),
            kv.Put.future(iter([pb.PutRequest()])),
            kv.Get(pb.GetRequest(space=space, keys=b"?")),
            kv.Acquire.future(pb.AcquireRequest(space=space, keys=b"?")),
        ]
        # Some are cancelled before, some after the daemon has begun to answer.
        threading.Event().wait(0.0005 * (i % 10))
        for call in calls:
            call.cancel()
        connection.close()
    until(lambda: not server.stats().clients)
    log = server.daemon.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
