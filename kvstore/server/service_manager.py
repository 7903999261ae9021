"""What a service manager (systemd) is told: that the daemon serves, that it stops, that it lives.

The protocol is sd_notify(3): datagrams to the socket that `NOTIFY_SOCKET` names; without it nothing
is sent. With `WATCHDOG_USEC` the event loop says twice in that time that it lives: a daemon whose
loop hangs is killed and started again by the manager, and costs its users no more than a crash. A
manager that does not listen never keeps the daemon from anything: what cannot be sent is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServiceManager"]

log = logging.getLogger(__name__)

_EXTENSION_SECONDS: Final = 10
_MICROSECONDS: Final = re.compile("[0-9]{1,20}")
# More often than that nobody is watched; a loop that does nothing but say so is no help.
_SHORTEST_WATCH_SECONDS: Final = 0.1
# For what a manager must not miss. Its queue is short, and it reads at once.
_PATIENCE_SECONDS: Final = 1.0


class ServiceManager:
    """The manager that started this process, or none."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Find out whom to tell.

        Args:
            environment: of the process.
        """
        name = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket's name begins with a zero byte, which no variable can hold.
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self._beat_seconds = self._watchdog_seconds(environment) / 2
        self._beating: asyncio.TimerHandle | None = None
        self._warned = False

    @staticmethod
    def _watchdog_seconds(environment: Mapping[str, str]) -> float:
        """Return how often the manager wants to hear; 0: never."""
        text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        if not _MICROSECONDS.fullmatch(text) or (pid and pid != str(os.getpid())):
            return 0.0
        return max(int(text) / 1e6, _SHORTEST_WATCH_SECONDS) if int(text) else 0.0

    def ready(self, status: str) -> None:
        """Say that the daemon serves, and begin to say that it lives. Needs a running loop.

        Args:
            status: one line for `systemctl status`.
        """
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")
        if self._address and self._beat_seconds:
            self._beat()

    def stopping(self, seconds: float) -> None:
        """Say that the daemon stops, and how long that may take; it still lives meanwhile."""
        allowed = int((seconds + _EXTENSION_SECONDS) * 1e6)
        self._send(f"STOPPING=1\nSTATUS=saving and flushing\nEXTEND_TIMEOUT_USEC={allowed}")

    def close(self) -> None:
        """Say nothing more."""
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    def _beat(self) -> None:
        self._send("WATCHDOG=1", 0.0)
        self._beating = asyncio.get_running_loop().call_later(self._beat_seconds, self._beat)

    def _send(self, message: str, seconds: float = _PATIENCE_SECONDS) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(seconds)
                out.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            if not self._warned:
                log.warning("the service manager cannot be told: %s", error)
                self._warned = True
