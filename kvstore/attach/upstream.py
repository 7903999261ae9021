"""The client's half of the Attach stream: messages in order, and a heartbeat when one is due.

gRPC pulls the iterator from a thread of its own, which therefore is the heartbeat's thread: it
beats however busy the others are, as long as Python switches threads at all.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from kvstore.proto import kvstore_pb2 as pb

__all__ = ["UpStream"]


class UpStream(Iterator[pb.AttachUp]):
    """An iterator that gRPC consumes.

    Attributes:
        interval_s: seconds between heartbeats; may be changed while it runs.
    """

    def __init__(self, heartbeat: Callable[[], pb.Heartbeat]) -> None:
        """Start empty.

        Args:
            heartbeat: builds the next heartbeat; must not block.
        """
        self.interval_s = 1.0
        self._heartbeat = heartbeat
        self._waiting: queue.SimpleQueue[pb.AttachUp | None] = queue.SimpleQueue()
        self._due = time.monotonic() + self.interval_s
        self._started = False
        self._ended = False

    def send(self, message: pb.AttachUp) -> None:
        """Send a message. Never blocks."""
        self._waiting.put(message)

    def start_beating(self, interval_s: float) -> None:
        """Send heartbeats from now on."""
        self.interval_s = interval_s
        self._started = True
        self._due = time.monotonic()
        self._waiting.put(None)

    def end(self) -> None:
        """Half-close the stream after what was sent. Idempotent."""
        self._ended = True
        self._waiting.put(None)

    def __next__(self) -> pb.AttachUp:
        """Return the next message, waiting for it."""
        while True:
            wait = max(0.0, self._due - time.monotonic()) if self._started else None
            try:
                message = self._waiting.get(timeout=wait)
            except queue.Empty:
                message = None
            if message is not None:
                return message
            if self._ended and self._waiting.empty():
                raise StopIteration
            if self._started and time.monotonic() >= self._due:
                self._due = time.monotonic() + self.interval_s
                return pb.AttachUp(heartbeat=self._heartbeat())
