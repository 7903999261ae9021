"""The synchronous client."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, overload

import numpy as np
from numpy.typing import NDArray

from kvstore.address import default_address, parse_address
from kvstore.attach import Attachment, Grant, Lease
from kvstore.errors import InvalidRequest
from kvstore.flows import Asked, Evicted, Hit, SpaceFlows, milliseconds
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.link import Link
from kvstore.proto import kvstore_pb2 as pb
from kvstore.rows import Blocks, Rows
from kvstore.space import SpaceSpec
from kvstore.steps import drive
from kvstore.syncpoint import arm_from_environment
from kvstore.wire import PROTOCOL_VERSION, spec_to_message, tier_value

__all__ = ["Client", "Space", "Ticket", "client_name", "with_parent"]

# Copies under way when a client is closed are waited for so long.
_CLOSE_SECONDS: Final = 30.0


def client_name(name: str) -> str:
    """Return a client's name for the daemon's logs: `name`, or the program and its pid."""
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    return name or f"{program}:{os.getpid()}"


def with_parent(keys: Keys, parent: bytes | None) -> Keys:
    """Return keys that name `parent` as the key before the first one.

    Raises:
        InvalidRequest: the keys know another parent, or its length is wrong.
    """
    if parent is None:
        return keys
    if keys.parent not in (None, parent):
        raise InvalidRequest("parent", "the keys remember another one")
    return Keys(keys.packed, keys.key_bytes, bytes(parent))


class Ticket:
    """A prefetch that was asked for."""

    def __init__(self, space: Space, asked: Asked) -> None:
        """Made by `Space.prefetch`."""
        self._space = space
        self._asked = asked

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the blocks are there or nothing more is under way.

        Args:
            timeout_s: at most so long; None: until the prefetch's own deadline (a minute, when it
                has none).

        Returns:
            The leading run that is in the tier, or in a faster one, by then.
        """
        if timeout_s is None:
            timeout_s = 60.0 if self._asked.deadline is None else self._asked.deadline.left
        flow = self._space.flows.prefetched(self._asked, timeout_s)
        blocks: int = self._space._run(flow)
        return blocks

    def cancel(self) -> None:
        """Forget it; moves that nobody else waits for are dropped if they have not begun."""
        self._space._run(self._space.flows.cancel(self._asked))


