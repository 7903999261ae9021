"""What a flow asks its driver to do: the few things that differ between sync and async.

A flow is a generator that yields steps and is sent their results; an error of a step is thrown
into it. The synchronous driver is here; the asynchronous one is in `kvstore.aio`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore import tracing
from kvstore.attach import Lease
from kvstore.errors import DeadlineExceeded
from kvstore.link import Link
from kvstore.proto import kvstore_pb2 as pb

__all__ = [
    "Await",
    "Flow",
    "Grow",
    "Pause",
    "Receive",
    "Rpc",
    "Send",
    "Step",
    "Work",
    "drive",
    "flow_name",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rpc:
    """Make a unary call; its answer is the result."""

    name: str
    request: Any
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for a future; its result is the result. DeadlineExceeded when it takes longer."""

    future: Future[Any]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Grow:
    """Wait until a lease has more than `beyond` blocks, or grows no more, or time is up."""

    lease: Lease
    beyond: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Run a function that blocks without the GIL; what it touches stays alive until it returns."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Send:
    """Make a Put call with these messages; its answer is the result."""

    requests: Iterator[pb.PutRequest]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Make a Get call and hand each part to `sink`."""

    request: pb.GetRequest
    sink: Callable[[pb.GetResponse], None]
    timeout_s: float


Step = Rpc | Await | Grow | Pause | Work | Send | Receive
Flow = Generator[Step, Any, T]


def flow_name(flow: Flow[Any]) -> str:
    """Return the name of the function that made a flow."""
    return str(getattr(flow, "__name__", "flow"))


def drive(link: Link, flow: Flow[T]) -> T:
    """Run a flow to its end on the calling thread, within a span of its name.

    Raises:
        KVStoreError: whatever the flow lets through.
    """
    with tracing.span(f"kvstore.{flow_name(flow)}", kind="client"):
        try:
            step = next(flow)
            while True:
                try:
                    result = _perform(link, step)
                except BaseException as error:  # noqa: BLE001 - the flow cleans up and decides
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            value: T = end.value
            return value


def _perform(link: Link, step: Step) -> Any:
    match step:
        case Rpc(name, request, timeout_s):
            return link.call(name, request, timeout_s)
        case Await(future, timeout_s):
            try:
                return future.result(timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(f"the daemon did not answer in {timeout_s:.3g} s") from None
        case Grow(lease, beyond, timeout_s):
            return lease.wait(timeout_s, beyond)
        case Pause(seconds):
            return time.sleep(seconds)
        case Work(run):
            return run()
        case Send(requests, timeout_s):
            return link.call("Put", requests, timeout_s)
        case Receive(request, sink, timeout_s):
            for part in link.stream("Get", request, timeout_s):
                sink(part)
            return None
