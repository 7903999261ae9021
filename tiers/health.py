"""What currently does not work in a tier, in words, until it works again."""

from __future__ import annotations

import logging

__all__ = ["Health"]

_log = logging.getLogger(__name__)


class Health:
    """Faults by kind of operation: a good read does not hide that writes fail."""

    def __init__(self, tier: str) -> None:
        """Start healthy; ``tier`` begins each line of the log."""
        self._tier = tier
        self._faults: dict[str, str] = {}

    @property
    def state(self) -> str:
        """``ok``, or ``degraded: `` and the oldest fault in one line."""
        for line in self._faults.values():
            return f"degraded: {line}"
        return "ok"

    def fails(self, kind: str, line: str) -> None:
        """Note a fault; logged when it is new."""
        if self._faults.get(kind) == line:
            return
        _log.warning("%s tier: %s", self._tier, line)
        self._faults[kind] = line

    def works(self, kind: str) -> None:
        """Note that a kind of operation works."""
        if self._faults.pop(kind, None) is not None:
            _log.info("%s tier: %s works again", self._tier, kind)

    def reset(self) -> None:
        """Forget all faults, after a probe that went well."""
        for kind in list(self._faults):
            self.works(kind)
