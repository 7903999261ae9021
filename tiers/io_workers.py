"""Threads of an I/O engine: they take one job from each batch in turn."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Batch", "Workers"]

_log = logging.getLogger(__name__)


class Batch:
    """Jobs that one coroutine waits for. Guarded by the condition of its `Workers`."""

    def __init__(self, jobs: Sequence[Any], execute: Callable[[Any], None]) -> None:
        """Describe the batch; on the loop's thread."""
        self.jobs = deque(jobs)
        self.execute = execute
        self.left = len(self.jobs)
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def finish(self) -> None:
        """Wake the waiter; called once, on any thread."""
        try:
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            _log.warning("a transfer ended after its event loop")

    def _resolve(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _nothing(_job: Any) -> None:
    """Stands in for what is done."""


class Workers:
    """Threads that take one job from each batch in turn."""

    def __init__(self, name: str, threads: int) -> None:
        """Start the threads."""
        self._condition = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._closing = False
        # Daemon threads: a process that ends without `close` must not hang on them.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, batch: Batch) -> None:
        """Run the batch's jobs; return when none runs any more, even when cancelled."""
        if not batch.left:
            return
        with self._condition:
            self._batches.append(batch)
            self._condition.notify(len(batch.jobs))
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            self._drop(batch)
            while not batch.done.done():
                try:
                    await asyncio.shield(batch.done)
                except asyncio.CancelledError:
                    continue
            raise

    def _drop(self, batch: Batch) -> None:
        with self._condition:
            batch.left -= len(batch.jobs)
            batch.jobs.clear()
            if batch in self._batches:
                self._batches.remove(batch)
            if not batch.left:
                batch.finish()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._batches:
                    if self._closing:
                        return
                    self._condition.wait()
                batch = self._batches.popleft()
                job = batch.jobs.popleft()
                if batch.jobs:
                    self._batches.append(batch)
            try:
                batch.execute(job)
            except Exception:  # noqa: BLE001 - a thread's boundary: the job's errors say EIO
                _log.exception("an I/O job failed")
            with self._condition:
                batch.left -= 1
                if not batch.left:
                    # Whoever waits may unmap the buffers as soon as it is told.
                    batch.execute = _nothing
                    batch.finish()
            # Not held while waiting for the next one: its buffers keep memory mapped.
            del batch, job

    def close(self) -> None:
        """Finish what was submitted and end the threads. Blocks."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
