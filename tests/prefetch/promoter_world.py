"""A promoter on a device of known speed, in virtual time: what a wait should take is arithmetic."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import cast

from kvstore.index import Block, BlockIndex, SpaceIndex
from kvstore.miss import MissReason
from kvstore.prefetch.promoter import Promoter
from kvstore.space import BlockShape, SpaceSpec
from kvstore.tiers.base import Outcome, Slot, Tier, Transfer
from kvstore.tiers.throttled import Throttled

__all__ = ["PromoterWorld", "RunOf"]


class _Instant:
    """A source that has everything at once."""

    name = "instant"
    capabilities = None

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        return [Outcome.OK] * len(transfers)


class _Device(Throttled):
    """The throttle, and what it was asked for.

    Attributes:
        calls: per read, the disk slots.
    """

    own = Throttled.own | {"calls"}

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(cast("Tier", _Instant()), bytes_per_second)
        self.calls: list[list[Slot]] = []

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.calls.append([transfer.slot for transfer in transfers])
        return await super().read(transfers)


class _Host:
    """Memory without end. Its buffers say how large they are and hold nothing."""

    def __init__(self, block_bytes: int) -> None:
        self._buffer = memoryview(bytearray(block_bytes))
        self._slots = itertools.count()

    def take(
        self, shape: BlockShape, count: int, older_than: int | None, *, lossless: bool
    ) -> list[Slot]:
        return [Slot(0, next(self._slots)) for _ in range(count)]

    def free(self, slot: Slot) -> None:
        pass

    def admit(
        self, space: SpaceIndex, count: int, older_than: int | None, *, lossless: bool
    ) -> int:
        return count

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        return (self._buffer,)

    async def room(self, timeout: float) -> bool:
        return True

    def may_come(self, shape: BlockShape, *, promoting: bool) -> bool:
        return True


class RunOf:
    """Waits for a run of blocks; takes note of when it was asked for, and when the last came."""

    holding = False

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.left = set(blocks)
        self.begun = asyncio.get_running_loop().time()
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def landed(self, block: Block) -> None:
        self.left.discard(block)
        if not self.left:
            self.done.set_result(asyncio.get_running_loop().time() - self.begun)

    def failed(self, block: Block, reason: MissReason) -> None:
        raise AssertionError(f"{block.key!r} failed: {reason}")


class PromoterWorld:
    """A promoter and what it stands on. Made, used and left inside a running loop."""

    def __init__(self, bytes_per_second: float, block_bytes: int) -> None:
        spec = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(block_bytes,))
        self.space = SpaceIndex(spec.fingerprint, spec, 1)
        self.index = BlockIndex(lambda _: None, lambda *_: None)
        self.index.spaces[self.space.id] = self.space
        self.device = _Device(bytes_per_second)
        self.promoter = Promoter(
            self.index,
            self.device,
            _Host(block_bytes),
            on_corrupt=lambda block: None,
            on_read=lambda blocks, seconds: None,
        )
        self._names = itertools.count()

    def chain(self, blocks: int) -> list[Block]:
        """Return a new chain that is on disk only."""
        parent: Block | None = None
        made = []
        for _ in range(blocks):
            number = next(self._names)
            parent = self.index.insert(self.space, number.to_bytes(16, "big"), parent)
            self.index.put_disk(parent, Slot(0, number))
            made.append(parent)
        return made

    def ask(self, blocks: Sequence[Block], priority: int = 0) -> RunOf:
        """Ask for a run as one job."""
        waiter = RunOf(blocks)
        self.promoter.request(blocks, waiter, priority)
        return waiter

    async def measured(self) -> None:
        """Let the promoter find out how fast the device is."""
        await self.ask(self.chain(64)).done
        self.device.calls.clear()
