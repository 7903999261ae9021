"""What choices on a trace cost beside an oracle's, in virtual time: no machine's noise in it.

    PYTHONPATH=. python tests/prefetch/measure_regret.py TRACE [REQUESTS]

The same replay as `kvstore bench prefetch --trace`, with the daemon's leases, choices and queue on a
throttled device, without the daemon around them. Times are the trace's own. Prints a line for each
disk speed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lease_world import LeaseWorld
from virtual_time import run_in_virtual_time

from kvstore.cli.bench.prefetch_trace import regret
from kvstore.index import Block
from kvstore.keys import Keys
from kvstore.replay import open_trace
from kvstore.tiers.base import Slot
from kvstore.units import KIB

BLOCK = 16 * KIB
PREFILL_TOKENS_PER_S = 10_000.0
LOADS = (0.2, 0.4, 0.6, 0.8, 1.2)
HOST_BLOCKS = 4096


async def replay(requests: list[tuple[float, Keys]], block_seconds: float, load: float) -> None:
    """Ask for what the second half of the requests finds of those before it."""
    world = LeaseWorld(BLOCK / (load * block_seconds), BLOCK, block_seconds)
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
    cold = [question for question in world.asked if any(question.cold)]
    saved = sum(
        len(question.keys) * block_seconds - question.first_token(block_seconds)
        for question in cold
    )
    lost = sum(regret(question, block_seconds, world.read_seconds) for question in cold)
    print(
        f"disk at {1 / load:.2g} times the engine: {len(cold)} of {len(world.asked)} requests found "
        f"blocks on disk, saved {saved:.1f} s, regret {lost:.2f} s"
        + (f" = {100 * lost / saved:.1f} %" if saved > 0 else "")
    )


def main() -> None:
    """Read the trace and replay it."""
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    trace = open_trace(sys.argv[1], token_bytes=1)
    requests = []
    for request in trace:
        if request.keys:
            requests.append((request.at, Keys.of(request.keys, len(request.keys[0]))))
        if len(requests) == limit:
            break
    trace.close()
    for load in LOADS:
        run_in_virtual_time(
            replay(requests, trace.spaces[0].block_tokens / PREFILL_TOKENS_PER_S, load)
        )


if __name__ == "__main__":
    main()
