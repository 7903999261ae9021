"""Slabs that are being given up while the process goes on with other things.

Unpinning a slab holds the driver's lock, and whoever unpins rests in between (`mapped.Pins`): all slabs of
a pool take seconds then. No thread that copies, or hears from the daemon, can be kept for so long.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Closing"]

_log = logging.getLogger(__name__)


class Closing:
    """A thread that works off calls in order, and is there while there are any."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._guard = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, call: Callable[[], None]) -> None:
        """Call it on the thread, after those before. Returns at once."""
        with self._guard:
            self._calls.append(call)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="kvstore-unmap", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._calls:
                    self._running = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001 - the boundary
                # The other slabs are to go all the same.
                _log.exception("memory of the daemon was not given up")
