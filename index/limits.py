"""What a space may take in each tier, and for how long what nobody uses may stay."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["LIMIT_NAMES", "NO_LIMIT", "NO_QUOTA", "SpaceLimits"]

# Of a limit: there is none, whatever the daemon's default.
NO_LIMIT: Final = (1 << 64) - 1
# Blocks that a space without a quota may have in a tier.
NO_QUOTA: Final = sys.maxsize

_FIELDS: Final = {
    TierName.GPU: "gpu_bytes",
    TierName.HOST: "host_bytes",
    TierName.DISK: "disk_bytes",
}


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """Limits of one space. None: the daemon's default; `NO_LIMIT`: none.

    Attributes:
        gpu_bytes: most that its blocks may take in the GPU tier.
        host_bytes: in the host tier.
        disk_bytes: in the disk tier.
        ttl_ms: milliseconds after which a block that was not used leaves every tier.
    """

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    ttl_ms: int | None = None

    def __bool__(self) -> bool:
        """Return whether anything is set."""
        return any(value is not None for value in self.values())

    def values(self) -> tuple[int | None, ...]:
        """Return the limits in the order of `LIMIT_NAMES`."""
        return (self.gpu_bytes, self.host_bytes, self.disk_bytes, self.ttl_ms)

    def changed(self, changes: Mapping[str, int], cleared: Iterable[str] = ()) -> SpaceLimits:
        """Return the limits with some set anew and others back to the default."""
        values = dict(zip(LIMIT_NAMES, self.values(), strict=True))
        return SpaceLimits(**{**values, **dict.fromkeys(cleared), **changes})

    def over(self, defaults: SpaceLimits) -> SpaceLimits:
        """Return what is in force: the defaults stand in for what is not set."""
        pairs = zip(self.values(), defaults.values(), strict=True)
        return SpaceLimits(*(default if own is None else own for own, default in pairs))

    def quota_bytes(self, tier: TierName) -> int | None:
        """Return what is in force for a tier; None: no limit."""
        value: int | None = getattr(self, _FIELDS[tier])
        return None if value == NO_LIMIT else value

    def quota_blocks(self, tier: TierName, block_bytes: int) -> int:
        """Return how many whole blocks fit; `NO_QUOTA` without a limit."""
        size = self.quota_bytes(tier)
        return NO_QUOTA if size is None else size // block_bytes

    @property
    def ttl_seconds(self) -> float | None:
        """How long what nobody uses stays; None: as long as there is room."""
        return None if self.ttl_ms in (None, NO_LIMIT) else self.ttl_ms / 1e3


# In the order of records and messages.
LIMIT_NAMES: Final = tuple(field.name for field in fields(SpaceLimits))
