"""The asynchronous client: the same flows, driven on an event loop.

Control and streams use grpc.aio, copies run on threads, and the attachment (with the calls that
start without waiting) is the synchronous client's own, on a background thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore import tracing
from kvstore.attach import Attachment, Lease, OperationTimes
from kvstore.client import Client, with_parent
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.flows import Asked, Evicted, Hit, SpaceFlows, milliseconds
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.link import ADMIN_CALLS, translate
from kvstore.process import keep_in_children
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc
from kvstore.rows import Blocks, Rows
from kvstore.space import BlockShape, SpaceSpec
from kvstore.steps import Await, Flow, Grow, Pause, Receive, Rpc, Send, Step, Work, flow_name
from kvstore.wire import channel_options, spec_to_message

__all__ = ["AsyncClient", "AsyncSpace", "AsyncTicket"]

T = TypeVar("T")


class AsyncTicket:
    """A prefetch that was asked for."""

    def __init__(self, space: AsyncSpace, asked: Asked) -> None:
        """Made by `AsyncSpace.prefetch`."""
        self._space = space
        self._asked = asked

    async def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the blocks are there; see `kvstore.client.Ticket.wait`."""
        if timeout_s is None:
            timeout_s = 60.0 if self._asked.deadline is None else self._asked.deadline.left
        return await self._space.run(self._space.flows.prefetched(self._asked, timeout_s))

    async def cancel(self) -> None:
        """Forget it; moves that nobody else waits for are dropped if they have not begun."""
        await self._space.run(self._space.flows.cancel(self._asked))


class AsyncSpace(SpaceHandle):
    """An open space, bound to one epoch; the methods are those of `kvstore.client.Space`.

    A call that is cancelled has stopped reading and writing the caller's buffers before
    `CancelledError` leaves it.
    """

    def __init__(self, client: AsyncClient, spec: SpaceSpec, opened: pb.OpenSpaceResponse) -> None:
        """Made by `AsyncClient.open_space`."""
        super().__init__(spec, opened)
        self._client = client
        self.flows = SpaceFlows(self, client.attachment, client.timeout_s)

    async def run(self, flow: Flow[T]) -> T:
        """Run one of this space's flows."""
        return await self._client.run(flow)

    async def put(
        self,
        keys: Keys | Iterable[bytes],
        blocks: Blocks,
        timeout_s: float = 5.0,
        parent: bytes | None = None,
    ) -> int:
        """Store blocks; see `kvstore.client.Space.put`."""
        run = with_parent(self.keys(keys), parent)
        rows = Rows.of("blocks", blocks, len(run), self.spec.block_bytes, write=False)
        return await self.run(self.flows.put(run, rows, timeout_s))

    async def lookup(self, keys: Keys | Iterable[bytes]) -> Hit:
        """Return how long a leading run is present, in which tiers, and why it ends."""
        return await self.run(self.flows.lookup(self.keys(keys)))

    @overload
    async def get(
        self, keys: Keys | Iterable[bytes], out: None = None, timeout_s: float | None = None
    ) -> NDArray[np.uint8]: ...
    @overload
    async def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8],
        timeout_s: float | None = None,
    ) -> int: ...
    async def get(
        self,
        keys: Keys | Iterable[bytes],
        out: NDArray[np.uint8] | None = None,
        timeout_s: float | None = None,
    ) -> int | NDArray[np.uint8]:
        """Read the longest leading run; see `kvstore.client.Space.get`."""
        run = self.keys(keys)
        target = out
        if target is None:
            target = np.empty((len(run), self.spec.block_bytes), np.uint8)
        rows = Rows.of("out", target, len(run), self.spec.block_bytes, write=True)
        limit = self._client.timeout_s if timeout_s is None else timeout_s
        blocks = await self.run(self.flows.get(run, rows, limit))
        return blocks if out is not None else target[:blocks]

    async def prefetch(
        self,
        keys: Keys | Iterable[bytes],
        tier: str = "host",
        deadline_s: float | None = 0.5,
        priority: int = 0,
    ) -> AsyncTicket:
        """Ask for a leading run to be moved up; see `kvstore.client.Space.prefetch`."""
        flow = self.flows.prefetch(self.keys(keys), tier, deadline_s, priority)
        return AsyncTicket(self, await self.run(flow))

    async def pin(
        self, keys: Keys | Iterable[bytes], ttl_s: float | None = None, owner: str = ""
    ) -> int:
        """Keep a leading run present; see `kvstore.client.Space.pin`."""
        return await self.run(self.flows.pin(self.keys(keys), ttl_s, owner))

    async def unpin(self, keys: Keys | Iterable[bytes] | None = None, owner: str = "") -> int:
        """Unpin keys, or the whole space; see `kvstore.client.Space.unpin`."""
        named = None if keys is None else self.keys(keys)
        return await self.run(self.flows.unpin(named, owner))

    async def set_quotas(self, **sizes: float | None) -> pb.SetLimitsResponse:
        """Limit what the space takes in tiers; see `kvstore.client.Space.set_quotas`."""
        return await self.run(self.flows.set_quotas(sizes))

    async def set_ttl(self, ttl_s: float | None) -> pb.SetLimitsResponse:
        """Limit how long unused blocks stay; see `kvstore.client.Space.set_ttl`."""
        return await self.run(self.flows.set_ttl(ttl_s))

    async def evict(
        self, keys: Keys | Iterable[bytes] | None = None, tier: str | None = None
    ) -> Evicted:
        """Remove copies of keys, or of the whole space, from one tier or from all."""
        return await self.run(self.flows.evict(None if keys is None else self.keys(keys), tier))

    async def bump_epoch(self) -> AsyncSpace:
        """End the epoch and return a handle for the next; see `kvstore.client.Space.bump_epoch`."""
        await self.run(self.flows.bump_epoch())
        return await self._client.open_space(self.spec)

    async def explain(self, keys: Keys | Iterable[bytes]) -> pb.ExplainResponse:
        """Ask the daemon why a leading run ends; see `kvstore.client.Space.explain`."""
        return await self.run(self.flows.explain(self.keys(keys)))


