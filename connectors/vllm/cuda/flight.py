"""One copy of the GPU copier, from its being asked for to its end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvstore.attach.mapped import DEVICE
from kvstore.connectors.vllm.cuda.pipe import Pipe
from kvstore.connectors.vllm.cuda.routes import Job
from kvstore.connectors.vllm.store import Held

__all__ = ["Flight", "submit"]


@dataclass(slots=True)
class Flight:
    """One copy.

    Attributes:
        begun: recorded on the compute stream when the copy was asked for.
        read: a store has read its blocks.
        done: the bytes are in place.
        length: bytes, where somebody counts them.
        spins: who waits for `done` does not sleep: it takes less than waking up does.
        failed: it was not submitted, or not whole.
        given_up: its blocks get new owners, and it has not been submitted: it is not to be.
        spoiled: its blocks may have been written before it had read them.
        begun_by_cpu: the thread that submits what takes the detour has begun with it.
        before: earlier stores that read some of its blocks too.
        submitted: set when `read` and `done` stand for this copy.
    """

    held: Held
    begun: int
    read: int
    done: int
    length: int = 0
    spins: bool = False
    failed: bool = False
    given_up: bool = False
    spoiled: bool = False
    begun_by_cpu: bool = False
    before: set[int] = field(default_factory=set)
    submitted: threading.Event = field(default_factory=threading.Event)


def submit(pipe: Pipe, flight: Flight, job: Job, *, to_cache: bool) -> None:
    """Submit all of a copy to a pipe of its direction.

    Raises:
        ValueError: it would write to the daemon's device memory.
        GivenUp: it was given up before the last chunk.
        CudaError: the GPU does not take it; some may be under way.
    """
    if job.most == DEVICE and not to_cache:
        raise ValueError("slots on the GPU are for reading only")
    pipe.begin(flight.begun, lambda: flight.given_up)
    if job.least == DEVICE:
        pipe.device(job)
    elif job.most == DEVICE:
        here = job.reach == DEVICE
        pipe.device(job.part(here))
        pipe.host(job.part(~here))
    else:
        pipe.host(job)
    if to_cache:
        pipe.end(flight.done)
    else:
        pipe.end(flight.done, flight.read)
    flight.submitted.set()
