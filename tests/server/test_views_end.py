"""No view of a slab outlives what it was for: else its memory could not be given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
from raw_calls import MIB, Raw, chain, content, status

from kvstore.proto import kvstore_pb2 as pb


def test_streams_that_are_refused_in_the_middle_leave_no_memory_in_use(
    raw: Callable[..., Raw],
) -> None:
    server = raw("--host-pool", "16MiB", "--no-save-host")
    space = server.open("s", (MIB,))

    def contradicts(name: str) -> Iterator[pb.PutRequest]:
        data = content(chain(name, 1), MIB)
        yield pb.PutRequest(header=pb.PutHeader(space=space, keys=chain(name, 2), deadline_ms=2000))
        yield pb.PutRequest(chunk=pb.Chunk(block=0, offset=0, data=data[:1000]))
        yield pb.PutRequest(chunk=pb.Chunk(block=0, offset=999, data=data[1000:]))

    for i in range(4):
        code, _ = status(lambda i=i: server.kv.Put(contradicts(f"p{i}"), timeout=30))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    keys = chain("kept", 4)
    assert server.put(space, keys, MIB) == 4
    for _ in range(4):
        request = pb.GetRequest(space=space, keys=keys, deadline_ms=2000)
        stream = server.kv.Get(request, timeout=30)
        next(stream)
        stream.cancel()
    server.close()
    assert server.daemon.stop() == 0
    log = server.daemon.log.read_text()
    assert "still in use" not in log, log
