"""How long a warm restart takes: python measure_warm_restart.py [GiB [block KiB]].

Fills the pool, stops the daemon, starts the next one, and reads everything back through one client
that lives on. Prints one line per figure.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore import Client, SpaceSpec, chain_keys
from kvstore.errors import ServerUnavailable

CHAIN = 64


def start(
    directory: Path, address: str, pool_gib: float, *options: str
) -> tuple[subprocess.Popen[str], str]:
    """Start a daemon; return it with its ready line."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstore", "serve", "--listen", address),
            *("--state", str(directory / "state"), "--host-pool", f"{int(pool_gib * 1024)}MiB"),
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=(directory / "log").open("a"),
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def attached(client: Client) -> float:
    """Return seconds until the client has found the daemon again."""
    begun = time.perf_counter()
    while True:
        try:
            client.hello()
        except ServerUnavailable:
            time.sleep(0.01)
        else:
            client.attachment.wait_active(10)
            return time.perf_counter() - begun


def main() -> None:
    """Measure."""
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    block = int(sys.argv[2]) * 1024 if len(sys.argv) > 2 else 1 << 20
    chains = int(gib * (1 << 30) / block / CHAIN)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        address = f"unix://{directory}/k.sock"
        daemon, _ = start(directory, address, gib + 0.5)
        spec = SpaceSpec(model="m", dtype="d", block_tokens=1, shard_bytes=(block,))
        blocks = np.random.default_rng(1).integers(0, 256, (CHAIN, block), np.uint8)
        with Client(address, timeout_s=30) as client:
            space = client.open_space(spec)
            keys = [chain_keys(range(CHAIN), 1, salt=b"%d" % i) for i in range(chains)]
            for i, run in enumerate(keys):
                blocks[:, 0] = i % 256
                while space.put(run, blocks, timeout_s=30) < CHAIN:
                    pass
            print(f"stored {chains * CHAIN} blocks, {chains * CHAIN * block / 2**30:.2f} GiB")
            begun = time.perf_counter()
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
            print(f"stop                {time.perf_counter() - begun:6.2f} s")
            size = (directory / "state" / "host-index").stat().st_size
            print(f"host-index          {size / 1024:6.0f} KiB")
            begun = time.perf_counter()
            daemon, line = start(directory, address, gib + 0.5, "--no-save-host")
            print(f"exec to ready       {time.perf_counter() - begun:6.2f} s   {line}")
            ready = time.perf_counter()
            print(f"client is back      {attached(client):6.2f} s later")
            out = np.empty_like(blocks)
            got = space.get(keys[-1], out, timeout_s=10)
            print(f"first get of {got}     {time.perf_counter() - ready:6.2f} s after ready")
            while True:
                counts = client.stats().counters
                if counts["adopted_checked_blocks"] >= chains * CHAIN:
                    break
                time.sleep(0.02)
            print(f"all is checked      {time.perf_counter() - ready:6.2f} s after ready")
            wrong = served = 0
            for i, run in enumerate(keys):
                blocks[:, 0] = i % 256
                got = space.get(run, out, timeout_s=10)
                served += got
                wrong += int((out[:got] != blocks[:got]).any())
            [host] = [t for t in client.stats().tiers if t.tier == 2]
            print(
                f"served {served} of {chains * CHAIN}, {host.hit_blocks} hits in host, {wrong} wrong"
            )
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()


if __name__ == "__main__":
    main()
