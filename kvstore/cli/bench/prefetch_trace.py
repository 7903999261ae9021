"""A trace's requests, sooner one after the other than they came, against a disk of known speed.

Blocks are small and stand for the trace's: what is scaled is time. A first daemon, whose disk is as
fast as it is, stores every block of the trace; a second one, with a throttled disk and little memory,
is asked at each request's time for what earlier requests of the trace have had. The first half of the
requests is history: a trace that begins finds nothing. The requests compute
what is not loaded at a speed that the daemon is told, so each one's time to first token is known: the
wait, and the computing of the rest.

The oracle knows when blocks came, and when those would have come that were not waited for: the disk
does one thing after the other at a known speed, and what it had to do first is known from where the
request would have stood in the daemon's line, of which there is a model here. Who came later is not
held against what might have been, so the oracle is sooner rather than too late.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from kvstore.cli.bench.cold_disk import WAIT_S, ColdDisk
from kvstore.cli.bench.figure import Figure, most, times
from kvstore.cli.child import ChildError
from kvstore.client import Space
from kvstore.errors import InvalidRequest
from kvstore.keys import Keys
from kvstore.replay import open_trace
from kvstore.units import KIB, MIB

__all__ = ["Question", "measure", "regret"]

_BLOCK: Final = 16 * KIB
# Times are those of the trace divided by this.
_SPEEDUP: Final = 2.0
# What an engine computes in a second of the trace.
_PREFILL_TOKENS_PER_S: Final = 10_000.0
# Seconds to read a block, over seconds to compute it.
_LOADS: Final = (0.4, 0.6, 0.8)
_HOST_BYTES: Final = 64 * MIB
_DEADLINE_S: Final = 60.0
_MOST_REGRET_PERCENT: Final = 5.0
# The daemon has so much of a long job under way, which a shorter one waits for, and so many blocks at
# least; of what a wait is predicted to win shorter ones may take a part, and less than another part is
# not waited for.
_WINDOW_S: Final = 0.009
_WINDOW_BLOCKS: Final = 3
_SPARED: Final = 0.5
_MARGIN: Final = 0.1
_MOST_OF_ALONE_PERCENT: Final = 105.0


class Lease(Protocol):
    """What is looked at of a client's lease."""

    @property
    def blocks(self) -> int:
        """Blocks leased so far."""

    @property
    def growing(self) -> bool:
        """Whether more may come."""

    def release(self) -> None:
        """Give it back."""


@dataclass
class Question:
    """One request that found something, and what became of it.

    Attributes:
        keys: the blocks that it asked for.
        cold: per block, whether it had to come from disk.
        begun: when it asked, seconds.
        ahead: blocks that the disk had to read first.
        slack: blocks of shorter requests that may still be read before it.
        grown: when it had how many blocks, in order.
        ended: when it had all that it got, and knew it.
    """

    keys: Keys
    cold: Sequence[bool]
    begun: float
    ahead: float = 0.0
    slack: float = 0.0
    grown: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0

    @property
    def left(self) -> int:
        """Cold blocks that it still waits for."""
        return sum(self.cold[self.grown[-1][1] if self.grown else 0 :])

    def changed(self, lease: Lease) -> bool:
        """Take note of what a lease has come to; return whether that is all."""
        now = time.perf_counter()
        if not self.grown or lease.blocks > self.grown[-1][1]:
            self.grown.append((now, lease.blocks))
        if not lease.growing and not self.ended:
            self.ended = now
            return True
        return False

    @property
    def loaded(self) -> int:
        """Blocks that it got."""
        return self.grown[-1][1]

    def first_token(self, block_seconds: float) -> float:
        """Return the seconds until its first token."""
        at_once = self.cold.index(True) if True in self.cold else len(self.cold)
        # What is in memory is there at once, for the oracle as well.
        wait = self.ended - self.begun if self.loaded > at_once else 0.0
        return wait + (len(self.keys) - self.loaded) * block_seconds


