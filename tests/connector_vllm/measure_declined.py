"""What a prompt costs the first time and later that lies on a disk slower than the engine.

`python tests/connector_vllm/measure_declined.py MODEL [MB_PER_SECOND [PROMPTS]]`

A real engine without prefix caching of its own stores prompts; a new daemon has nothing in memory and
its disk throttled. Then each prompt is asked for three times, with a rest after each request until
nothing comes from disk any more. Prints seconds to the first token and tokens loaded.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvstore.cli.bench.ttft_sweep import SweepSettings, _Sweep
from kvstore.client import Client

TIMES = 3
TOKENS = 768
WARM_UP = 2
WAIT_SECONDS = 60.0
QUIET_SECONDS = 1.5
COUNTERS = ("waits_declined", "waits_cut", "afterwards_blocks", "promoted_blocks", "stored_blocks")


def rest(client: Client) -> None:
    """Wait until nothing has come from disk for a while."""
    seen, since, end = -1, time.monotonic(), time.monotonic() + WAIT_SECONDS
    while time.monotonic() < min(end, since + QUIET_SECONDS):
        now = client.stats().counters.get("promoted_blocks", 0)
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


def main(model: Path, bytes_per_second: int, count: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="kvstore-declined-") as directory:
        settings = SweepSettings(model, Path(directory), [bytes_per_second], count, TIMES, TOKENS)
        run = _Sweep(settings, print)
        with run.daemon(None, "--warm-up", "0") as (daemon, client):
            engine = run.engine("engine with kvstore", daemon.address)
            prompts = [engine.encode(n, TOKENS) for n in range(count + WARM_UP)]
            run.store(client, engine, prompts)
        try:
            with run.daemon(bytes_per_second, "--warm-up", "0") as (_, client):
                run._until_attached(client)
                for prompt in prompts[count:]:
                    engine.generate(prompt, 1)
                    rest(client)
                before = client.stats().counters
                for at in range(TIMES):
                    answers = []
                    for prompt in prompts[:count]:
                        answers.append(engine.generate(prompt, 2))
                        rest(client)
                    seconds = median(answer.ttft_s for answer in answers)
                    loaded = median(answer.cached_tokens for answer in answers)
                    print(f"asked {at + 1}: {seconds:.3f} s, {loaded:.0f} tokens loaded")
                after = client.stats().counters
                print({name: after.get(name, 0) - before.get(name, 0) for name in COUNTERS})
        finally:
            engine.stop()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        Path(given[0]),
        int(float(given[1]) * 1e6) if len(given) > 1 else 12_000_000,
        int(given[2]) if len(given) > 2 else 4,
    )
