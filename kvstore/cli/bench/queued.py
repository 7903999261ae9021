"""Requests that queue behind others: what is on disk is there when their turn comes.

A prompt whose blocks are stored is handed to a real engine right behind another one, never seen
and three times as long, which fills the engine's steps for a while. Once the blocks are on disk only,
and once they are in memory (the first time has brought them there). The two differ by what had not
arrived when the request's turn came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvstore.cli.demo.engine_child import EngineChild
from kvstore.client import Client, Space

__all__ = ["AHEAD_FACTOR", "Queued", "measure"]

# How many times longer the prompt ahead is.
AHEAD_FACTOR = 3
_FLUSH_S = 60.0


@dataclass(slots=True)
class Queued:
    """One disk speed, and what each pair came to.

    Attributes:
        speed: of the disk, bytes a second; None: not throttled.
        disk: seconds to the first token with the blocks on disk.
        host: the same with the blocks in memory.
        disk_tokens: tokens loaded.
        host_tokens: the same with the blocks in memory.
    """

    speed: int | None
    disk: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    disk_tokens: list[int] = field(default_factory=list)
    host_tokens: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios, disk over host."""
        return median(d / h for d, h in zip(self.disk, self.host, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return samples and what they come to."""
        return {
            "bytes_per_second": self.speed,
            "disk_s": self.disk,
            "host_s": self.host,
            "disk_reused_tokens": self.disk_tokens,
            "host_reused_tokens": self.host_tokens,
            "ratio": self.ratio,
        }


def measure(
    speed: int | None,
    engine: EngineChild,
    client: Client,
    space: Space,
    prompts: Sequence[list[int]],
    ahead: Callable[[], list[int]],
) -> Queued:
    """Ask for each prompt twice, behind another one.

    Args:
        speed: of the daemon's disk.
        engine: with kvstore.
        client: of the daemon.
        space: where the prompts' blocks are.
        prompts: stored, and on disk.
        ahead: returns a prompt that was never asked for.
    """
    result = Queued(speed)
    for prompt in prompts:
        client.flush(_FLUSH_S)
        space.evict(tier="host")
        answer = engine.generate(prompt, 1, ahead=[ahead()])
        result.disk.append(answer.ttft_s)
        result.disk_tokens.append(answer.cached_tokens)
        answer = engine.generate(prompt, 1, ahead=[ahead()])
        result.host.append(answer.ttft_s)
        result.host_tokens.append(answer.cached_tokens)
    return result
