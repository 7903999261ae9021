"""What was learned about speeds, for the time after a restart.

An engine that has just started does not know how fast it computes, and a daemon not how fast its
disk is; both decide then whether a disk is waited for. So the daemon remembers what clients of a
space measured, and what its own disk store came to, in `speeds` in the state directory, one line of JSON:

    {"version": 1, "prefill": {space id: {size class: tokens per second}},
     "disk": {store id: [bytes per second, seconds of latency]}, "check": …}

`check` is the XXH3-64 of the line without it. Nothing rests on this but good guesses: it is written
now and then without a sync, replaced as a whole, and whatever is wrong with it is forgotten. Nor does
a start wait for what is there in its place, a FIFO say, or take in more than a record can be.
"""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvstore.rates import Rates
from kvstore.regular_file import read_regular

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Speeds"]

log = logging.getLogger(__name__)

_VERSION: Final = 1
# The spaces whose rates were reported last.
_MOST_SPACES: Final = 1000
_MOST_STORES: Final = 16
# A record of so many spaces takes a tenth of it.
_MOST_BYTES: Final = 16 << 20


class Speeds:
    """Rates by space, and by disk store. Loop thread only, but for `write`."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what was remembered.

        Args:
            path: of the record; None: nothing outlives this object.
        """
        self._path = path
        self._prefill: dict[bytes, Rates] = {}
        self._disk: dict[bytes, tuple[float, float]] = {}
        self._changed = False
        if path is not None:
            try:
                self._read(read_regular(path, _MOST_BYTES))
            except FileNotFoundError:
                pass
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                OverflowError,
                RecursionError,
            ) as error:
                self._prefill, self._disk = {}, {}
                log.info("%s is not used, speeds are measured anew: %s", path, error)

    def _read(self, data: bytes) -> None:
        line = json.loads(data)
        check = line.pop("check")
        if check != _check(line) or line["version"] != _VERSION:
            raise ValueError("it is damaged, or of a later version")
        for space_id, means in line["prefill"].items():
            known = {int(size): float(rate) for size, rate in means.items()}
            self._prefill[bytes.fromhex(space_id)] = Rates(known)
        for store_id, (rate, latency) in line["disk"].items():
            if not (0 < rate < math.inf and 0 <= latency < math.inf):
                raise ValueError("a disk's speed is none")
            self._disk[bytes.fromhex(store_id)] = (float(rate), float(latency))

    def prefill(self, space_id: bytes, tokens: int) -> float:
        """Return tokens per second for a prompt of that size; 0 when nobody has reported any."""
        rates = self._prefill.get(space_id)
        return rates.rate(tokens) if rates is not None else 0.0

    def computed(self, space_id: bytes, tokens: int, rate: float) -> None:
        """A client of a space says how fast it computes a prompt of that size."""
        rates = self._prefill.pop(space_id, None) or Rates()
        rates.note(tokens, rate)
        self._prefill[space_id] = rates
        while len(self._prefill) > _MOST_SPACES:
            del self._prefill[next(iter(self._prefill))]
        self._changed = True

    def disk(self, store_id: bytes) -> tuple[float, float] | None:
        """Return a disk store's bytes per second and seconds of latency, if they are known."""
        return self._disk.get(store_id)

    def read_from(self, store_id: bytes, rate: float, latency: float) -> None:
        """Take note of what reading from a disk store comes to."""
        if self._disk.pop(store_id, None) != (rate, latency):
            self._changed = True
        self._disk[store_id] = (rate, latency)
        while len(self._disk) > _MOST_STORES:
            del self._disk[next(iter(self._disk))]

    def line(self) -> bytes | None:
        """Return what is to be written; None when that is written already."""
        if not self._changed or self._path is None:
            return None
        self._changed = False
        line: dict[str, Any] = {
            "version": _VERSION,
            "prefill": {
                space_id.hex(): {str(size): rate for size, rate in rates.means().items()}
                for space_id, rates in self._prefill.items()
            },
            "disk": {store_id.hex(): list(speed) for store_id, speed in self._disk.items()},
        }
        return json.dumps(line | {"check": _check(line)}).encode()

    def write(self, line: bytes) -> None:
        """Replace the record. Blocks; any thread.

        Raises:
            OSError: the old one is still there.
        """
        assert self._path is not None
        scratch = self._path.with_name(self._path.name + ".new")
        # Whatever a crash, or anybody, left in its place is not written into.
        scratch.unlink(missing_ok=True)
        with scratch.open("xb") as out:
            out.write(line)
        scratch.replace(self._path)


def _check(line: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(line, sort_keys=True).encode())
