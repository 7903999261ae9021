"""What choices on a trace cost beside an oracle's, in virtual time: no machine's noise in it.

    PYTHONPATH=. python tests/prefetch/measure_regret.py TRACE [--requests N] [--first N] [--hindsight N]

The same replay as `kvstore bench prefetch --trace`, with the daemon's leases, choices and queue on a
throttled device, without the daemon around them. Times are the trace's own. Prints a line for each
disk speed.

With --hindsight there is a second oracle, which rests on no model of the disk and its queue: for every
Nth request everything is replayed with another choice of that one request (nothing, a quarter, half,
three quarters, everything), and what came later comes later again. It knows the future, so a part of
what it finds no daemon could have known.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lease_world import LeaseWorld
from virtual_time import run_in_virtual_time

from kvstore.cli.bench.prefetch_trace import Question, regret
from kvstore.engine.counters import Counters
from kvstore.engine.worth import Worth
from kvstore.index import Block
from kvstore.keys import Keys
from kvstore.prefetch.planner import Plan
from kvstore.replay import open_trace
from kvstore.tiers.base import Slot
from kvstore.units import KIB

BLOCK = 16 * KIB
PREFILL_TOKENS_PER_S = 10_000.0
LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 1.2)
HOST_BLOCKS = 4096
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)

Requests = list[tuple[float, Keys]]


class Otherwise(Worth):
    """Chooses as the daemon does, but for one request."""

    def __init__(self, number: int = -1, part: float = 0.0) -> None:
        """Of the request of that number wait for a part of what is not there."""
        super().__init__(Counters())
        self._number, self._part, self._asked = number, part, -1

    def _plan(
        self,
        run: Sequence[Block],
        ready: Sequence[bool],
        block_seconds: float,
        deadline_seconds: float,
        priority: int,
        queued_seconds: float,
        margin: float | None = None,
        waiter: object | None = None,
    ) -> Plan:
        chosen = super()._plan(
            run,
            ready,
            block_seconds,
            deadline_seconds,
            priority,
            queued_seconds,
            margin,
            waiter,  # type: ignore[arg-type]
        )
        if waiter is not None:
            return chosen
        self._asked += 1
        if self._asked != self._number:
            return chosen
        at_once = next(i for i, here in enumerate(ready) if not here)
        blocks = at_once + round((len(run) - at_once) * self._part)
        cold = [b for b, here in zip(run[:blocks], ready, strict=False) if not here]
        promoter, now = self.promoter, asyncio.get_running_loop().time()
        assert promoter is not None
        ahead = promoter.ahead_bytes(cold, priority)
        wait = promoter.path.seconds(len(cold) * BLOCK, ahead, now) if cold else 0.0
        return Plan(blocks, wait, 0.0)


async def replay(
    requests: Requests, block_seconds: float, load: float, worth: Worth | None = None
) -> list[Question]:
    """Ask for what the second half of the requests finds of those before it.

    Returns:
        the requests that found blocks on disk.
    """
    world = LeaseWorld(BLOCK / (load * block_seconds), BLOCK, block_seconds, worth or Otherwise())
    space, index = world.space, world.index
    world.promoter.start()
    for _, keys in requests:
        parent: Block | None = None
        for key in keys:
            block = space.blocks.get(key)
            if block is None:
                block = index.insert(space, key, parent)
                index.put_disk(block, Slot(0, len(space.blocks)))
            parent = block
    half = len(requests) // 2
    seen = {key for _, keys in requests[:half] for key in keys}
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)  # a question that has ended at 0 would not have ended
    begin = loop.time() - requests[half][0]
    for at, keys in requests[half:]:
        run = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        await asyncio.sleep(max(0.0, begin + at - loop.time()))
        coldest = index.host_queue(space.shape)
        while space.host_blocks > HOST_BLOCKS and (block := coldest.pop()) is not None:
            index.drop_host(block)
        if run:
            world.load([space.blocks[key] for key in keys[:run]])
    while not all(question.ended for question in world.asked):
        await asyncio.sleep(1.0)
    await world.promoter.stop()
    return [question for question in world.asked if any(question.cold)]


def measure(requests: Requests, block_seconds: float, load: float) -> list[Question]:
    """Print what one disk speed comes to."""
    asked = run_in_virtual_time(replay(requests, block_seconds, load))
    # What leading blocks in memory spare is not the disk's doing.
    times = [question.first_token(block_seconds) for question in asked]
    whole = [len(question.keys) * block_seconds for question in asked]
    no_disk = [
        (len(question.keys) - question.cold.index(True)) * block_seconds for question in asked
    ]
    saved = sum(whole) - sum(times)
    lost = sum(regret(question, block_seconds, load * block_seconds) for question in asked)
    ratios = sorted(time / alone for time, alone in zip(times, whole, strict=True))
    slower = [t - alone for t, alone in zip(times, no_disk, strict=True) if t > alone + 1e-6]
    print(
        f"disk at {1 / load:.3g} times the engine: {len(asked)} requests found blocks on disk, saved "
        f"{saved:.1f} s (the disk {sum(no_disk) - sum(times):.1f} s), regret {lost:.2f} s = "
        f"{100 * lost / max(saved, 1e-9):.1f} %; time to first token, of that without kvstore: p95 "
        f"{ratios[int(0.95 * len(ratios))]:.2f}, longest {ratios[-1]:.2f}; {len(slower)} were slower "
        f"than without the disk, by {sum(slower):.1f} s together",
        flush=True,
    )
    return asked


def in_hindsight(
    requests: Requests, block_seconds: float, load: float, asked: Sequence[Question], every: int
) -> None:
    """Print what other choices of single requests would have come to."""
    saved = lost = model = 0.0
    some = range(0, len(asked), every)
    for number in some:
        one = asked[number]
        best = actual = one.first_token(block_seconds)
        for part in PARTS:
            worth = Otherwise(number, part)
            other = run_in_virtual_time(replay(requests, block_seconds, load, worth))[number]
            assert (len(other.keys), other.cold) == (len(one.keys), one.cold)
            best = min(best, other.first_token(block_seconds))
        saved += len(one.keys) * block_seconds - actual
        lost += actual - best
        model += regret(one, block_seconds, load * block_seconds)
    print(
        f"  {len(some)} of them, replayed with other choices: saved {saved:.1f} s, regret in "
        f"hindsight {lost:.2f} s = {100 * lost / max(saved, 1e-9):.1f} %, by the model {model:.2f} s",
        flush=True,
    )


def main() -> None:
    """Read the trace and replay it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="how many to leave out")
    parser.add_argument("--hindsight", type=int, default=0, metavar="N", help="every Nth request")
    parser.add_argument("--loads", default=LOADS, type=lambda text: map(float, text.split(",")))
    options = parser.parse_args()
    trace = open_trace(options.trace, token_bytes=1)
    requests: Requests = []
    for request in trace:
        if request.keys:
            requests.append((request.at, Keys.of(request.keys, len(request.keys[0]))))
        if len(requests) == options.first + options.requests:
            break
    trace.close()
    del requests[: options.first]
    block_seconds = trace.spaces[0].block_tokens / PREFILL_TOKENS_PER_S
    for load in options.loads:
        asked = measure(requests, block_seconds, load)
        if options.hindsight:
            in_hindsight(requests, block_seconds, load, asked, options.hindsight)


if __name__ == "__main__":
    main()
