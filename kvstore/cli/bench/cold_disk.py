"""A daemon of our own whose disk has a known speed, and chains that lie on that disk only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import Chains, settle
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.client import Client
from kvstore.keys import Keys
from kvstore.units import KIB, MIB

__all__ = ["RATE", "WAIT_S", "ColdDisk"]

# What the disk is throttled to, bytes a second, unless said otherwise.
RATE: Final = 256 * MIB
# For what must come in the end.
WAIT_S: Final = 120.0
_PUT_BLOCKS: Final = 500


class ColdDisk:
    """One daemon and one space on it. What is stored is zeros: nobody looks at them.

    Attributes:
        address: of the daemon.
        client: connected to it.
        chains: what is stored next.
        space: where.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        directory: Path,
        *,
        block_bytes: int = 256 * KIB,
        host_bytes: int = 1024 * MIB,
        disk_bytes: int = 2048 * MIB,
        rate: int | None = RATE,
        keep: bool = False,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the daemon.

        Args:
            stack: ends it.
            directory: made for it.
            block_bytes: of a block.
            host_bytes: of host memory.
            disk_bytes: of disk.
            rate: bytes a second of the disk; None: as fast as it is.
            keep: what an earlier daemon has left there stays.
            options: more, of `kvstore serve`.
            environment: variables for it.
        """
        directory.mkdir(exist_ok=True)
        throttle = () if rate is None else ("--disk-throttle", str(rate))
        flags = [
            *("--host-pool", str(host_bytes), "--disk", str(directory / "disk")),
            *("--disk-capacity", str(disk_bytes), *throttle, *options),
        ]
        daemon = stack.enter_context(ChildDaemon(directory, flags, environment=environment))
        self.address = daemon.address
        self.client: Client = stack.enter_context(connect(daemon.address))
        self.chains = Chains(self.client, "bench-prefetch", block_bytes)
        self.space = self.chains.space
        if not keep:
            self.chains.ready()

    def store(self, keys: Keys) -> None:
        """Store a chain.

        Raises:
            ChildError: not all of it.
        """
        content = np.zeros((min(len(keys), _PUT_BLOCKS), self.space.spec.block_bytes), np.uint8)
        for at in range(0, len(keys), _PUT_BLOCKS):
            part = keys[at : at + _PUT_BLOCKS]
            if self.space.put(part, content[: len(part)], timeout_s=WAIT_S) != len(part):
                raise ChildError("put did not store every block")

    def flush(self) -> None:
        """See everything on disk.

        Raises:
            ChildError: it is not.
        """
        if not self.client.flush(WAIT_S).done:
            raise ChildError("not everything was written to disk")

    def cold(self, blocks: int) -> Keys:
        """Store a new chain and leave it, and all others, on disk only."""
        return self.cold_chains(1, blocks)[0]

    def cold_chains(self, chains: int, blocks: int) -> list[Keys]:
        """Store new chains and leave them, and all others, on disk only."""
        made = [self.chains.next(blocks) for _ in range(chains)]
        for keys in made:
            self.store(keys)
        self.flush()
        self.cool()
        return made

    def cool(self, keys: Keys | None = None) -> None:
        """Leave a chain, or all of them, on disk only.

        Raises:
            ChildError: something is used all the time.
        """
        deadline = time.monotonic() + WAIT_S
        # What was let go of a moment ago may still be held.
        while self.space.evict(keys, tier="host").skipped:
            if time.monotonic() > deadline:
                raise ChildError("some blocks do not leave host memory")
            settle()

    def counter(self, name: str) -> int:
        """Return one of the daemon's counters."""
        return int(self.client.stats().counters.get(name, 0))
