"""A client that does what it likes: the generated stubs, and nothing of ours in between."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from kvstore.address import parse_address
from kvstore.locks import lock_byte
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc

MIB = 1 << 20
UINT64_MAX = (1 << 64) - 1


def chain(name: str, blocks: int) -> bytes:
    """Return the packed keys of a chain."""
    return b"".join(hashlib.md5(f"{name}/{i}".encode()).digest() for i in range(blocks))


def content(key: bytes, size: int, salt: bytes = b"") -> bytes:
    """Return the bytes that a block must have."""
    seed = hashlib.sha256(key + salt).digest()
    return (seed * (size // len(seed) + 1))[:size]


def spec(model: str = "m", shards: Sequence[int] = (65536,)) -> pb.SpaceSpec:
    """Return the spec of a space."""
    return pb.SpaceSpec(model=model, dtype="bf16", block_tokens=16, shard_bytes=shards)


def put_messages(
    space: pb.SpaceRef, keys: bytes, size: int, *, salt: bytes = b"", deadline_ms: int = 5000
) -> Iterator[pb.PutRequest]:
    """Yield a whole Put stream."""
    yield pb.PutRequest(header=pb.PutHeader(space=space, keys=keys, deadline_ms=deadline_ms))
    for i in range(len(keys) // 16):
        data = content(keys[16 * i : 16 * i + 16], size, salt)
        for at in range(0, size, MIB):
            yield pb.PutRequest(chunk=pb.Chunk(block=i, offset=at, data=data[at : at + MIB]))


class Raw:
    """One connection to a daemon."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            # What is not read is not fetched either, so that a reader that stops is felt.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 65536),
        ]
        target = f"unix:{parse_address(daemon.address).path}"
        self.channel: Any = grpc.insecure_channel(target, options=options)
        self.kv: Any = rpc.KVStoreStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin: Any = rpc.AdminStub(self.channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Hang up."""
        self.channel.close()

    def again(self) -> Raw:
        """Return another connection to the same daemon."""
        return Raw(self.daemon)

    def open(self, model: str = "m", shards: Sequence[int] = (65536,)) -> pb.SpaceRef:
        """Open a space."""
        answer = self.kv.OpenSpace(pb.OpenSpaceRequest(spec=spec(model, shards)), timeout=10)
        space: pb.SpaceRef = answer.space
        return space

    def put(self, space: pb.SpaceRef, keys: bytes, size: int, **options: Any) -> int:
        """Store a chain from its start."""
        answer = self.kv.Put(put_messages(space, keys, size, **options), timeout=30)
        return int(answer.blocks)

    def stats(self) -> pb.StatsResponse:
        """Return the daemon's picture of itself."""
        answer: pb.StatsResponse = self.admin.Stats(pb.StatsRequest(), timeout=10)
        return answer

    def send(self, method: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
        """Send bytes that need be no messages; return the status."""
        service, name = method.split(".")
        path = f"/kvstore.v1.{service}/{name}"
        descriptor = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        # The stream's answers are not of interest; a call's request is its only message.
        one = messages[0]
        if descriptor.client_streaming and descriptor.server_streaming:
            return status(
                lambda: list(self.channel.stream_stream(path)(iter(messages), timeout=10))
            )
        if descriptor.client_streaming:
            return status(lambda: self.channel.stream_unary(path)(iter(messages), timeout=10))
        if descriptor.server_streaming:
            return status(lambda: next(self.channel.unary_stream(path)(one, timeout=10)))
        return status(lambda: self.channel.unary_unary(path)(one, timeout=10))


def status(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Return the status and the message with which a call ends."""
    try:
        call()
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details()
    return grpc.StatusCode.OK, ""


class RawAttachment:
    """An attachment whose stream says what it is told to say."""

    def __init__(self, raw: Raw, **fields: Any) -> None:
        self._up: queue.Queue[pb.AttachUp | None] = queue.Queue()
        self.say(open=pb.AttachOpen(client="raw", pid=os.getpid(), map_memory=True, **fields))
        self.events = raw.kv.Attach(iter(self._up.get, None))
        attached = next(self.events).attached
        self.id = attached.attachment_id
        self._lock = os.open(attached.control_path, os.O_RDWR | os.O_CLOEXEC)
        assert lock_byte(self._lock, attached.lock_offset)
        self.say(locked=pb.AttachLocked())
        self.wait_for("active")

    def say(self, **event: Any) -> None:
        """Send one message."""
        self._up.put(pb.AttachUp(**event))

    def wait_for(self, event: str) -> None:
        """Read events until one of a kind has come."""
        for message in self.events:
            if message.HasField(event):
                return
        raise AssertionError(f"the stream ended without {event}")

    def hang_up(self) -> None:
        """End the stream without a goodbye; the lock stays."""
        self.events.cancel()
        self._up.put(None)

    def die(self) -> None:
        """Drop the lock, as the kernel does for a dead process."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
