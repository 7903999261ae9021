"""The synchronous client."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.address import default_address, parse_address
from kvstore.attach import Attachment, OperationTimes
from kvstore.client.space import Space
from kvstore.errors import InvalidRequest
from kvstore.flows import milliseconds
from kvstore.handle import SpaceHandle
from kvstore.link import Link
from kvstore.proto import kvstore_pb2 as pb
from kvstore.space import BlockShape, SpaceSpec
from kvstore.syncpoint import arm_from_environment
from kvstore.wire import PROTOCOL_VERSION, spec_to_message, tier_value

__all__ = ["Client", "client_name"]

# Copies under way when a client is closed are waited for so long.
_CLOSE_SECONDS: Final = 30.0


def client_name(name: str) -> str:
    """Return a client's name for the daemon's logs: `name`, or the program and its pid."""
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    return name or f"{program}:{os.getpid()}"


class Client:
    """A connection to one daemon. Every method may be called from any thread.

    Creating one does not wait for the daemon; the first call does. A forked child cannot use its
    parent's client (`ClientClosed`) and opens its own.

    Attributes:
        timeout_s: for calls that do not wait on purpose.
        link: the channel.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        timeout_s: float = 5.0,
        shards: Sequence[int] = (),
        map_memory: bool | None = None,
    ) -> None:
        """Prepare a client.

        Args:
            address: ``unix:///path`` or ``host:port``; None: the default daemon's.
            name: for the daemon's logs and statistics.
            timeout_s: for calls that do not wait on purpose.
            shards: shards that this process copies; empty: all.
            map_memory: copy to and from the pool directly where that is possible (True), or
                always stream (False); None: directly over a Unix socket, streamed over TCP, where
                the daemon may be another machine's or user's.

        Raises:
            InvalidRequest: the address is none.
        """
        arm_from_environment()
        self.timeout_s = timeout_s
        self.link = Link(parse_address(address) if address else default_address())
        if map_memory is None:
            map_memory = self.link.address.local
        self._attachment = Attachment(
            self.link,
            name=client_name(name),
            timeout_s=timeout_s,
            shards=shards,
            map_memory=map_memory,
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Wait for copies under way, then leave: leases and grants are given back. Idempotent."""
        self._attachment.close(_CLOSE_SECONDS)
        self.link.close()

    @property
    def attachment(self) -> Attachment:
        """This process's attachment.

        Attaching begins, in the background, when it is first asked for.
        """
        self.link.check()
        self._attachment.start()
        return self._attachment

    def hello_request(self) -> pb.HelloRequest:
        """Return the request of `hello`."""
        return pb.HelloRequest(protocol_version=PROTOCOL_VERSION, client=self._attachment.name)

    def hello(self) -> pb.HelloResponse:
        """Ask the daemon who it is."""
        answer: pb.HelloResponse = self.link.call("Hello", self.hello_request(), self.timeout_s)
        return answer

    def open_space(self, spec: SpaceSpec) -> Space:
        """Open a space in its current epoch; the daemon registers it if it is new."""
        request = pb.OpenSpaceRequest(spec=spec_to_message(spec))
        return Space(self, spec, self.link.call("OpenSpace", request, self.timeout_s))

    def make_room(self, shard_bytes: Sequence[int]) -> pb.MakeRoomResponse:
        """Have the daemon make its host pool's memory now, in the background.

        For whoever must prepare that memory before it is used. Nothing is evicted for it.

        Args:
            shard_bytes: of the blocks to come, as in `SpaceSpec`.

        Returns:
            `made_bytes` there are by now; more are on their way while `expected_bytes` is above.

        Raises:
            InvalidRequest: the host pool can hold no such block.
        """
        BlockShape.of(shard_bytes)
        request = pb.MakeRoomRequest(shard_bytes=shard_bytes)
        answer: pb.MakeRoomResponse = self.link.call("MakeRoom", request, self.timeout_s)
        return answer

    def report_usage(
        self,
        space: SpaceHandle,
        *,
        requests: int = 0,
        prompt_tokens: int = 0,
        reused_tokens_gpu: int = 0,
        reused_tokens_host: int = 0,
        reused_tokens_disk: int = 0,
        local_tokens: int = 0,
        load_failures: int = 0,
        loaded_bytes: int = 0,
        stored_bytes: int = 0,
    ) -> None:
        """Add to what the daemon counts; sent with the next heartbeat. Never blocks.

        `Space.get` and `Space.put` report by themselves.

        Args:
            space: whose blocks.
            requests: served.
            prompt_tokens: of these requests.
            reused_tokens_gpu: tokens loaded that the GPU tier held when asked.
            reused_tokens_host: tokens loaded that the host tier held when asked.
            reused_tokens_disk: tokens loaded that the disk tier held when asked.
            local_tokens: found in the engine's own prefix cache.
            load_failures: loads reported failed to the engine.
            loaded_bytes: copied out.
            stored_bytes: copied in.
        """
        self._attachment.usage.add(
            space.ref,
            requests=requests,
            prompt_tokens=prompt_tokens,
            reused_tokens_gpu=reused_tokens_gpu,
            reused_tokens_host=reused_tokens_host,
            reused_tokens_disk=reused_tokens_disk,
            local_tokens=local_tokens,
            load_failures=load_failures,
            loaded_bytes=loaded_bytes,
            stored_bytes=stored_bytes,
        )

    def report_time(self, operation: str, seconds: float) -> None:
        """Add to the times that the daemon's metrics show; sent with the next heartbeat.

        `Space.get`, `put` and `lookup` report by themselves.

        Args:
            operation: lookup, load or store.
            seconds: that it took.
        """
        self._attachment.times.add(operation, seconds)

    def times(self) -> dict[str, OperationTimes]:
        """Return how long this client's lookups, loads and stores took, since it was made.

        A load is a `get` that got something, a store a `put` that stored something.
        """
        return self._attachment.times.seen()

    def stats(self) -> pb.StatsResponse:
        """Return one consistent picture of the daemon."""
        answer: pb.StatsResponse = self.link.call("Stats", pb.StatsRequest(), self.timeout_s)
        return answer

    def watch_stats(self, interval_s: float = 1.0) -> Iterator[pb.StatsResponse]:
        """Return the same again and again, until the iteration is broken off."""
        request = pb.WatchStatsRequest(interval_ms=max(1, milliseconds(interval_s)))
        return self.link.stream("WatchStats", request, None)

    def explain_request(self, request_id: str) -> pb.ExplainResponse:
        """Ask the daemon what a recent acquire came to, and why.

        Args:
            request_id: as the acquire named it, or a lease id in decimal.

        Raises:
            InvalidRequest: it is none of the last 1,024 acquires.
        """
        request = pb.ExplainRequest(request_id=request_id)
        answer: pb.ExplainResponse = self.link.call("Explain", request, self.timeout_s)
        return answer

    def spaces(self) -> list[pb.SpaceInfo]:
        """Return the spaces that the daemon knows."""
        answer = self.link.call("ListSpaces", pb.ListSpacesRequest(), self.timeout_s)
        return list(answer.spaces)

    def pins(self, space: SpaceHandle | None = None, owner: str = "") -> list[pb.PinGroup]:
        """Return pins, summed up per space and owner.

        Args:
            space: only its pins.
            owner: only this one's.
        """
        request = pb.ListPinsRequest(space_id=b"" if space is None else space.ref.id, owner=owner)
        return list(self.link.call("ListPins", request, self.timeout_s).groups)

    def unpin_owner(self, owner: str) -> int:
        """Take away all pins of an owner, in every space; return from how many blocks."""
        if not owner:
            raise InvalidRequest("owner", "must be named")
        blocks: int = self.link.call("Unpin", pb.UnpinRequest(owner=owner), self.timeout_s).blocks
        return blocks

    def set_capacity(
        self, tier: str, capacity_bytes: int, timeout_s: float = 60.0
    ) -> pb.SetCapacityResponse:
        """Grow or shrink a tier while it serves, until the daemon restarts.

        Args:
            tier: ``host`` or ``disk``.
            capacity_bytes: what it may take.
            timeout_s: how long to wait for what has to leave; the daemon goes on by itself.

        Returns:
            `bytes`: what the tier keeps to by now, more than asked for until `done`.

        Raises:
            ConfigError: the machine cannot give that much; nothing was changed.
        """
        if not 0 < capacity_bytes < 1 << 63:
            raise InvalidRequest("capacity_bytes", f"{capacity_bytes} is no size")
        request = pb.SetCapacityRequest(
            tier=tier_value(tier),
            bytes=capacity_bytes,
            deadline_ms=max(1, milliseconds(timeout_s)),
        )
        answer: pb.SetCapacityResponse = self.link.call(
            "SetCapacity", request, timeout_s + self.timeout_s
        )
        return answer

    def flush(self, timeout_s: float = 60.0) -> pb.FlushResponse:
        """Make everything that was committed before durable on disk.

        Returns:
            `done` is False when the time was up first; `skipped_blocks` had no room.
        """
        request = pb.FlushRequest(deadline_ms=milliseconds(timeout_s))
        answer: pb.FlushResponse = self.link.call("Flush", request, timeout_s + self.timeout_s)
        return answer

    def verify(
        self, fraction: float = 1.0, bytes_per_second: int = 0
    ) -> Iterator[pb.VerifyResponse]:
        """Check blocks on disk against their digests; yields progress.

        Breaking off the iteration ends the check.

        Args:
            fraction: of the blocks, above 0 and at most 1, chosen at random.
            bytes_per_second: at most; 0: no limit.

        Raises:
            InvalidRequest: the fraction is none, or the daemon has no disk tier.
            Busy: a check is under way.
        """
        if not 0 < fraction <= 1:
            raise InvalidRequest("fraction", f"{fraction:g} is not above 0 and at most 1")
        request = pb.VerifyRequest(fraction=fraction, bytes_per_second=bytes_per_second)
        return self.link.stream("Verify", request, None)

    def drain(self, timeout_s: float = 60.0) -> pb.DrainResponse:
        """Have the daemon grant no more slots, wait for outstanding grants, and flush."""
        request = pb.DrainRequest(deadline_ms=milliseconds(timeout_s))
        answer: pb.DrainResponse = self.link.call("Drain", request, timeout_s + self.timeout_s)
        return answer

    def doctor(self) -> list[pb.DoctorFinding]:
        """Have the daemon check the machine it runs on."""
        answer = self.link.call("Doctor", pb.DoctorRequest(), 30.0)
        return list(answer.findings)
