"""Stands in for `scripts/gpu/engine.py`: answers at once, finds what it has been asked for before."""

from __future__ import annotations

import json
import sys
from typing import Any


class _Fake:
    """Remembers prompts by seed; with a connector, a reset forgets only the engine's own copies."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._outside = settings["transfer"] is not None
        self._own: set[int] = set()
        self._stored: set[int] = set()
        self._on = True

    def answer(self, do: str, request: dict[str, Any]) -> dict[str, Any]:
        if do == "reset":
            self._own.clear()
            return {"tries": 1}
        if do == "switch":
            self._on = request["on"]
            return {"on": self._on}
        if do == "tails":
            return {"tokens": [[1], [2]]}
        if do == "decode":
            return {"ms": [10.0 + self._on] * 120}
        if do == "storm":
            found = {"0": [1, 2], "2": [3, 4]}
            return {"tokens": found, "cached_by_request": {}, "aborted": 1, "cached": 10}
        return self._prompts(do, **request)

    def _prompts(
        self, do: str, seed: int, count: int, tokens: int, max_tokens: int = 1
    ) -> dict[str, Any]:
        own = seed in self._own
        outside = not own and self._outside and seed in self._stored
        if self._on:
            self._stored.add(seed)
        self._own.add(seed)
        cached = [tokens if own or outside else 0] * count
        milliseconds = 4.0 if own else 5.0 if outside else 30.0
        if do == "together":
            return {"ms": count * milliseconds, "cached": cached}
        return {
            "ms": [milliseconds] * count,
            "tokens": [[seed] * max_tokens] * count,
            "cached": cached,
        }


def main() -> None:
    fake = _Fake(json.loads(sys.stdin.readline()))
    print(json.dumps({"start_seconds": 1.0}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(fake.answer(request.pop("do"), request)), flush=True)


if __name__ == "__main__":
    main()