class Space(SpaceHandle):
    """An open space, bound to one epoch. Every method may be called from any thread.

    Any call may raise `StaleEpoch` (the epoch is over, this handle never serves again),
    `ServerUnavailable`, `DeadlineExceeded` or `ClientClosed`.
    """

    def __init__(self, client: Client, spec: SpaceSpec, opened: pb.OpenSpaceResponse) -> None:
        """Made by `Client.open_space`."""
        super().__init__(spec, opened)
        self._client = client
        self.flows = SpaceFlows(self, client.attachment, client.timeout_s)

    def _run(self, flow: Any) -> Any:
        return drive(self._client.link, flow)

    def put(
        self,
        keys: Keys | Iterable[bytes],
        blocks: Blocks,
        timeout_s: float = 5.0,
        parent: bytes | None = None,
    ) -> int:
        """Store blocks, skipping those that are present.

        Args:
            keys: n keys in chain order.
            blocks: their bytes: uint8, shape (n, block_bytes), rows contiguous; or n bytes
                objects. A block's bytes are its shards, one after the other.
            timeout_s: how long to wait for room.
            parent: the key before the first one, for the continuation of a chain; slices of
                `Keys` remember it.

        Returns:
            The leading run of `keys` present afterwards: fewer than n when there is no room, or
            when the parent is not present.

        Raises:
            InvalidRequest: an argument does not fit; nothing was stored.
        """
        run = with_parent(self.keys(keys), parent)
        rows = Rows.of("blocks", blocks, len(run), self.spec.block_bytes, write=False)
        stored: int = self._run(self.flows.put(run, rows, timeout_s))
        return stored

    def lookup(self, keys: Keys | Iterable[bytes]) -> Hit:
        """Return how long a leading run is present, in which tiers, and why it ends.

        Touches nothing: not even the order of eviction.
        """
        hit: Hit = self._run(self.flows.lookup(self.keys(keys)))
        return hit

    @overload
    def get(
        self, keys: Keys | Iterable[bytes], out: None = None, timeout_s: float | None = None
    ) -> NDArray[np.uint8]: ...
    @overload
    def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8],
        timeout_s: float | None = None,
    ) -> int: ...
    def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8] | None = None,
        timeout_s: float | None = None,
    ) -> int | NDArray[np.uint8]:
        """Read the longest leading run whose blocks were there throughout.

        Args:
            keys: n keys in chain order.
            out: uint8, shape (at least n, block_bytes), rows contiguous. Rows after the run may
                have been written to.
            timeout_s: how long to wait for blocks on slower tiers; None: the client's.

        Returns:
            The length of the run; without `out` the bytes of the run, shape (run, block_bytes).

        Raises:
            InvalidRequest: an argument does not fit.
        """
        run = self.keys(keys)
        target = out
        if target is None:
            target = np.empty((len(run), self.spec.block_bytes), np.uint8)
        rows = Rows.of("out", target, len(run), self.spec.block_bytes, write=True)
        limit = self._client.timeout_s if timeout_s is None else timeout_s
        blocks: int = self._run(self.flows.get(run, rows, limit))
        return blocks if out is not None else target[:blocks]

    def prefetch(
        self,
        keys: Keys | Iterable[bytes],
        tier: str = "host",
        deadline_s: float | None = 0.5,
        priority: int = 0,
    ) -> Ticket:
        """Ask for a leading run to be moved up to a tier. Does not wait for it.

        Args:
            keys: in chain order.
            tier: ``host`` or ``gpu``.
            deadline_s: after which it is dropped; None: never.
            priority: higher first.
        """
        flow = self.flows.prefetch(self.keys(keys), tier, deadline_s, priority)
        return Ticket(self, self._run(flow))

    def pin(self, keys: Keys | Iterable[bytes], ttl_s: float | None = None) -> int:
        """Keep a leading run present for `ttl_s` seconds, or until unpinned; return its length."""
        blocks: int = self._run(self.flows.pin(self.keys(keys), ttl_s))
        return blocks

    def unpin(self, keys: Keys | Iterable[bytes] | None = None) -> int:
        """Unpin keys, or the whole space; return how many blocks were unpinned."""
        named = None if keys is None else self.keys(keys)
        blocks: int = self._run(self.flows.unpin(named))
        return blocks

    def evict(self, keys: Keys | Iterable[bytes] | None = None, tier: str | None = None) -> Evicted:
        """Remove copies of keys, or of the whole space, from one tier or from all."""
        named = None if keys is None else self.keys(keys)
        evicted: Evicted = self._run(self.flows.evict(named, tier))
        return evicted

    def bump_epoch(self) -> Space:
        """Make every block of the space unreachable, for ever, because its weights changed.

        Returns:
            A handle for the next epoch; this one, and all others, are stale.
        """
        self._run(self.flows.bump_epoch())
        return self._client.open_space(self.spec)

    def explain(self, keys: Keys | Iterable[bytes]) -> pb.ExplainResponse:
        """Ask the daemon why a leading run ends where it ends; the first 32,768 keys are looked at."""
        answer: pb.ExplainResponse = self._run(self.flows.explain(self.keys(keys)))
        return answer

    def acquire(
        self,
        keys: Keys | Iterable[bytes],
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
        priority: int = 0,
        request_id: str = "",
    ) -> Future[Lease]:
        """Ask for a lease without waiting; see `Attachment.acquire`."""
        return self._client.attachment.acquire(
            self,
            self.keys(keys),
            deadline_s=deadline_s,
            prefill_tokens_per_second=prefill_tokens_per_second,
            priority=priority,
            request_id=request_id,
        )

    def reserve(
        self,
        count: int,
        *,
        writers: Sequence[int] = (),
        deadline_s: float = 0.0,
        protect: Keys | Sequence[bytes] | None = None,
    ) -> Future[Grant]:
        """Ask for empty slots without waiting; see `Attachment.reserve`."""
        return self._client.attachment.reserve(
            self, count, writers=writers, deadline_s=deadline_s, protect=protect
        )


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
