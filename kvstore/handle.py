"""An open space on the client's side: what it is, and the epoch that it is bound to for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.errors import StaleEpoch, UnknownSpace
from kvstore.keys import Keys
from kvstore.link import Link
from kvstore.proto import kvstore_pb2 as pb
from kvstore.space import SpaceSpec
from kvstore.wire import spec_to_message

__all__ = ["SpaceHandle"]

T = TypeVar("T")


class SpaceHandle:
    """Survives restarts of the daemon, and refuses to serve once its epoch is over.

    Attributes:
        spec: the space.
        ref: how messages name it, epoch included.
    """

    def __init__(self, spec: SpaceSpec, opened: pb.OpenSpaceResponse) -> None:
        """Bind to the epoch that OpenSpace answered."""
        self.spec = spec
        self.ref = pb.SpaceRef(id=opened.space.id, epoch=opened.space.epoch)
        self._stale: str = ""
        self._guard = threading.Lock()

    @property
    def id(self) -> bytes:
        """The space's fingerprint, 32 bytes."""
        return self.spec.fingerprint

    @property
    def epoch(self) -> int:
        """Epoch that this handle is bound to."""
        return self.ref.epoch

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, its shards one after the other."""
        return self.spec.block_bytes

    def check(self) -> None:
        """Raise when the epoch is known to be over.

        Raises:
            StaleEpoch: it is.
        """
        if self._stale:
            raise StaleEpoch(self._stale)

    def retire(self, reason: str) -> StaleEpoch:
        """Never serve again; return the error that says so."""
        with self._guard:
            self._stale = self._stale or reason
        return StaleEpoch(self._stale)

    def reopen_request(self) -> pb.OpenSpaceRequest:
        """Return the request that makes a daemon know the space again."""
        return pb.OpenSpaceRequest(spec=spec_to_message(self.spec))

    def reopened(self, answer: pb.OpenSpaceResponse) -> None:
        """Accept the space as a daemon knows it now.

        Raises:
            StaleEpoch: its epoch is another one.
        """
        if answer.space.epoch != self.ref.epoch:
            raise self.retire(
                f"the space was opened in epoch {self.ref.epoch} and is in {answer.space.epoch} now"
            )

    def keys(self, keys: Keys | Any) -> Keys:
        """Return keys as Keys of this space's length.

        Raises:
            InvalidRequest: a key has another length.
        """
        return Keys.of(keys, self.spec.key_bytes)

    def submit(
        self, link: Link, name: str, request: Any, timeout_s: float, accept: Callable[[Any], T]
    ) -> Future[T]:
        """Start a call that names this space; opens the space once if the daemon forgot it."""
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()

        def reopen() -> None:
            def opened(answer: Future[None]) -> None:
                error = answer.exception()
                if error is not None:
                    result.set_exception(error)
                else:
                    link.submit(name, request, timeout_s, accept).add_done_callback(last)

            link.submit(
                "OpenSpace", self.reopen_request(), timeout_s, self.reopened
            ).add_done_callback(opened)

        def last(answer: Future[T]) -> None:
            error = answer.exception()
            if isinstance(error, StaleEpoch):
                self.retire(str(error))
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(answer.result())

        def first(answer: Future[T]) -> None:
            error = answer.exception()
            if isinstance(error, UnknownSpace):
                reopen()
            else:
                last(answer)

        try:
            self.check()
        except StaleEpoch as error:
            result.set_exception(error)
            return result
        link.submit(name, request, timeout_s, accept).add_done_callback(first)
        return result
