"""A trace taken through a real daemon: what `kvstore replay --measure` compares its answer with."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.plain import plain
from kvstore.space import SpaceSpec

if TYPE_CHECKING:
    from kvstore.client import Client, Space

__all__ = ["MeasuredDaemon", "measured_daemon"]

# A request whose blocks are not had by then is a fault, not a miss.
_REQUEST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.002


class MeasuredDaemon:
    """A daemon of our own that is asked for what a trace asks for."""

    def __init__(self, client: Client, space: Space) -> None:
        """Made by `measured_daemon`."""
        self._client = client
        self._space = space
        self._buffer = np.zeros((0, space.spec.block_bytes), np.uint8)

    def step(self, keys: Sequence[bytes]) -> None:
        """Load the leading run, store the rest, and wait until the disk has what it gets.

        Without the wait, what is on disk when host needs room would depend on this machine's speed.
        """
        if len(keys) > len(self._buffer):
            self._buffer = np.zeros((len(keys), self._space.spec.block_bytes), np.uint8)
        rows = self._buffer[: len(keys)]
        self._space.get(keys, rows, timeout_s=_REQUEST_SECONDS)
        self._space.put(keys, rows, timeout_s=_REQUEST_SECONDS)
        end = time.monotonic() + _REQUEST_SECONDS
        while any(tier.dirty_blocks for tier in self._client.stats().tiers):
            if time.monotonic() > end:
                raise ChildError("the daemon's disk does not keep up")
            time.sleep(_LOOK_SECONDS)

    def counts(self) -> dict[str, Any]:
        """Return what it loaded and wrote, under the names of `kvstore replay --json`."""
        stats = plain(self._client.stats())
        hits = {tier["tier"]: tier["hit_blocks"] for tier in stats["tiers"]}
        return {
            "hit_blocks_host": hits.get("host", 0),
            "hit_blocks_disk": hits.get("disk", 0),
            "disk_written_bytes": stats["counters"].get("flushed_bytes", 0),
        }


@contextlib.contextmanager
def measured_daemon(
    host_bytes: int, disk_bytes: int, policy: str, block_tokens: int, block_bytes: int
) -> Iterator[MeasuredDaemon]:
    """Start a daemon in a scratch directory; it ends with the block.

    Args:
        host_bytes: its host pool.
        disk_bytes: its disk tier; 0: none.
        policy: its write policy.
        block_tokens: tokens per block.
        block_bytes: bytes per block.

    Raises:
        ChildError: it does not come up.
    """
    # Imported late: the command's other uses do without the client.
    from kvstore.client import Client

    with contextlib.ExitStack() as stack:
        scratch = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="kvstore-replay-", ignore_cleanup_errors=True)
            )
        )
        options = ["--host-pool", str(host_bytes)]
        if disk_bytes:
            options += ["--disk", str(scratch / "disk"), "--disk-capacity", str(disk_bytes)]
            options += ["--write-policy", policy]
        daemon = stack.enter_context(ChildDaemon(scratch, options))
        client = stack.enter_context(
            Client(daemon.address, name="kvstore replay", timeout_s=_REQUEST_SECONDS)
        )
        spec = SpaceSpec(
            model="replay", dtype="opaque", block_tokens=block_tokens, shard_bytes=(block_bytes,)
        )
        yield MeasuredDaemon(client, client.open_space(spec))