def regret(question: Question, block_seconds: float, read_seconds: float) -> float:
    """Return the seconds that a request lost against the best choice.

    Args:
        question: the request.
        block_seconds: to compute a block.
        read_seconds: to read one.
    """
    total = len(question.cold)
    best = actual = question.first_token(block_seconds)
    came = iter(question.grown)
    when, count = question.begun, 0
    reading = question.ahead
    arrival = 0.0
    for at, cold in enumerate(question.cold):
        reading += cold
        while count <= at and (step := next(came, None)) is not None:
            when, count = step
        if not any(question.cold[: at + 1]):
            arrival = 0.0
        elif count > at:
            arrival = when - question.begun
        else:
            # Nobody waited for it: what the disk had to do first, and after what did come.
            arrival = max(reading * read_seconds, arrival + cold * read_seconds)
        best = min(best, arrival + (total - at - 1) * block_seconds)
    none_waited = next((i for i, cold in enumerate(question.cold) if cold), total)
    best = min(best, (total - none_waited) * block_seconds)
    return actual - best


def _requests(path: Path, limit: int) -> tuple[int, list[tuple[float, Keys]]]:
    """Return tokens per block, and the first requests: when, and their blocks."""
    trace = open_trace(str(path), token_bytes=1)
    with contextlib.closing(trace):
        found: list[tuple[float, Keys]] = []
        for request in trace:
            if request.keys:
                found.append((request.at, Keys.of(request.keys, len(request.keys[0]))))
            if len(found) == limit:
                break
        return trace.spaces[0].block_tokens, found


def _store(stack: contextlib.ExitStack, directory: Path, requests: list[tuple[float, Keys]]) -> int:
    """Store all blocks; return their bytes."""
    blocks = len({key for _, keys in requests for key in keys})
    size = _disk_bytes(blocks)
    disk = ColdDisk(
        stack, directory, block_bytes=_BLOCK, host_bytes=512 * MIB, disk_bytes=size, rate=None
    )
    for _, keys in requests:
        disk.store(keys)
    disk.flush()
    return size


