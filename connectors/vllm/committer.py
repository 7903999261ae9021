"""Commits what has been copied, at once and in order, whether or not the engine steps.

In order, because a child's commit before its parent's is refused.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from kvstore import tracing
from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.metadata import Store
from kvstore.connectors.vllm.store import Client
from kvstore.errors import KVStoreError
from kvstore.keys import Keys
from kvstore.space import SpaceSpec

__all__ = ["Committer"]

# A daemon that does not answer in that time is as good as gone.
_ANSWER_SECONDS: Final = 20.0
# Spaces of adapters that stay open.
_MOST_SPACES: Final = 64


class Committer:
    """One thread per worker."""

    def __init__(self, client: Client, shard: int, done: Callable[[Store, bytes], None]) -> None:
        """Start the thread.

        Args:
            client: the worker's.
            shard: that it writes.
            done: called on the thread with a store and one outcome byte a slot; 0 where nothing
                was committed.
        """
        self._client = client
        self._shard = shard
        self._done = done
        self._spaces: dict[bytes, Any] = {}
        self._copied: queue.SimpleQueue[tuple[Store, bool, tracing.Span] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kvstore-commit", daemon=True)
        self._thread.start()

    def submit(self, store: Store, copied: bool, span: tracing.Span = tracing.OFF) -> None:
        """Commit a store's slots, or give them back when the copy failed. Returns at once.

        Args:
            store: what was to be copied.
            copied: whether it was.
            span: that the commit belongs to.
        """
        self._copied.put((store, copied, span))

    def _run(self) -> None:
        while (item := self._copied.get()) is not None:
            store, copied, span = item
            outcomes = b""
            try:
                with tracing.using(span):
                    outcomes = self._commit(store) if copied else b""
            except (KVStoreError, TimeoutError) as error:
                log_once(logging.WARNING, "a commit failed: %s %s", type(error).__name__, error)
            except Exception as error:  # noqa: BLE001 - the thread's boundary: fail this store
                log_once(logging.ERROR, "a commit failed: %r", error, exc_info=True)
            try:
                try:
                    if not outcomes:
                        # What was committed nevertheless is not in the grant any more.
                        self._abort(store)
                finally:
                    self._done(store, outcomes or bytes(len(store.slots)))
            except Exception as error:  # noqa: BLE001 - the thread's boundary: go on with others
                log_once(logging.ERROR, "a commit's end failed: %r", error, exc_info=True)

    def _abort(self, store: Store) -> None:
        for grant in np.unique(store.grants):
            mine = store.slots[store.grants == grant]
            self._client.attachment.abort(store.owner_id, int(grant), slots=mine)

    def _commit(self, store: Store) -> bytes:
        space = self._space(store.spec)
        size = store.spec.key_bytes
        outcomes = bytearray(len(store.slots))
        # Grants follow one another: a store's slots were taken from the oldest first.
        ends = np.append(np.flatnonzero(np.diff(store.grants)) + 1, len(store.grants))
        begin = 0
        for end in ends.tolist():
            answer: Future[bytes] = self._client.attachment.commit(
                space,
                store.owner_id,
                int(store.grants[begin]),
                self._shard,
                store.slots[begin:end],
                Keys(store.keys[begin * size : end * size], size),
                store.parents[begin * size : end * size],
            )
            outcomes[begin:end] = answer.result(timeout=_ANSWER_SECONDS)
            begin = end
        return bytes(outcomes)

    def _space(self, spec: SpaceSpec) -> Any:
        name = spec.fingerprint
        space = self._spaces.get(name)
        if space is None:
            if len(self._spaces) >= _MOST_SPACES:
                del self._spaces[next(iter(self._spaces))]
            space = self._spaces[name] = self._client.open_space(spec)
        return space

    def close(self) -> None:
        """Commit what has been copied, then stop."""
        self._copied.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_ANSWER_SECONDS)
