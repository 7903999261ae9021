"""Log lines as JSON, one object a line: what `serve --log-format json` prints.

| field | what |
|---|---|
| `time` | RFC 3339, UTC, milliseconds |
| `level` | `debug`, `info`, `warning`, `error`, `critical` |
| `logger` | module that says it |
| `message` | one line, as the text format has it |
| `call`, `client`, `request`, `trace_id` | of the call that the line is about, if it is about one |
| `exception` | traceback |

Further fields belong to single lines. A program whose every line is to be JSON has other ways to
print than by its logger: `install` takes warnings, and errors that nobody catches, in as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

__all__ = ["JsonFormatter", "install", "line"]

# What every record has: anything else was given as `extra`, a field of that line.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1e3) % 1000:03d}Z"


def line(level: str, message: str, **fields: Any) -> str:
    """Return a line that no logger prints, in the same form."""
    values = {"time": _time(time.time()), "level": level, "logger": "kvstore", "message": message}
    return json.dumps({**values, **fields}, default=str)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, about: Callable[[], Mapping[str, str]] = dict) -> None:
        """Prepare.

        Args:
            about: returns what the present call adds to a line; runs where the line is logged.
        """
        super().__init__()
        self._about = about

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        values: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._about(),
        }
        extra = vars(record)
        values.update({name: extra[name] for name in extra.keys() - _STANDARD - values.keys()})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = record.stack_info
        return json.dumps(values, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """Prints lines; one that cannot be made is told about in a line."""

    def handleError(self, record: logging.LogRecord) -> None:
        text = f"a line of {record.pathname}:{record.lineno} could not be logged"
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(line("error", text, exception=traceback.format_exc()) + "\n")
            self.flush()


def install(about: Callable[[], Mapping[str, str]] = dict) -> logging.StreamHandler[TextIO]:
    """Return a handler for standard error, and make logged lines of what is printed past loggers."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter(about))
    logging.captureWarnings(True)
    log = logging.getLogger("kvstore")

    def uncaught(kind: Any, error: Any, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        log.critical("an error that nobody caught", exc_info=(kind, error, trace))

    def in_thread(hook: threading.ExceptHookArgs) -> None:
        name = hook.thread.name if hook.thread is not None else "?"
        found: Any = (hook.exc_type, hook.exc_value, hook.exc_traceback)
        log.error("thread %s ended by an error", name, exc_info=found)

    def unraisable(hook: Any) -> None:
        found: Any = (hook.exc_type, hook.exc_value, hook.exc_traceback)
        log.error("%s: %r", hook.err_msg or "an error was ignored", hook.object, exc_info=found)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = unraisable
    return handler