def _disk_bytes(blocks: int) -> int:
    return 256 * MIB + (blocks * _BLOCK * 5 // 4 + MIB - 1) // MIB * MIB


class _Replay:
    """The requests of a trace on one daemon."""

    def __init__(self, space: Space, block_seconds: float, read: float) -> None:
        self._space = space
        self._rate = space.spec.block_tokens / block_seconds
        self._compute = block_seconds
        self._read = read
        # Those that wait, as the daemon should serve them.
        self._line: list[Question] = []
        self._over: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self.asked: list[Question] = []

    def run(self, requests: list[tuple[float, Keys]]) -> None:
        """Ask for what each request finds of what others before it have had."""
        half = len(requests) // 2
        seen = {key for _, keys in requests[:half] for key in keys}
        begin = time.perf_counter() - requests[half][0] / _SPEEDUP
        for at, keys in requests[half:]:
            run = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
            seen.update(keys)
            time.sleep(max(0.0, begin + at / _SPEEDUP - time.perf_counter()))
            self._release()
            if run:
                self._ask(keys[:run])
        deadline = time.monotonic() + WAIT_S
        while any(not question.ended for question in self.asked):
            if time.monotonic() > deadline:
                raise ChildError("some requests were never answered")
            time.sleep(0.01)
        self._release()

    def _ask(self, keys: Keys) -> None:
        hit = self._space.lookup(keys)
        if hit.blocks < len(keys):
            raise ChildError(f"{len(keys) - hit.blocks} blocks are gone: {hit.miss}")
        cold = [tier == "disk" for tier in hit.tiers]
        question = Question(keys, cold, time.perf_counter())
        self._stand_in_line(question)
        self.asked.append(question)

        def changed(lease: Lease) -> None:
            if question.changed(lease):
                self._over.put(lease)

        future = self._space.acquire(
            keys, deadline_s=_DEADLINE_S, prefill_tokens_per_second=self._rate
        )
        future.add_done_callback(lambda done: done.result().on_change(changed))

    def _stand_in_line(self, question: Question) -> None:
        """Find out what the disk has to read before a request, and what may overtake that later."""
        self._line = line = [other for other in self._line if not other.ended]
        own, at = question.left, len(line)
        while at and line[at - 1].left > own and line[at - 1].slack >= own:
            at -= 1
        behind = sum(other.left for other in line[at:])
        window = max(_WINDOW_S / self._read, _WINDOW_BLOCKS)
        question.ahead = sum(other.left for other in line[:at]) + min(behind, window)
        won = own * self._compute - (question.ahead + own) * self._read
        if won > _MARGIN * own * self._compute:
            for passed in line[at:]:
                passed.slack -= own
            question.slack = _SPARED * won / self._read
            line.insert(at, question)

    def _release(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._over.get_nowait().release()


def _measure(
    directory: Path, requests: list[tuple[float, Keys]], block_tokens: int, size: int, load: float
) -> list[Figure]:
    block_seconds = block_tokens / _PREFILL_TOKENS_PER_S / _SPEEDUP
    read_seconds = load * block_seconds
    with contextlib.ExitStack() as stack:
        disk = ColdDisk(
            stack,
            directory,
            block_bytes=_BLOCK,
            host_bytes=_HOST_BYTES,
            disk_bytes=size,
            rate=int(_BLOCK / read_seconds),
            keep=True,
        )
        disk.client.attachment.wait_active(WAIT_S)
        replay = _Replay(disk.space, block_seconds, read_seconds)
        replay.run(requests)
        stats = disk.client.stats()
    waited = [question for question in replay.asked if any(question.cold)]
    counters = stats.counters
    timings = {timing.name: timing for timing in stats.timings}
    lost = [regret(question, block_seconds, read_seconds) for question in waited]
    saved = sum(
        len(question.keys) * block_seconds - question.first_token(block_seconds)
        for question in waited
    )
    name = f"disk at {1 / load:g} times the engine"
    figures = [
        times(
            f"{name}: {len(waited)} of {len(replay.asked)} requests found blocks on disk; "
            f"{counters['waits_ended']} waits ended, {counters['waits_cut']} were cut, "
            f"{counters['waits_declined']} runs shortened. Time saved",
            [saved],
        ),
        most(
            f"regret, of that: {sum(lost) * 1e3:.0f} ms",
            "%",
            [100 * sum(lost) / max(saved, 1e-9)],
            _MOST_REGRET_PERCENT,
        ),
    ]
    alone = sorted(
        100 * question.first_token(block_seconds) / (len(question.keys) * block_seconds)
        for question in waited
    )
    if alone:
        p95 = alone[int(0.95 * len(alone))]
        name = "time to first token, of that without kvstore"
        figures += [
            most(f"{name}: p95", "%", [p95], _MOST_OF_ALONE_PERCENT),
            Figure("… the longest", "%", alone[-1], (alone[-1],)),
        ]
    if "wait" in timings:
        error, wait = timings["wait_error"].p50_seconds, timings["wait"].p50_seconds
        figures.append(times("waits as predicted, off by (median)", [error], [wait], "the wait"))
    return figures


def measure(directory: Path, trace: Path, limit: int) -> list[Figure]:
    """Replay the first requests of a trace, once for each of a few disk speeds.

    Args:
        directory: takes a daemon's directory.
        trace: in a format of `kvstore replay`.
        limit: requests.

    Raises:
        ChildError: something was not stored, or not answered.
        InvalidRequest: the trace cannot be read, or repeats nothing.
    """
    block_tokens, requests = _requests(trace, limit)
    if len({key for _, keys in requests for key in keys}) == sum(len(k) for _, k in requests):
        raise InvalidRequest("trace", f"no request of {trace} has a block of an earlier one")
    with contextlib.ExitStack() as stack:
        size = _store(stack, directory, requests)
    figures = []
    for load in _LOADS:
        figures += _measure(directory, requests, block_tokens, size, load)
    return figures
