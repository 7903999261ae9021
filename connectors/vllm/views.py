"""Open spaces of one engine: one, and one more per LoRA adapter in use.

Opening goes on a thread of its own, because it is a call to the daemon. Until it has answered, and
while the daemon is away, a view has no space and its requests miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from kvstore.connectors.vllm.credits import Credits
from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.metadata import WorkerInfo
from kvstore.connectors.vllm.store import Client, Lease, Space
from kvstore.connectors.vllm.stored import StoredKeys
from kvstore.errors import KVStoreError, StaleEpoch
from kvstore.keys import Keys
from kvstore.miss import MissReason
from kvstore.space import SpaceSpec

__all__ = ["View", "Views"]

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
# A block that is missed for one of these is nowhere, and so is what comes after it.
_GONE: Final = frozenset(
    (
        MissReason.NEVER_SEEN,
        MissReason.EVICTED,
        MissReason.EXPIRED,
        MissReason.FORGOTTEN,
        MissReason.CORRUPT,
    )
)
# Adapters whose space stays open.
_MOST_VIEWS: Final = 64
# For these it is on a slower tier, or the client has enough: what is computed is not stored again.
_ELSEWHERE: Final = frozenset(
    (
        MissReason.NOT_WORTH_WAITING,
        MissReason.DEADLINE,
        MissReason.LEASE_CAP,
        MissReason.NO_ROOM,
    )
)


class View:
    """One space, as one daemon run after the other knows it.

    Attributes:
        spec: names the space.
        credits: slots reserved ahead; None while there is no space or no complete set of writers.
        stored: what this engine has stored in it.
        run: counts the daemon runs that knew it; what was stored before may be gone.
        waited: whether a request has waited for it to open, in this daemon run.
    """

    def __init__(self, client: Client, spec: SpaceSpec, opener: ThreadPoolExecutor) -> None:
        """Begin to open."""
        self.spec = spec
        self.credits: Credits | None = None
        self.stored = StoredKeys()
        self.run = 0
        self.waited = False
        self._client = client
        self._opener = opener
        self._opening: Future[Any] | None = None
        self._space: Space | None = None
        self._boot_id = b""
        self._pause = 0.0
        self._not_before = 0.0
        self._stale = False
        self.space()

    def space(self) -> Space | None:
        """Return the space if it is open and the daemon is there."""
        attachment = self._client.attachment
        if self._stale or not attachment.alive:
            return None
        if self._space is None:
            self._open()
        boot_id = attachment.boot_id
        if self._boot_id != boot_id:
            self._boot_id = boot_id
            self.run += 1
            self.waited = False
            self.credits = None
            self.stored.clear()
        return self._space

    def _open(self) -> None:
        opening = self._opening
        if opening is None:
            if time.monotonic() >= self._not_before:
                self._opening = self._opener.submit(self._client.open_space, self.spec)
            return
        if not opening.done():
            return
        self._opening = None
        try:
            self._space = opening.result()
        except KVStoreError as error:
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._not_before = time.monotonic() + self._pause
            log_once(logging.WARNING, "the space cannot be opened: %s", error)

    def wait_open(self, seconds: float) -> None:
        """Wait for an opening under way."""
        opening = self._opening
        if opening is not None:
            try:
                opening.exception(timeout=seconds)
            except TimeoutError:
                return

    def open_once(self, seconds: float) -> Space | None:
        """Give a view that has just been made the time to open, once: the first request's."""
        if self.waited:
            return None
        self.waited = True
        self.wait_open(seconds)
        return self.space()

    def learned(self, lease: Lease, keys: Keys, arrivals: int) -> None:
        """Take note of what a lease on some keys, that grows no more, says of those it lacks.

        Args:
            lease: the answer; the request may have waited in the queue since it was given.
            keys: that were asked for.
            arrivals: of `stored` when they were.
        """
        if lease.miss.reason in _GONE:
            self.stored.gone(keys[lease.blocks :], arrivals)
        elif lease.miss.reason in _ELSEWHERE:
            for key in keys[lease.blocks : lease.present]:
                self.stored.end(key, arrived=True)
            # A daemon that does not say names no more than what it leased.
            if lease.present > lease.blocks and lease.miss.reason is not MissReason.LEASE_CAP:
                self.stored.gone(keys[lease.present :], arrivals)

    def failed(self, error: KVStoreError) -> None:
        """Take note of a call on the space that failed.

        After a stale epoch the view stops for good: the weights were said to have changed since
        this engine opened it. Opening the new epoch would pass off blocks of the old weights as
        blocks of the new.
        """
        if not isinstance(error, StaleEpoch) or self._stale:
            return
        self._stale = True
        log_once(
            logging.WARNING,
            "the epoch of %s was bumped: this engine shares nothing more until it is restarted"
            " or its cache is reset",
            self.spec.model,
        )

    def refresh_credits(self, writers: list[WorkerInfo]) -> Credits | None:
        """Return the credits for these writers; None while one of them is not attached."""
        space = self.space()
        attachment = self._client.attachment
        boot_id = attachment.boot_id
        if space is None or any(not w.attachment_id or w.boot_id != boot_id for w in writers):
            self.credits = None
            return None
        ids = tuple(w.attachment_id for w in writers)
        held = self.credits
        if held is None or (held.writers, held.owner_id) != (ids, attachment.id):
            self.close()
            self.credits = Credits(space, attachment, ids, failed=self.failed)
        return self.credits

    def close(self) -> None:
        """Give credits back."""
        if self.credits is not None:
            self.credits.close()
        self.credits = None


class Views:
    """The views of an engine, by adapter."""

    def __init__(self, client: Client, spec_of: Callable[[str], SpaceSpec]) -> None:
        """Open nothing yet.

        Args:
            client: the scheduler's.
            spec_of: names the space of an adapter ("": none).
        """
        self._client = client
        self._spec_of = spec_of
        self._views: dict[str, View] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="kvstore-open")

    def get(self, adapter: str) -> View:
        """Return an adapter's view, opening it when it is new."""
        # The one used last comes last.
        view = self._views.pop(adapter, None)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                oldest = next(iter(self._views))
                self._views.pop(oldest).close()
            view = View(self._client, self._spec_of(adapter), self._opener)
        self._views[adapter] = view
        return view

    def all(self) -> list[View]:
        """Return the views."""
        return list(self._views.values())

    def clear(self) -> None:
        """Close all views; the next request opens its own again."""
        for view in self._views.values():
            view.close()
        self._views.clear()

    def close(self) -> None:
        """Close all views and stop opening."""
        self.clear()
        self._opener.shutdown(wait=False, cancel_futures=True)
