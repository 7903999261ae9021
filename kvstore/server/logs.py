"""What the daemon prints: log lines on standard error, its ready line on standard output.

With ``log_format = "json"`` all of it is `kvstore.log_lines`, the ready line included.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kvstore import log_lines
from kvstore.server import present_call
from kvstore.server.answers import has_left

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.config import ServeConfig

__all__ = ["say_ready", "set_up_logging"]

log = logging.getLogger("kvstore")


def _demote_departures(record: logging.LogRecord) -> bool:
    """Let gRPC mention a client that left during a call, but not as an error with a traceback."""
    if record.exc_info and has_left(record.exc_info[1]):
        record.exc_info = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger().isEnabledFor(logging.DEBUG)
    return True


def set_up_logging(config: ServeConfig) -> None:
    """Log as the configuration says, from here on."""
    if config.log_format == "json":
        handler = log_lines.install(present_call.about)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_demote_departures)


def say_ready(config: ServeConfig, fields: Mapping[str, str]) -> str:
    """Print the one line that says that the daemon serves, and with what; return its text.

    Where it cannot be printed, on a full disk say, the log has it.
    """
    text = " ".join(["kvstore ready", *(f"{name}={value}" for name, value in fields.items())])
    as_json = config.log_format == "json"
    line = log_lines.line("info", text, event="ready", **fields) if as_json else text
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("%s (standard output: %s)", text, error.strerror)
        # What is left in its buffer would fail again when the process ends.
        sys.stdout = None
    return text
