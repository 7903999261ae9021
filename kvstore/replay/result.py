"""What one pair of tier sizes would have done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.replay.distribution import Distribution
from kvstore.replay.sizes import UNLIMITED, Size
from kvstore.replay.tiered_pool import PoolCounts

__all__ = ["SizeResult"]

_DAY_SECONDS: Final = 86_400.0


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


@dataclass(slots=True)
class SizeResult:
    """Counts of one replay.

    Attributes:
        size: of the tiers.
        host_bytes: the host tier's size in bytes.
        requests: requests that asked for blocks.
        blocks: blocks that they asked for.
        tokens: tokens of their prompts.
        host_blocks, disk_blocks: leading runs that were loaded, by the tier that held them.
        host_tokens, disk_tokens: the same in tokens.
        not_worth_blocks: blocks on disk that were computed, because that was faster.
        span_seconds: from the first to the last request.
        pool: what happened in the tiers.
        ttft: seconds from a request's arrival to its first token.
    """

    size: Size
    host_bytes: int
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    not_worth_blocks: int = 0
    span_seconds: float = 0.0
    pool: PoolCounts = field(default_factory=PoolCounts)
    ttft: Distribution = field(default_factory=Distribution)

    @property
    def block_hit_rate(self) -> float:
        """Loaded blocks, percent of those asked for."""
        return _percent(self.host_blocks + self.disk_blocks, self.blocks)

    @property
    def token_hit_rate(self) -> float:
        """Loaded tokens, percent of the prompts'."""
        return _percent(self.host_tokens + self.disk_tokens, self.tokens)

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes to disk a day, if every day were like the trace."""
        if not self.span_seconds:
            return 0.0
        return self.pool.written_bytes * _DAY_SECONDS / self.span_seconds

    @property
    def drive_writes_per_day(self) -> float:
        """How often the whole disk would be written a day; what SSDs are rated in."""
        return self.written_bytes_per_day / self.size.disk if self.size.disk else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as documented in docs/replay.md."""
        unlimited = self.host_bytes >= UNLIMITED
        return {
            "host_bytes": None if unlimited else self.host_bytes,
            "disk_bytes": None if self.size.disk >= UNLIMITED else self.size.disk,
            "requests": self.requests,
            "blocks": self.blocks,
            "tokens": self.tokens,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "block_hit_rate_host": _percent(self.host_blocks, self.blocks),
            "block_hit_rate_disk": _percent(self.disk_blocks, self.blocks),
            "token_hit_rate_host": _percent(self.host_tokens, self.tokens),
            "token_hit_rate_disk": _percent(self.disk_tokens, self.tokens),
            "hit_blocks_host": self.host_blocks,
            "hit_blocks_disk": self.disk_blocks,
            "not_worth_blocks": self.not_worth_blocks,
            "stored_blocks": self.pool.stored,
            "not_stored_blocks": self.pool.not_stored,
            "promoted_blocks": self.pool.promoted,
            "evicted_blocks_host": self.pool.evicted_host,
            "evicted_blocks_disk": self.pool.evicted_disk,
            "disk_written_blocks": self.pool.written,
            "disk_written_bytes": self.pool.written_bytes,
            "disk_written_bytes_per_day": self.written_bytes_per_day,
            "drive_writes_per_day": self.drive_writes_per_day,
            "ttft_seconds": self.ttft.as_json(),
            "span_seconds": self.span_seconds,
        }
