"""Groups of blocks on their way to the disk: their bytes, durable but not recorded yet."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from kvstore.errors import TierError
from kvstore.syncpoint import reach
from kvstore.tiers.base import Outcome, Slot, Transfer

if TYPE_CHECKING:
    from kvstore.engine.digester import Digester
    from kvstore.engine.verifier import Verifier
    from kvstore.index import Block
    from kvstore.space import BlockShape
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier

__all__ = ["GROUP_BYTES", "Group", "GroupWriter", "group_limit"]

log = logging.getLogger(__name__)

GROUP_BYTES: Final = 64 << 20
_GROUP_BLOCKS: Final = 256


def group_limit(shape: BlockShape) -> int:
    """Return how many blocks a group has at most."""
    return max(1, min(_GROUP_BLOCKS, GROUP_BYTES // shape.block_bytes))


@dataclass(eq=False, slots=True)
class Group:
    """Blocks of one shape, parents before children.

    Attributes:
        blocks: whose host copies are held.
        slots: where they go.
        predecessor: the group before, whose commit comes first.
        outcomes: of writing them; only what is OK is durable.
    """

    blocks: list[Block]
    slots: list[Slot]
    predecessor: asyncio.Task[None] | None
    outcomes: list[Outcome] = field(default_factory=list)


class GroupWriter:
    """Writes groups."""

    def __init__(
        self, host: HostTier, disk: DiskTier, digester: Digester, verifier: Verifier
    ) -> None:
        """Compose."""
        self._host = host
        self._disk = disk
        self._digester = digester
        self._verifier = verifier
        self._writing: set[asyncio.Task[None]] = set()
        self._given_up = False

    def give_up(self) -> None:
        """There is no time left: groups whose bytes are not durable are let go, no other begins.

        Their blocks stay as they are, on their way: this is for a daemon that ends.
        """
        self._given_up = True
        for task in self._writing:
            task.cancel()

    async def write(self, group: Group) -> None:
        """Write a group's blocks and make them durable; its outcomes say how each went.

        What goes wrong for all of them is logged, and is the outcome of each.
        """
        group.outcomes = [Outcome.IO_ERROR] * len(group.blocks)
        if self._given_up:
            return
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._writing.add(task)
        try:
            group.outcomes = await self._write(group)
        except TierError as error:
            log.warning("flush failed: %s", error)
        except Exception:
            # The boundary of a group: its blocks are refused, the others go on.
            log.exception("flush failed")
        finally:
            self._writing.discard(task)

    async def _write(self, group: Group) -> list[Outcome]:
        await self._digester.digest(group.blocks)
        await self._verifier.wait_for(group.blocks)
        transfers = [
            Transfer(slot, self._host.views(b.host), b.space.spec.shard_bytes)
            for b, slot in zip(group.blocks, group.slots, strict=True)
            if b.host is not None
        ]
        outcomes = await self._disk.write(transfers)
        reach("flush.written")
        await self._disk.sync()
        reach("flush.synced")
        return outcomes
