"""Tier sizes to try, as people write them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.units import format_bytes, parse_bytes

__all__ = ["UNLIMITED", "Size", "parse_blocks", "parse_grid"]

# A tier without a limit: more than any trace fills.
UNLIMITED: Final = 1 << 62
_WORDS: Final = ("unlimited", "inf")


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the tiers.

    Attributes:
        host: bytes of the host tier, or blocks.
        disk: bytes of the disk tier; 0: there is none.
        in_blocks: `host` counts blocks; there is no disk.
    """

    host: int
    disk: int = 0
    in_blocks: bool = False

    def host_bytes(self, block_bytes: int) -> int:
        """Return the size of the host tier."""
        return min(UNLIMITED, self.host * block_bytes) if self.in_blocks else self.host

    @property
    def host_text(self) -> str:
        """The host tier's size for a table."""
        if self.host >= UNLIMITED:
            return "unlimited"
        return f"{self.host:,} blocks" if self.in_blocks else format_bytes(self.host)

    @property
    def disk_text(self) -> str:
        """The disk tier's size for a table."""
        if not self.disk:
            return "–"
        return "unlimited" if self.disk >= UNLIMITED else format_bytes(self.disk)


def parse_blocks(text: str) -> list[Size]:
    """Return the pools that ``1000,5859,unlimited`` names.

    Raises:
        InvalidRequest: a part is no number of blocks.
    """
    sizes = []
    for part in text.split(","):
        word = part.strip().lower()
        if word in _WORDS:
            sizes.append(Size(UNLIMITED, in_blocks=True))
            continue
        try:
            blocks = int(word.replace("_", ""))
        except ValueError:
            blocks = 0
        if blocks < 1:
            raise InvalidRequest("blocks", f"{part!r}: write numbers of blocks, or unlimited")
        sizes.append(Size(blocks, in_blocks=True))
    return sizes


def _bytes(text: str) -> list[int]:
    words = [part.strip() for part in text.split(",")]
    return [UNLIMITED if word.lower() in _WORDS else parse_bytes(word) for word in words]


def parse_grid(host: str, disk: str) -> list[Size]:
    """Return every pair of the sizes that ``16GiB,64GiB`` and ``0,1TiB`` name.

    Raises:
        ConfigError: a part is no size.
        InvalidRequest: a host tier has no size.
    """
    hosts, disks = _bytes(host), _bytes(disk)
    if min(hosts) < 1:
        raise InvalidRequest("host", "must be above 0")
    return [Size(*pair) for pair in itertools.product(hosts, disks)]
