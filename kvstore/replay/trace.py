"""Traces: requests read one at a time from a file or a pipe.

Three formats, told apart by the first line. Each line is one JSON object.

mooncake    ``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids`` (one a block of 512 tokens,
            the last one may be partial). Source: Mooncake, FAST'25 release.
bailian     the same with ``timestamp`` in seconds and blocks of 16 tokens, and with ``chat_id``,
            ``turn`` and others. Source: Qwen-Bailian usage traces, ATC'25.
kvstore     what a daemon recorded (``kvstore serve --record``); see `kvstore.engine.recorder`.

Ids of a block become keys by chaining, as `chain_keys` makes them of tokens: equal ids after
different prefixes are different blocks, whether or not the trace's own ids are chained already.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final

import xxhash

from kvstore.errors import InvalidRequest
from kvstore.replay.recorded import Recording
from kvstore.replay.request import Request, TraceSpace

__all__ = ["Trace", "TraceFormat", "open_trace"]

_digest: Final = xxhash.xxh3_128_digest


class TraceFormat(StrEnum):
    """Formats of traces."""

    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    KVSTORE = "kvstore"


_BLOCK_TOKENS: Final = {TraceFormat.MOONCAKE: 512, TraceFormat.BAILIAN: 16}
_SECONDS: Final = {TraceFormat.MOONCAKE: 1e-3, TraceFormat.BAILIAN: 1.0}


class Trace:
    """An open trace; iterating over it reads it once.

    Attributes:
        name: what the user called it.
        format: its format.
        spaces: kinds of blocks that were met so far.
    """

    def __init__(
        self,
        name: str,
        stream: IO[str],
        *,
        token_bytes: int,
        block_tokens: int | None = None,
    ) -> None:
        """Read the first line.

        Args:
            name: for messages.
            stream: its lines.
            token_bytes: KV bytes of one token.
            block_tokens: tokens per block; None: what the format says.

        Raises:
            InvalidRequest: the first line is of no known format.
        """
        self.name = name
        self._stream = stream
        self._line = 1
        self._ahead: str | None = None
        self._first = self._read()
        if not self._first:
            raise InvalidRequest(name, "is empty")
        fields = self._object(self._first)
        self.format = self._detect(fields)
        if self.format is TraceFormat.KVSTORE:
            self._recording = Recording()
            self.spaces = self._recording.spaces
            self._begin_recording(fields)
            return
        tokens = block_tokens or _BLOCK_TOKENS[self.format]
        self.spaces = [TraceSpace(tokens, tokens * token_bytes)]
        self._unit = _SECONDS[self.format]

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @property
    def dropped(self) -> int:
        """How many events a recording lacks, as far as it was read: it says so, or is cut short."""
        return self._recording.dropped if self.format is TraceFormat.KVSTORE else 0

    def _wrong(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"{self.name}:{self._line}", problem)

    def _object(self, line: str) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"is no JSON ({error})") from error
        if not isinstance(value, dict):
            raise self._wrong("is no JSON object")
        return value

    def _detect(self, first: dict[str, Any]) -> TraceFormat:
        if "kvstore_trace" in first:
            return TraceFormat.KVSTORE
        if "hash_ids" not in first:
            raise self._wrong("is of no known format: a request has `hash_ids`")
        bailian = "chat_id" in first or "turn" in first
        return TraceFormat.BAILIAN if bailian else TraceFormat.MOONCAKE

    def _begin_recording(self, fields: dict[str, Any]) -> None:
        """Read on until the first kind of blocks is known."""
        self._recorded(fields)
        while not self.spaces:
            self._line += 1
            self._first = self._read()
            if not self._first:
                raise InvalidRequest(self.name, "holds no requests")
            if not self._first.isspace():
                self._recorded(self._recorded_object(self._first))
        self._line += 1
        self._first = self._read()

    def _recorded_object(self, line: str) -> dict[str, Any]:
        """Return the object of a recording's line; of one that is cut short, an event that is lost."""
        try:
            return self._object(line)
        except InvalidRequest:
            # A kill or a full disk cut it: nothing follows, or the first line of the next daemon.
            self._ahead = self._read()
            if self._ahead and not self._ahead.startswith('{"kvstore_trace"'):
                raise
            return {"dropped": 1}

    def _recorded(self, fields: dict[str, Any]) -> Request | None:
        try:
            return self._recording.request(fields)
        except ValueError as error:
            raise self._wrong(str(error)) from error

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests.

        Raises:
            InvalidRequest: a line is wrong; the message names file and line.
        """
        latest = 0.0
        line = self._first
        while line:
            if not line.isspace():
                if self.format is TraceFormat.KVSTORE:
                    request = self._recorded(self._recorded_object(line))
                else:
                    request = self._request(self._object(line))
                if request is not None:
                    # The clock does not run backwards, whatever the trace says.
                    latest = request.at = max(latest, request.at)
                    yield request
            self._line += 1
            line = self._read()

    def _read(self) -> str:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        try:
            return self._stream.readline()
        except UnicodeDecodeError as error:
            raise self._wrong("is no text") from error
        except (EOFError, OSError) as error:
            raise self._wrong(f"cannot be read ({error})") from error

    def _request(self, fields: dict[str, Any]) -> Request | None:
        ids = fields.get("hash_ids")
        if not isinstance(ids, list):
            raise self._wrong("hash_ids: a list of numbers is missing")
        try:
            keys = []
            key = b""
            for number in ids:
                key = _digest(key + number.to_bytes(8, "little"))
                keys.append(key)
        except (AttributeError, OverflowError, TypeError) as error:
            raise self._wrong(f"hash_ids: {number!r} is no number of 64 bits") from error
        held = len(keys) * self.spaces[0].block_tokens
        tokens = fields.get("input_length", held)
        if type(tokens) is not int or tokens < 0:
            raise self._wrong(f"input_length: {tokens!r} is no number of tokens")
        at = fields.get("timestamp", 0)
        if not isinstance(at, int | float) or not 0 <= at < 1e15:
            raise self._wrong(f"timestamp: {at!r} is no time since the beginning")
        return Request(at * self._unit, keys, tokens)


def open_trace(path: str, *, token_bytes: int, block_tokens: int | None = None) -> Trace:
    """Open a trace.

    Args:
        path: a file, also one that gzip compressed; ``-`` is standard input.
        token_bytes: KV bytes of one token.
        block_tokens: tokens per block; None: what the format says.

    Raises:
        InvalidRequest: it cannot be read, or is of no known format.
    """
    if path == "-":
        stream: IO[str] = sys.stdin
    else:
        try:
            with Path(path).open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
            opener: Any = gzip.open if packed else open
            stream = opener(path, "rt", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("trace", f"{path}: {error.strerror}") from error
    try:
        return Trace(path, stream, token_bytes=token_bytes, block_tokens=block_tokens)
    except InvalidRequest:
        stream.close()
        raise
