"""The effective hit rate as engines' outputs tell it, and as a daemon shows it in three places.

Effective means: of all prompt tokens, those that were not computed, because kvstore or the engine's
own prefix cache had them. The daemon knows it from what clients report with their heartbeats.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.client import Client

__all__ = ["HitRates", "read_hit_rates"]

# Points (percent) that any two of them may differ by.
TOLERANCE_POINTS: Final = 0.1
_HTTP_SECONDS: Final = 30.0
_GAUGE: Final = "kvstore_effective_hit_ratio "


@dataclass(frozen=True, slots=True)
class HitRates:
    """One daemon's, from 0 to 1.

    Attributes:
        daemon: its name in the demo.
        outputs: cached tokens / prompt tokens of the engines' own outputs.
        shown: the same in `stats`, on the status page and in Prometheus, by these names.
    """

    daemon: str
    outputs: float
    shown: Mapping[str, float] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Say what is shown wrongly; None when all agree."""
        wrong = [
            f"{place} says {rate:.2%}"
            for place, rate in self.shown.items()
            if abs(rate - self.outputs) * 100 > TOLERANCE_POINTS
        ]
        if not wrong:
            return None
        return (
            f"{self.daemon}: the effective hit rate is {self.outputs:.2%} by the engines' outputs,"
            f" but {', '.join(wrong)}"
        )

    def __str__(self) -> str:
        """Return what the demo prints."""
        shown = ", ".join(f"{place} {rate:.1%}" for place, rate in self.shown.items())
        return f"effective hit rate, {self.daemon}: engines' outputs {self.outputs:.1%} ({shown})"


def _ratio(usage: Mapping[str, Any]) -> float:
    reused = sum(usage[f"reused_tokens_{tier}"] for tier in ("gpu", "host", "disk"))
    return float((reused + usage["local_tokens"]) / (usage["prompt_tokens"] or 1))


def _fetch(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=_HTTP_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def read_hit_rates(
    daemon: str, client: Client, metrics: str, prompt_tokens: int, cached_tokens: int
) -> HitRates:
    """Look at all places of a daemon that nobody uses now.

    Args:
        daemon: its name in the demo.
        client: of the daemon.
        metrics: host:port that it serves metrics on.
        prompt_tokens: of all prompts since it started.
        cached_tokens: of these, not computed.
    """
    usage = client.stats().usage
    names = [name.name for name in usage.DESCRIPTOR.fields]
    page = json.loads(_fetch(metrics, "/status.json?since=1e9"))
    gauge = [
        float(line.removeprefix(_GAUGE))
        for line in _fetch(metrics, "/metrics").splitlines()
        if line.startswith(_GAUGE)
    ]
    return HitRates(
        daemon,
        cached_tokens / prompt_tokens,
        {
            "stats": _ratio({name: getattr(usage, name) for name in names}),
            "status page": _ratio(page["now"]["usage"]),
            "Prometheus": gauge[0] if gauge else 0.0,
        },
    )
