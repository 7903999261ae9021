"""Leases, what they decide and what they wait for, on a device of known speed in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from promoter_world import PromoterWorld

from kvstore.cli.bench.prefetch_trace import Question
from kvstore.engine.counters import Counters
from kvstore.engine.events import LeaseDoneEvent, LeaseGrownEvent
from kvstore.engine.leases import Leases
from kvstore.engine.worth import Worth
from kvstore.index import Block
from kvstore.keys import Keys

__all__ = ["LeaseWorld"]

DEADLINE = 600.0


class LeaseWorld(PromoterWorld):
    """An engine's requests for chains, one client's. Made, used and left inside a running loop.

    Attributes:
        asked: all requests.
    """

    def __init__(
        self,
        bytes_per_second: float,
        block_bytes: int,
        block_seconds: float,
        worth: Worth | None = None,
    ) -> None:
        super().__init__(bytes_per_second, block_bytes)
        self.block_seconds = block_seconds
        self.read_seconds = block_bytes / bytes_per_second
        self.asked: list[Question] = []
        worth = worth or Worth(Counters())
        worth.promoter = self.promoter
        arrivals = SimpleNamespace(
            request=self.promoter.request,
            cancel=self.promoter.cancel,
            spare=self.promoter.spare,
            hurry=lambda blocks: None,
        )
        host = SimpleNamespace(generations=lambda slots: np.zeros(len(slots), np.uint64))
        self.leases = Leases(
            self.index,
            cast("Any", host),
            Counters(),
            cast("Any", arrivals),
            worth,
            cap_bytes=1 << 50,
            on_released=lambda: None,
        )
        self._client = cast(
            "Any",
            SimpleNamespace(
                id=1, client=None, leases={}, leased_bytes=0, released_early=[], send=self._told
            ),
        )

    def load(self, chain: Sequence[Block]) -> Question:
        """Ask for a chain as an engine does that tells how fast it computes."""
        loop = asyncio.get_running_loop()
        keys = Keys.of([block.key for block in chain], 16)
        question = Question(keys, [block.host is None for block in chain], loop.time())
        cold = [block for block in chain if block.host is None]
        if cold:
            ahead = self.promoter.ahead_bytes(cold, 0) + self.promoter.path.in_flight
            question.ahead = max(0, ahead) / cold[0].space.shape.block_bytes
        number = len(self.asked)
        self.asked.append(question)
        rate = self.space.spec.block_tokens / self.block_seconds
        answer = self.leases.acquire(self._client, self.space, number, keys, DEADLINE, 0, rate)
        question.grown.append((loop.time(), answer.blocks))
        if not answer.growing:
            self._done(number)
        return question

    def _told(self, event: object) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(event, LeaseGrownEvent):
            count = self._client.leases[event.lease_id].count
            self.asked[event.lease_id].grown.append((now, count))
        elif isinstance(event, LeaseDoneEvent):
            self._done(event.lease_id)

    def _done(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.asked[number].ended = loop.time()
        loop.call_soon(self.leases.release, self._client, number)

    def evict(self, chain: Sequence[Block]) -> None:
        """Leave a chain on disk only, where nobody uses it."""
        for block in reversed(chain):
            if not block.host_refs:
                self.index.drop_host(block)
