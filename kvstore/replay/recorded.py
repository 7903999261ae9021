"""Reading what a daemon recorded; `kvstore.engine.recorder` says how its lines look.

A load stands for a request whose prompt has these blocks: what of them the tiers under test lack,
they take in, as the client would have computed and stored it. A store adds what no load named:
what was generated, mostly. A look touches nothing, and is left out.
"""

from __future__ import annotations

from typing import Any, Final

from kvstore.replay.request import Request, TraceSpace

__all__ = ["TRACE_VERSION", "Recording"]

TRACE_VERSION: Final = 1

_DIGITS: Final = 16


def _keys(text: Any) -> list[bytes]:
    """Return the keys of a line.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(text, str) or len(text) % _DIGITS:
        raise ValueError(f"keys: no multiple of {_DIGITS} hexadecimal digits")
    try:
        data = bytes.fromhex(text)
    except ValueError as error:
        raise ValueError("keys: are no hexadecimal digits") from error
    return [data[at : at + _DIGITS // 2] for at in range(0, len(data), _DIGITS // 2)]


def _count(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: {value!r} is no number from {least} on")
    return value


class Recording:
    """What the lines of a recording build on.

    Attributes:
        spaces: kinds of blocks that were met so far.
        dropped: events that the daemon could not record.
    """

    def __init__(self) -> None:
        """Before the first line."""
        self.spaces: list[TraceSpace] = []
        self.dropped = 0
        # Number in the file → index into `spaces`: a restart of the daemon numbers anew.
        self._numbers: dict[int, int] = {}
        # A restart begins its time anew, too.
        self._began = self._latest = 0.0

    def request(self, fields: dict[str, Any]) -> Request | None:
        """Return the request of a line; None: the line has none.

        Raises:
            ValueError: the line is wrong.
        """
        if "kvstore_trace" in fields:
            version = fields["kvstore_trace"]
            if version != TRACE_VERSION:
                raise ValueError(f"kvstore_trace: version {version!r}, not {TRACE_VERSION}")
            self._began, self._numbers = self._latest, {}
            return None
        op = fields.get("op")
        if op is None and "dropped" in fields:
            self.dropped += _count(fields, "dropped", 1)
            return None
        number = _count(fields, "space", 0)
        if op is None:
            block = (_count(fields, "block_tokens", 1), _count(fields, "block_bytes", 1))
            self._numbers[number] = len(self.spaces)
            self.spaces.append(TraceSpace(*block))
            return None
        if op not in ("load", "look", "store"):
            raise ValueError(f"op: {op!r} is none of load, look, store")
        if number not in self._numbers:
            raise ValueError(f"space: {number} was not described before")
        at = fields.get("at")
        if not isinstance(at, int | float) or not 0 <= at < 1e15:
            raise ValueError(f"at: {at!r} is no time since the beginning")
        self._latest = max(self._latest, self._began + at)
        if op == "look":
            return None
        keys, parent = _keys(fields.get("keys")), _keys(fields.get("parent", ""))
        space = self._numbers[number]
        return Request(
            at=self._latest,
            keys=keys,
            tokens=len(keys) * self.spaces[space].block_tokens,
            space=space,
            parent=parent[0] if parent else None,
            loads=op == "load",
        )
