"""The disk's budget: bytes that may be written in any 24 hours, to spare the SSD.

What was written is kept by the hour; the hours that are more than a day ago count no more. The time
is the daemon's own (`steady_clock`): no change of the wall clock gives anything away.

The record survives restarts: `disk-budget` in the state directory, one line of JSON:

    {"version": 1, "seconds": own time, "boot": boot's id, "clock": seconds since boot,
     "wall": Unix time, "hours": {"hour": bytes, …}, "check": …}

`check` is the XXH3-64 of the line without it. A record that is damaged counts as a day's budget spent in the last hour, one of a
later version as the same: a wrong guess must not cost the SSD its life.

Charging protocol

1. Bytes are added to the hour, some ahead, so that few groups wait for the record.
2. The record is written to a temporary file, synced, renamed, the directory synced.
3. Only now as many bytes may be written to the disk.

Killed after 2, what was charged counts as written, also what never was. A stop in order gives back
what was not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import TYPE_CHECKING, Final

import xxhash

from kvstore.engine.steady_clock import Reading, SteadyClock
from kvstore.regular_file import read_regular
from kvstore.syncpoint import reach
from kvstore.tiers.pool_copy import undisturbed
from kvstore.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DiskBudget"]

log = logging.getLogger(__name__)

_VERSION: Final = 1
_HOUR: Final = 3600.0
_HOURS: Final = 24
# Charged ahead, at least and as a part of the budget.
_AHEAD_BYTES: Final = 64 * MIB
_AHEAD_PART: Final = 64


class DiskBudget:
    """How much may still be written. Loop thread only, but for the record.

    Attributes:
        day_bytes: what may be written in 24 hours.
    """

    def __init__(
        self,
        path: Path,
        day_bytes: int,
        clock: SteadyClock | None = None,
    ) -> None:
        """Read the record, if there is one. Blocks.

        Args:
            path: of the record.
            day_bytes: above 0.
            clock: seconds, over restarts; None: the machine's.
        """
        self.day_bytes = day_bytes
        self._path = path
        self._clock = SteadyClock() if clock is None else clock
        self._hours: dict[int, int] = {}
        self._ahead = 0  # of what is charged, not written yet
        self._saving = asyncio.Lock()
        self._warned = False
        self._load()

    @property
    def left_bytes(self) -> int:
        """What may be written now; never negative. Any thread."""
        return self._free() + self._ahead

    def affordable(self, block_bytes: int) -> int:
        """Return how many blocks may be written of what is charged already."""
        return self._ahead // block_bytes

    def spend(self, written_bytes: int) -> None:
        """Bytes that were charged are written."""
        self._ahead -= written_bytes

    async def charge(self, wanted_bytes: int) -> None:
        """Charge ahead, durably, until so much may be written, as far as the budget goes."""
        async with self._saving:
            missing = wanted_bytes - self._ahead
            if missing <= 0:
                return
            self._forget()
            taken = min(self._free(), max(missing, _AHEAD_BYTES, self.day_bytes // _AHEAD_PART))
            if taken:
                self._add(taken)
                await self._save()
                self._ahead += taken

    async def overdraw(self, written_bytes: int) -> None:
        """Charge what is written in any case."""
        async with self._saving:
            self._add(written_bytes)
            await self._save()

    async def close(self) -> None:
        """Give back what was charged and not written."""
        async with self._saving:
            ahead, self._ahead = self._ahead, 0
            for hour in sorted(self._hours, reverse=True):
                back = min(ahead, self._hours[hour])
                self._hours[hour] -= back
                ahead -= back
            await self._save()

    def _add(self, written_bytes: int) -> None:
        hour = int(self._clock.now() // _HOUR)
        self._hours[hour] = self._hours.get(hour, 0) + written_bytes

    def _free(self) -> int:
        oldest = self._oldest()
        spent = sum(count for hour, count in list(self._hours.items()) if hour >= oldest)
        return max(0, self.day_bytes - spent)

    def _oldest(self) -> int:
        """Return the first hour that counts: it began, and did not end, a day ago."""
        return int(self._clock.now() // _HOUR) - _HOURS

    def _forget(self) -> None:
        """Drop hours that ended a day ago."""
        oldest = self._oldest()
        for hour in [h for h in self._hours if h < oldest]:
            del self._hours[hour]

    def _load(self) -> None:
        try:
            text = read_regular(self._path).decode()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            self._distrust(str(error))
            return
        try:
            record = json.loads(text)
            check, version = record.pop("check"), record["version"]
            if check != _check(record) or version != _VERSION:
                self._distrust("its checksum does not hold, or a later release wrote it")
                return
            hours = {int(hour): int(count) for hour, count in record["hours"].items()}
            last = Reading(
                float(record["seconds"]),
                float(record["clock"]),
                float(record["wall"]),
                str(record["boot"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._distrust(str(error))
            return
        self._hours = hours
        self._clock.resume(last)

    def _distrust(self, why: str) -> None:
        log.warning("disk budget: %s: %s; a day's budget counts as spent", self._path, why)
        self._add(self.day_bytes)

    async def _save(self) -> None:
        now = self._clock.read()
        record = {
            "version": _VERSION,
            "seconds": now.seconds,
            "boot": now.boot,
            "clock": now.clock,
            "wall": now.wall,
            "hours": {str(hour): count for hour, count in sorted(self._hours.items())},
        }
        text = json.dumps({**record, "check": _check(record)}) + "\n"
        try:
            await undisturbed(asyncio.ensure_future(asyncio.to_thread(_replace, self._path, text)))
        except OSError as error:
            # Counting goes on; only what a crash would make of it is worse.
            if not self._warned:
                log.warning("disk budget: cannot save %s: %s", self._path, error)
            self._warned = True
        else:
            self._warned = False


def _check(record: dict[str, object]) -> int:
    return int(xxhash.xxh3_64_intdigest(json.dumps(record).encode()))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    reach("budget.synced")
    temporary.replace(path)
    reach("budget.renamed")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
