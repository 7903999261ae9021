"""A daemon that has something to do, and a Prometheus that watches it, for a picture of the dashboard.

    python scripts/dashboard/load.py [PROMETHEUS]       # the program; `prometheus` unless given

Two spaces share a small daemon: chats that come back, and batch work under a quota and a time to
live, each from an engine with a small cache of its own. Both come and go in waves, so that every curve has a shape. Runs until interrupted; all that
it keeps is in a directory that goes with it.
"""

from __future__ import annotations

import math
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import kvstore
from kvstore.cli.child import Child, ChildDaemon, interruptible
from kvstore.keys import chain_keys
from kvstore.units import KIB, MIB

_MONITORING: Final = Path(__file__).parents[2] / "monitoring"
_OPTIONS: Final = (
    *("--host-pool", "64MiB", "--disk-capacity", "192MiB", "--disk-budget", "16GiB"),
    *("--default-ttl", "90s"),
)
_BLOCK_TOKENS: Final = 16
_BLOCK_BYTES: Final = 64 * KIB
_LONGEST_BLOCKS: Final = 96
_WAVE_SECONDS: Final = 100.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _OwnCache:
    """An engine's own prefix cache, far smaller than the daemon's tiers."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def run(self, keys: Sequence[bytes]) -> int:
        """Return how much of a chain is there, and take all of it in."""
        found = next((n for n, key in enumerate(keys) if key not in self._keys), len(keys))
        for key in reversed(keys):  # heads are used last, so they leave last
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._blocks:
            self._keys.popitem(last=False)
        return found


class _Conversations:
    """Prompts of conversations that come back, each longer by a few blocks every time."""

    def __init__(self, seed: int, chats: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self._tokens(self._rng.randint(4, 16)) for _ in range(4)]
        self._chats = [self._rng.choice(self._systems) for _ in range(chats)]

    def _tokens(self, blocks: int) -> list[int]:
        return [self._rng.randrange(1 << 30) for _ in range(blocks * _BLOCK_TOKENS)]

    def next(self) -> list[int]:
        number = self._rng.randrange(len(self._chats))
        prompt = self._chats[number] + self._tokens(1 + int(self._rng.expovariate(1 / 6)))
        prompt = prompt[: _LONGEST_BLOCKS * _BLOCK_TOKENS]
        ends = self._rng.random() < 0.2 or len(prompt) == _LONGEST_BLOCKS * _BLOCK_TOKENS
        self._chats[number] = self._rng.choice(self._systems) if ends else prompt
        return prompt


def _use(
    address: str, model: str, chats: int, per_second: float, limited: bool, stop: threading.Event
) -> None:
    """Ask for what is there and store the rest, as an engine would, until told to stop."""
    spec = kvstore.SpaceSpec(
        model=model, dtype="bfloat16", block_tokens=_BLOCK_TOKENS, shard_bytes=(_BLOCK_BYTES,)
    )
    memory = np.random.default_rng(chats).integers(
        0, 256, (_LONGEST_BLOCKS, _BLOCK_BYTES), np.uint8
    )
    conversations = _Conversations(chats, chats)
    own = _OwnCache(blocks=160)
    with kvstore.Client(address) as client:
        space = client.open_space(spec)
        if limited:
            space.set_quotas(host=12 * MIB, disk=32 * MIB)
            space.set_ttl(30.0)
        while not stop.is_set():
            keys = chain_keys(conversations.next(), _BLOCK_TOKENS)
            rows = memory[: len(keys)]
            local = own.run(list(keys))
            client.report_usage(
                space, prompt_tokens=local * _BLOCK_TOKENS, local_tokens=local * _BLOCK_TOKENS
            )
            space.lookup(keys)
            there = local
            if local < len(keys):
                there += space.get(keys[local:], rows[local:].copy(), timeout_s=2.0)
            if there < len(keys):
                space.put(keys[there:], rows[there:], timeout_s=2.0)
            wave = 1.2 + math.sin(time.monotonic() / _WAVE_SECONDS * math.tau + chats)
            stop.wait(1 / (per_second * wave))


def _settings(directory: Path, metrics_port: int) -> Path:
    """Write Prometheus's own settings, for another daemon than the one that they name."""
    text = (_MONITORING / "prometheus.yml").read_text()
    text, places = re.subn(r"127\.0\.0\.1:9405", f"127.0.0.1:{metrics_port}", text)
    assert places == 1
    path = directory / "prometheus.yml"
    path.write_text(text)
    shutil.copy(_MONITORING / "alerts.yml", directory)
    return path


def main(program: str) -> None:
    """Run until interrupted."""
    if shutil.which(program) is None:
        raise SystemExit(f"{program}: there is none here; usage: load.py [PROMETHEUS'S PROGRAM]")
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="kvstore-dashboard-") as name:
        directory = Path(name)
        metrics = _free_port()
        options = [*_OPTIONS, "--metrics", f"127.0.0.1:{metrics}"]
        with ChildDaemon(directory, [*options, "--disk", str(directory / "disk")]) as daemon:
            address = f"127.0.0.1:{_free_port()}"
            prometheus = Child(
                "Prometheus",
                [
                    program,
                    f"--config.file={_settings(directory, metrics)}",
                    f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address={address}",
                ],
                directory / "prometheus.log",
            )
            users = [
                threading.Thread(target=_use, args=(daemon.address, *load, stop))
                for load in (("chat-8b", 40, 6.0, False), ("batch-70b", 20, 2.5, True))
            ]
            for user in users:
                user.start()
            print(f"Prometheus: http://{address}", flush=True)
            print("in ten minutes: node draw.mjs http://" + address + " dashboard.png", flush=True)
            try:
                while all(user.is_alive() for user in users):
                    time.sleep(1)
            finally:
                stop.set()
                for user in users:
                    user.join()
                prometheus.stop(timeout_s=10)


if __name__ == "__main__":
    try:
        with interruptible():
            main(*sys.argv[1:2] or ["prometheus"])
    except KeyboardInterrupt:
        pass
