"""The answers of the last seconds, and what changed per second over them."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

__all__ = ["WINDOW_SECONDS", "History", "kvstore_tokens", "reused_tokens"]

# Clients report what they reused with their heartbeats, seconds apart: over less than that, rates
# would jump between nothing and too much.
WINDOW_SECONDS: Final = 5.0


def kvstore_tokens(usage: dict[str, Any]) -> int:
    """Return the prompt tokens that came from kvstore."""
    return sum(int(usage[f"reused_tokens_{tier}"]) for tier in ("gpu", "host", "disk"))


def reused_tokens(usage: dict[str, Any]) -> int:
    """Return the prompt tokens that nobody had to compute again."""
    return kvstore_tokens(usage) + int(usage["local_tokens"])


def _spaces(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {space["space"]["id"]: space for space in stats["spaces"]}


class History:
    """Answers of one daemon run, as `plain` values, not older than the window (or two)."""

    def __init__(self, window_s: float = WINDOW_SECONDS) -> None:
        """Keep answers for `window_s` seconds."""
        self._window_s = window_s
        self._answers: deque[dict[str, Any]] = deque()

    @property
    def now(self) -> dict[str, Any]:
        """The latest answer."""
        return self._answers[-1]

    @property
    def before(self) -> dict[str, Any]:
        """The oldest answer kept; the latest itself while there is no other."""
        return self._answers[0]

    @property
    def seconds(self) -> float:
        """Time between the two, by the daemon's clock: 0 while there is one answer only."""
        return float(self.now["uptime_seconds"] - self.before["uptime_seconds"])

    def add(self, stats: dict[str, Any]) -> None:
        """Take the next answer; of another run of the daemon, nothing before it counts."""
        if self._answers and self.now["boot_id"] != stats["boot_id"]:
            self._answers.clear()
        self._answers.append(stats)
        oldest = stats["uptime_seconds"] - self._window_s
        while len(self._answers) > 2 and self._answers[1]["uptime_seconds"] <= oldest:
            self._answers.popleft()

    def change(self, *path: str) -> int:
        """Return by how much a number grew: ``change("usage", "loaded_bytes")``."""

        def at(stats: dict[str, Any]) -> int:
            value: Any = stats
            for name in path:
                # Counts that are still zero are not sent.
                value = value.get(name, 0) if isinstance(value, dict) else 0
            return int(value)

        return at(self.now) - at(self.before)

    def tier_change(self, tier: str, name: str) -> int:
        """Return by how much a tier's number grew."""

        def at(stats: dict[str, Any]) -> int:
            return sum(int(t[name]) for t in stats["tiers"] if t["tier"] == tier)

        return at(self.now) - at(self.before)

    def usage_changes(self) -> dict[str, dict[str, int]]:
        """Return by how much each space's usage grew, by space id; new spaces grew from zero."""
        before = _spaces(self.before)
        grown: dict[str, dict[str, int]] = {}
        for space_id, space in _spaces(self.now).items():
            old = before.get(space_id, {"usage": {}})["usage"]
            grown[space_id] = {
                name: int(value) - int(old.get(name, 0))
                for name, value in space["usage"].items()
                if isinstance(value, int)
            }
        return grown

    def prefix_changes(self) -> dict[tuple[str, str], int]:
        """Return by how many requests each prefix grew, by the space's id and the root's key.

        One that the daemon had lost sight of in between counts anew.
        """

        def requests(stats: dict[str, Any]) -> dict[tuple[str, str], int]:
            return {(p["space_id"], p["root"]): int(p["requests"]) for p in stats["prefixes"]}

        before = requests(self.before)
        return {
            name: value - old if value >= (old := before.get(name, value)) else value
            for name, value in requests(self.now).items()
        }

    def rate(self, change: float) -> float | None:
        """Return a change per second; None while there is one answer only."""
        return change / self.seconds if self.seconds > 0 else None
