"""What is set for spaces and blocks, in LMDB: pins, limits, and when blocks were used.

Each call is one transaction, durable on return: killed before it, what was set before is there,
killed after it, the new.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import UnknownSpace
from kvstore.index import records
from kvstore.index.lmdb_env import LmdbEnv
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.index.limits import SpaceLimits
    from kvstore.index.records import PinRecord, SpaceRecord, UsesRecord

__all__ = ["StoredSettings"]


class StoredSettings:
    """The part of the store that people set; spaces are known by number here.

    Attributes:
        damaged: records skipped so far by `open`, `pins`, `limits`, `uses` and `load_blocks`.
    """

    def __init__(self, directory: Path) -> None:
        """Use `MetaStore.open` or `MetaStore.open_or_reset`."""
        self._directory = directory
        self._env = LmdbEnv(directory)
        self._spaces: dict[bytes, SpaceRecord] = {}
        self._ids: dict[bytes, bytes] = {}
        self._format = 0
        self.damaged = 0

    def pins(self) -> list[PinRecord]:
        """Return every intact pin, also expired ones."""
        with self._env.use():
            found: list[PinRecord] = []
            for space_id, name, value in self._records(records.PINS):
                space = self._spaces.get(space_id)
                size = len(name) if space is None else space.spec.key_bytes
                try:
                    pin = records.decode_pin(space_id, name, value, size, str(self._directory))
                    found.append(pin)
                except records.DamagedRecord:
                    self.damaged += 1
            return found

    def put_pins(self, pins: Sequence[PinRecord]) -> None:
        """Add or replace pins, all or none, durably.

        Raises:
            UnknownSpace: a pin's space was never put; nothing changed.
            StoreDamaged: nothing changed.
        """
        with self._env.use():
            items = [
                (self._key(p.space_id, records.pin_name(p.key, p.owner)), records.encode_pin(p))
                for p in pins
            ]
            if any(pin.owner for pin in pins):
                self._need_format(records.FORMAT_VERSION)
            self._env.write(records.PINS, lambda txn: txn.cursor().putmulti(items))
            reach("pins.committed")

    def delete_pins(self, pins: Sequence[tuple[bytes, bytes]]) -> None:
        """Remove pins, all or none, durably; unknown ones are ignored.

        Args:
            pins: space id and `pin_name` of each.

        Raises:
            StoreDamaged: nothing changed.
        """
        with self._env.use():
            keys = [self._key(*name) for name in pins if name[0] in self._spaces]
            self._env.write(records.PINS, lambda txn: [txn.delete(key) for key in keys])

    def limits(self) -> dict[bytes, SpaceLimits]:
        """Return the limits of every space that has some, by space id."""
        with self._env.use():
            found: dict[bytes, SpaceLimits] = {}
            for space_id, _, value in self._records(records.LIMITS):
                try:
                    found[space_id] = records.decode_limits(space_id, value, str(self._directory))
                except records.DamagedRecord:
                    self.damaged += 1
            return found

    def put_limits(self, space_id: bytes, limits: SpaceLimits) -> None:
        """Replace a space's limits, durably.

        Raises:
            UnknownSpace: it was never put; nothing changed.
            StoreDamaged: nothing changed.
        """
        with self._env.use():
            key, value = self._key(space_id, b""), records.encode_limits(space_id, limits)
            self._need_format(records.FORMAT_VERSION)
            self._env.write(
                records.LIMITS, lambda txn: txn.put(key, value) if limits else txn.delete(key)
            )
            reach("limits.committed")

    def uses(self) -> UsesRecord | None:
        """Return when blocks were used, as it was saved last; None: never, or it is damaged."""
        with self._env.use():
            value = self._env.get(records.META, records.USES_KEY)
            try:
                return None if value is None else records.decode_uses(value, str(self._directory))
            except records.DamagedRecord:
                self.damaged += 1
                return None

    def put_uses(self, uses: UsesRecord) -> None:
        """Save when blocks were used, durably.

        Raises:
            StoreDamaged: nothing changed.
        """
        value = records.encode_uses(uses)
        with self._env.use():
            self._need_format(records.FORMAT_VERSION)
            self._env.write(records.META, lambda txn: txn.put(records.USES_KEY, value))

    def _need_format(self, version: int) -> None:
        """See to it that releases refuse this environment which do not know what it will hold."""
        if self._format < version:
            value = records.encode_format(version)
            self._env.write(records.META, lambda txn: txn.put(records.FORMAT_KEY, value))
            self._format = version

    def _records(self, name: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield space id (empty if there is no such space), key, value."""
        ids = self._ids
        for key, value in self._env.items(name):
            yield ids.get(key[:4], b""), key[4:], value

    def _space(self, space_id: bytes) -> SpaceRecord:
        try:
            return self._spaces[space_id]
        except KeyError:
            raise UnknownSpace(f"space {space_id.hex()[:16]} was never put") from None

    def _key(self, space_id: bytes, key: bytes) -> bytes:
        return records.number_key(self._space(space_id).number) + key

    def _remember(self, record: SpaceRecord) -> SpaceRecord:
        self._spaces[record.space_id] = record
        self._ids[records.number_key(record.number)] = record.space_id
        return record