class AsyncClient:
    """A connection to one daemon for one event loop; the methods are those of `kvstore.Client`.

    Attributes:
        timeout_s: for calls that do not wait on purpose.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        timeout_s: float = 5.0,
        map_memory: bool | None = None,
    ) -> None:
        """Prepare a client; see `kvstore.Client`.

        Raises:
            InvalidRequest: the address is none.
        """
        self.timeout_s = timeout_s
        self._sync = Client(address, name=name, timeout_s=timeout_s, map_memory=map_memory)
        self._channel: grpc.aio.Channel | None = None
        self._kv: Any = None
        self._admin: Any = None

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Wait for copies under way, then leave. Idempotent."""
        await asyncio.to_thread(self._sync.close)
        if self._channel is not None:
            await self._channel.close(None)

    @property
    def attachment(self) -> Attachment:
        """This process's attachment; see `kvstore.Client.attachment`."""
        return self._sync.attachment

    def _method(self, name: str) -> Any:
        link = self._sync.link
        link.check()
        if self._channel is None:
            # Made here, not in __init__: a grpc.aio channel belongs to the running loop.
            self._channel = grpc.aio.insecure_channel(
                link.address.target, options=channel_options(local=link.address.local)
            )
            keep_in_children(self._channel)
            kv = rpc.KVStoreStub(self._channel)  # type: ignore[no-untyped-call]
            admin = rpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
            self._kv, self._admin = kv, admin
        return getattr(self._admin if name in ADMIN_CALLS else self._kv, name)

    async def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        try:
            return await self._method(name)(request, timeout=timeout_s, metadata=tracing.metadata())
        except grpc.RpcError as error:
            raise translate(error, self._sync.link.address) from error

    async def _stream(self, name: str, request: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        call = self._method(name)(request, timeout=timeout_s, metadata=tracing.metadata())
        try:
            async for part in call:
                yield part
        except grpc.RpcError as error:
            raise translate(error, self._sync.link.address) from error
        finally:
            call.cancel()

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end.

        Raises:
            KVStoreError: whatever the flow lets through.
        """
        with tracing.span(f"kvstore.{flow_name(flow)}", kind="client"):
            try:
                step = next(flow)
                while True:
                    try:
                        result = await self._perform(step)
                    except BaseException as error:  # noqa: BLE001 - the flow cleans up and decides
                        step = flow.throw(error)
                    else:
                        step = flow.send(result)
            except StopIteration as end:
                value: T = end.value
                return value

    async def _perform(self, step: Step) -> Any:
        match step:
            case Rpc(name, request, timeout_s):
                return await self._call(name, request, timeout_s)
            case Await(future, timeout_s):
                return await _settled(future, timeout_s)
            case Grow(lease, beyond, timeout_s):
                return await _grown(lease, beyond, timeout_s)
            case Pause(seconds):
                return await asyncio.sleep(seconds)
            case Work(work):
                return await _worked(asyncio.ensure_future(asyncio.to_thread(work)))
            case Send(requests, timeout_s):
                return await self._call("Put", requests, timeout_s)
            case Receive(request, sink, timeout_s):
                async for part in self._stream("Get", request, timeout_s):
                    sink(part)
                return None

    async def hello(self) -> pb.HelloResponse:
        """Ask the daemon who it is."""
        answer: pb.HelloResponse = await self._call(
            "Hello", self._sync.hello_request(), self.timeout_s
        )
        return answer

    async def open_space(self, spec: SpaceSpec) -> AsyncSpace:
        """Open a space in its current epoch; the daemon registers it if it is new."""
        request = pb.OpenSpaceRequest(spec=spec_to_message(spec))
        return AsyncSpace(self, spec, await self._call("OpenSpace", request, self.timeout_s))

    async def make_room(self, shard_bytes: Sequence[int]) -> pb.MakeRoomResponse:
        """Have the daemon make its host pool's memory; see `kvstore.Client.make_room`."""
        BlockShape.of(shard_bytes)
        request = pb.MakeRoomRequest(shard_bytes=shard_bytes)
        answer: pb.MakeRoomResponse = await self._call("MakeRoom", request, self.timeout_s)
        return answer

    def report_usage(self, space: SpaceHandle, **amounts: int) -> None:
        """Add to what the daemon counts; see `kvstore.Client.report_usage`."""
        self._sync.report_usage(space, **amounts)

    def times(self) -> dict[str, OperationTimes]:
        """Return how long this client's operations took; see `kvstore.Client.times`."""
        return self._sync.times()

    async def stats(self) -> pb.StatsResponse:
        """Return one consistent picture of the daemon."""
        answer: pb.StatsResponse = await self._call("Stats", pb.StatsRequest(), self.timeout_s)
        return answer

    async def explain_request(self, request_id: str) -> pb.ExplainResponse:
        """Ask the daemon what a recent acquire came to; see `kvstore.Client.explain_request`."""
        request = pb.ExplainRequest(request_id=request_id)
        answer: pb.ExplainResponse = await self._call("Explain", request, self.timeout_s)
        return answer

    async def spaces(self) -> list[pb.SpaceInfo]:
        """Return the spaces that the daemon knows."""
        answer = await self._call("ListSpaces", pb.ListSpacesRequest(), self.timeout_s)
        return list(answer.spaces)

    async def pins(self, space: SpaceHandle | None = None, owner: str = "") -> list[pb.PinGroup]:
        """Return pins per space and owner; see `kvstore.Client.pins`."""
        request = pb.ListPinsRequest(space_id=b"" if space is None else space.ref.id, owner=owner)
        return list((await self._call("ListPins", request, self.timeout_s)).groups)

    async def unpin_owner(self, owner: str) -> int:
        """Take away all pins of an owner; see `kvstore.Client.unpin_owner`."""
        if not owner:
            raise InvalidRequest("owner", "must be named")
        answer = await self._call("Unpin", pb.UnpinRequest(owner=owner), self.timeout_s)
        blocks: int = answer.blocks
        return blocks

    async def flush(self, timeout_s: float = 60.0) -> pb.FlushResponse:
        """Make everything that was committed before durable; see `kvstore.Client.flush`."""
        request = pb.FlushRequest(deadline_ms=milliseconds(timeout_s))
        answer: pb.FlushResponse = await self._call("Flush", request, timeout_s + self.timeout_s)
        return answer

    async def drain(self, timeout_s: float = 60.0) -> pb.DrainResponse:
        """Have the daemon grant no more slots; see `kvstore.Client.drain`."""
        request = pb.DrainRequest(deadline_ms=milliseconds(timeout_s))
        answer: pb.DrainResponse = await self._call("Drain", request, timeout_s + self.timeout_s)
        return answer


async def _settled(future: Future[Any], timeout_s: float) -> Any:
    # The flow takes the answer later when this wait is cancelled or too long, so the future itself
    # must not be: it never is, because it is running from the start.
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"the daemon did not answer in {timeout_s:.3g} s") from None


async def _grown(lease: Lease, beyond: int, timeout_s: float) -> int:
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def tell(_lease: Lease) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    lease.on_change(tell)
    try:
        async with asyncio.timeout(timeout_s):
            while lease.growing and lease.blocks <= beyond:
                await changed.wait()
                changed.clear()
    except TimeoutError:
        pass
    finally:
        lease.forget(tell)
    return lease.blocks


async def _worked(work: asyncio.Future[T]) -> T:
    """Wait for a copy on a thread, also when cancelled: it uses the caller's memory until then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - raised again by result()
            break
    if cancelled is not None:
        raise cancelled
    return work.result()
