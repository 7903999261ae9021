"""A tier that fails on purpose, at chosen calls."""

from __future__ import annotations

import asyncio
import errno
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvstore.errors import TierUnavailable
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Slot, Tier, Transfer
from kvstore.tiers.digests import digest_shards
from kvstore.tiers.wrapper import TierWrapper

__all__ = ["Fault", "FaultKind", "Faulty"]


class FaultKind(Enum):
    """What goes wrong."""

    IO_ERROR = "io_error"  # a read leaves garbage, a write writes nothing, sync raises
    SHORT_READ = "short_read"  # half of the block arrives, and the tier notices
    NO_SPACE = "no_space"  # a write fails; allocate gives nothing
    BIT_FLIP = "bit_flip"  # one bit of the block changes, nobody notices by itself
    TORN_WRITE = "torn_write"  # the first half is written, and reported as good
    STALL = "stall"  # the call waits until `Faulty.resume`, then works
    UNAVAILABLE = "unavailable"  # the device as a whole: the call raises


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan.

    Attributes:
        kind: what goes wrong.
        operation: ``read``, ``write``, ``sync`` or ``allocate``.
        call: which call of that operation, counted from 0; None is every call.
        block: which block of the call's batch; None is all of them.
        bit: for BIT_FLIP, position inside the block's first shard.
    """

    kind: FaultKind
    operation: str
    call: int | None = None
    block: int | None = None
    bit: int = 0

    def hits(self, block: int) -> bool:
        """Tell whether a block of the batch is meant."""
        return self.block is None or self.block == block


class Faulty(TierWrapper):
    """Carries out a plan of faults; without one it changes nothing.

    Attributes:
        plan: faults to come; may be changed at any time.
        calls: calls so far, by operation.
        stalled: set while a call stalls.
    """

    own = TierWrapper.own | {"plan", "calls", "stalled", "_resumed"}

    def __init__(self, inner: Tier, plan: Iterable[Fault] = ()) -> None:
        """Wrap a tier."""
        super().__init__(inner)
        self.plan: list[Fault] = list(plan)
        self.calls: dict[str, int] = {}
        self.stalled = asyncio.Event()
        self._resumed = asyncio.Event()

    def resume(self) -> None:
        """End all stalls of this moment."""
        self._resumed.set()

    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Allocate, or give nothing."""
        return [] if self._due("allocate") else self.inner.allocate(shape, count)

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read with the plan's faults."""
        faults = self._due("read")
        await self._whole_call(faults)
        outcomes = await self.inner.read(transfers)
        for position, transfer in enumerate(transfers):
            for fault in faults:
                if fault.hits(position):
                    outcomes[position] = _spoil_read(fault, transfer, outcomes[position])
        return outcomes

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write with the plan's faults."""
        faults = self._due("write")
        await self._whole_call(faults)
        outcomes: list[Outcome | None] = [None] * len(transfers)
        passed: list[Transfer] = []
        for position, transfer in enumerate(transfers):
            changed: Transfer | None = transfer
            for fault in faults:
                if changed is not None and fault.hits(position):
                    changed = await self._spoil_write(fault, changed)
            if changed is None:
                outcomes[position] = Outcome.IO_ERROR
            else:
                passed.append(changed)
        rest = iter(await self.inner.write(passed))
        return [outcome if outcome is not None else next(rest) for outcome in outcomes]

    async def sync(self) -> None:
        """Sync, or fail."""
        faults = self._due("sync")
        await self._whole_call(faults)
        if any(fault.kind is FaultKind.IO_ERROR for fault in faults):
            raise TierUnavailable(self.name.name.lower(), "sync failed on purpose", errno.EIO)
        await self.inner.sync()

    def _due(self, operation: str) -> list[Fault]:
        call = self.calls.get(operation, 0)
        self.calls[operation] = call + 1
        return [f for f in self.plan if f.operation == operation and f.call in (None, call)]

    async def _whole_call(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.kind is FaultKind.STALL:
                self._resumed.clear()
                self.stalled.set()
                try:
                    await self._resumed.wait()
                finally:
                    self.stalled.clear()
            elif fault.kind is FaultKind.UNAVAILABLE:
                raise TierUnavailable(self.name.name.lower(), "failed on purpose", errno.EIO)

    async def _spoil_write(self, fault: Fault, transfer: Transfer) -> Transfer | None:
        """Return what is written instead; None fails the block."""
        if fault.kind in (FaultKind.IO_ERROR, FaultKind.NO_SPACE):
            return None
        if fault.kind not in (FaultKind.BIT_FLIP, FaultKind.TORN_WRITE):
            return transfer
        copies = tuple(memoryview(mmap.mmap(-1, len(buffer))) for buffer in transfer.buffers)
        if fault.kind is FaultKind.BIT_FLIP:
            for copy, buffer in zip(copies, transfer.buffers, strict=True):
                copy[:] = buffer
            copies[0][fault.bit // 8] ^= 1 << fault.bit % 8
        else:
            await self.inner.read([replace(transfer, buffers=copies, digests=None)])
            left = sum(map(len, copies)) // 2
            for copy, buffer in zip(copies, transfer.buffers, strict=True):
                part = min(left, len(copy))
                copy[:part] = buffer[:part]
                left -= part
        return replace(transfer, buffers=copies)


def _spoil_read(fault: Fault, transfer: Transfer, outcome: Outcome) -> Outcome:
    """Spoil a block that was read; return its outcome."""
    if fault.kind is FaultKind.IO_ERROR:
        # Whoever uses it all the same gets neither the old bytes nor the right ones.
        for buffer in transfer.buffers:
            buffer[:] = b"\xee" * len(buffer)
        return Outcome.IO_ERROR
    if fault.kind is FaultKind.SHORT_READ:
        left = sum(map(len, transfer.buffers)) // 2
        for buffer in transfer.buffers:
            part = min(left, len(buffer))
            buffer[part:] = bytes(len(buffer) - part)
            left -= part
        return Outcome.IO_ERROR
    if fault.kind is FaultKind.BIT_FLIP and outcome is Outcome.OK:
        transfer.buffers[0][fault.bit // 8] ^= 1 << fault.bit % 8
        found = digest_shards(transfer.buffers, transfer.lengths)
        if transfer.digests is not None and found != tuple(transfer.digests):
            return Outcome.CORRUPT
    return outcome
