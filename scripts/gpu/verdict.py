"""Say what a result of `compare.py` comes to: each figure beside what it must be.

    python3 scripts/gpu/verdict.py result.json

A row without a figure was not measured, or its rounds were not valid.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = tuple[str, float | None, float, bool | None]


def _rounds(row: dict[str, Any], what: str, first: int = 0) -> list[float]:
    """Return the medians of the valid rounds of a kind, from one on."""
    return [
        value["p50"]
        for name, value in row.items()
        if name.startswith(f"{what}_")
        and isinstance(value, dict)
        and "invalid" not in value
        and int(name.removeprefix(f"{what}_")) >= first
    ]


def _best(row: dict[str, Any] | None, what: str) -> float | None:
    # Medians over rounds that were taken in turns with the other engines'.
    rounds = _rounds(row or {}, what)
    return statistics.median(rounds) if rounds else None


def _over_own(row: dict[str, Any] | None, first: int = 0) -> float | None:
    rounds = _rounds(row or {}, "warm", first)
    warm = statistics.median(rounds) if rounds else None
    own = (row or {}).get("own_hit", {}).get("p50")
    return None if warm is None or own is None else warm - own


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def rows(result: dict[str, Any]) -> list[Row]:
    """Return (what, figure, limit, whether it is within) for everything that has a limit."""
    parts = result["parts"]
    ttft = parts.get("ttft", {})
    ours, pool, peer = (ttft.get(name) for name in ("ours", "ours_pool", "pegaflow"))
    cost = parts.get("cost", {}).get("ours", {})
    restart = parts.get("restart", {}).get("ours", {})
    first = restart.get("new_engine", {})
    correct = parts.get("correct", {}).get("ours", {})
    storm = correct.get("storm", {})
    memory = parts.get("memory", {}).get("ours_pool", {})

    def flag(value: Any, wanted: Callable[[Any], bool]) -> float | None:
        return None if value is None else float(wanted(value))

    found: list[tuple[str, float | None, float]] = [
        ("warm TTFT, p50, over PegaFlow's", _ratio(_best(ours, "warm"), _best(peer, "warm")), 1.0),
        (
            "eight at once, total, over PegaFlow's",
            _ratio(_best(ours, "together"), _best(peer, "together")),
            1.0,
        ),
        # Loads are asynchronous; one that the engine waits for had 15.
        ("warm TTFT beyond its own GPU hit, ms", _over_own(ours), 30.0),
        # The first round comes from host memory: it is what brings blocks up.
        ("the same from the GPU pool, ms", _over_own(pool, first=1), 5.0),
        (
            "first warm request of a new engine over later ones",
            None if "invalid" in first else first.get("first_over_later"),
            1.3,
        ),
        ("cold TTFT, p50, cache on over off", cost.get("cold_ratio"), 1.01),
        ("inter-token latency, cache on over off", cost.get("itl_mean_ratio"), 1.02),
    ]
    listed: list[Row] = [
        (what, figure, limit, None if figure is None else figure <= limit)
        for what, figure, limit in found
    ]
    truths = [
        ("tokens equal to a hit in the engine's cache", correct.get("tokens_loaded_equal_own_hit")),
        ("the same from disk", correct.get("tokens_from_disk_equal_own_hit")),
        (
            "tokens of the storm right",
            storm["equal"] == storm["compared"] if storm.get("compared") else None,
        ),
        (
            "no lease left after the storm",
            None if "leases_after_storm" not in correct else not correct["leases_after_storm"],
        ),
        (
            "GPU memory zero after the end",
            None if "after_daemon_mib" not in memory else memory["after_daemon_mib"] <= 0,
        ),
    ]
    accounts = [
        account
        for storm in parts.get("storm", {}).values()
        for account in storm.get("accounts", {}).values()
    ]
    if accounts:
        copies = sum(
            n for a in accounts for what, n in a["copies"].items() if what.endswith(" wrong")
        )
        strange = [account["foreign"] for account in accounts if "foreign" in account]
        truths += [
            ("every copy of the storms right", not copies),
            (
                "what was loaded in the storms was computed for its key",
                not any(strange) if strange else None,
            ),
        ]
    for what, truth in truths:
        value = flag(truth, bool)
        listed.append((what, value, 1.0, None if value is None else value == 1.0))
    return listed


def main() -> int:
    """Print the table; the exit code says whether everything that was measured is within limits."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: verdict.py RESULT.json, as compare.py wrote it")
    result = json.loads(Path(sys.argv[1]).read_text())
    missed = 0
    for what, figure, limit, within in rows(result):
        shown = "not measured" if figure is None else f"{figure:.3g}"
        verdict = {True: "ok", False: "MISSED", None: ""}[within]
        missed += within is False
        print(f"{what:52} {shown:>13}  limit {limit:<6g} {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
