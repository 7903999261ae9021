"""Which blocks to store in a step, and which blocks have new owners.

A block is stored in the step that fills it (chunked prefill, decode), or in a later one when no
empty slot was there; a request's `stored` says how far it has come. It is skipped when this
engine is storing or has stored its key already. Blocks of a request that ended before they could
be stored keep their bytes until they get a new owner: until then they are stored late.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.metadata import NO_BLOCKS, Load, Store, WorkerInfo
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.tracks import Track
from kvstore.connectors.vllm.views import View
from kvstore.keys import Keys
from kvstore.outcomes import CommitOutcome

__all__ = ["StorePlan"]

# After that long a store no longer keeps an idle engine stepping.
_PENDING_SECONDS: Final = 5.0
# So long an idle engine keeps stepping for blocks that wait for a slot.
_LATE_SECONDS: Final = 1.0
_MOST_LATE: Final = 32
# Longer than a worker waits for the daemon.
_FORGOTTEN_SECONDS: Final = 60.0
_MOST_PROTECTED: Final = 1024
_ARRIVED: Final = frozenset((CommitOutcome.COMMITTED, CommitOutcome.WAITING, CommitOutcome.EXISTS))


@dataclass(slots=True)
class _Job:
    """A store that workers have been told about."""

    view: View
    run: int
    requests: list[str]  # of each block
    indices: list[int]  # of each block in its request's chain
    keys: list[bytes]
    began: float
    outcomes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """Blocks of one view to store in this step."""

    view: View
    room: int
    requests: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    # Of the requests that are traced; a dictionary for its order.
    traceparents: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Late:
    """Blocks of a request that has ended, from `at` up to `full`."""

    view: View
    run: int
    request_id: str
    keys: Keys
    table: list[int]
    at: int
    full: int
    began: float
    traceparent: str


class StorePlan:
    """Stores under way, and the memory of blocks' owners that planning needs."""

    def __init__(
        self,
        engine: EngineShape,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is under way."""
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._ids = itertools.count(1)
        self._late: list[_Late] = []
        self._fresh = False
        self._stopped = False

    def follow(self, output: Any, tracks: dict[str, Track], loads: list[Load]) -> NDArray[np.int32]:
        """Follow where requests' blocks are; return those with new owners in this step."""
        size = self._engine.engine_block_tokens
        own_tables = getattr(output, "kv_connector_block_state", None) is None
        scheduled = output.num_scheduled_tokens
        handed: list[int] = []
        for new in output.scheduled_new_reqs:
            if new.req_id in tracks:
                extent = new.num_computed_tokens + scheduled.get(new.req_id, 0)
                tracks[new.req_id].extent = extent
            handed += new.block_ids[0][new.num_computed_tokens // size :]
            if own_tables and new.req_id in tracks:
                tracks[new.req_id].table = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for request_id, tokens, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in tracks:
                tracks[request_id].extent = tokens + scheduled.get(request_id, 0)
            if not blocks:
                continue
            again = request_id in resumed
            handed += blocks[0][tokens // size :] if again else blocks[0]
            if own_tables and request_id in tracks:
                table = tracks[request_id].table
                if again:
                    table.clear()
                table += blocks[0]
        if not handed and not loads:
            return NO_BLOCKS
        given: NDArray[np.int32] = np.concatenate(
            [np.array(handed, np.int32), *(load.blocks for load in loads)]
        )
        if self._late:
            self._cut_late(set(given.tolist()))
        return given

    def _cut_late(self, given: set[int]) -> None:
        """Forget what gets a new owner, and what comes after it."""
        per_block = self._engine.group_blocks
        for late in self._late:
            for at in range(late.at, late.full):
                if not given.isdisjoint(late.table[at * per_block : (at + 1) * per_block]):
                    late.full = at
                    break
        self._late = [late for late in self._late if late.at < late.full]

    def stores(
        self,
        output: Any,
        tracks: dict[str, Track],
        view_of: Callable[[Track], View | None],
        writers: list[WorkerInfo],
        patience_seconds: float,
    ) -> list[Store]:
        """Plan the stores of a step.

        Args:
            output: vLLM's SchedulerOutput.
            tracks: all requests.
            view_of: returns a request's view and makes its track follow it.
            writers: the workers that store, by shard.
            patience_seconds: how long to wait for slots that were asked for, when there are too few.
        """
        self._fresh = False
        self._expire()
        if self._stopped:
            return []
        size = self._engine.engine_block_tokens
        per_block, block_tokens = self._engine.group_blocks, self._engine.block_tokens
        drafts: dict[int, _Draft] = {}
        for request_id in output.num_scheduled_tokens:
            track = tracks.get(request_id)
            if track is None or not track.stores:
                continue
            # Tokens that are only drafted, or not known yet, have no hash.
            full = min(
                track.extent // block_tokens,
                len(track.request.block_hashes) // per_block,
            )
            if full <= track.stored:
                continue
            view = view_of(track)
            if view is None:
                continue
            table = self._table(output, track)
            if table is None or len(table) * size < full * block_tokens:
                continue
            wanted = full - track.stored
            draft = self._open_draft(drafts, view, writers, wanted, patience_seconds)
            keys = track.keys(per_block)
            track.stored = self._draft(
                draft, request_id, keys, table, track.stored, full, track.traceparent
            )
        for late in self._late:
            if late.view.run == late.run:
                draft = self._open_draft(drafts, late.view, writers, 1, 0.0)
                late.at = self._draft(
                    *(draft, late.request_id, late.keys, late.table, late.at, late.full),
                    late.traceparent,
                )
            else:
                late.at = late.full
        self._late = [late for late in self._late if late.at < late.full]
        return [store for d in drafts.values() if (store := self._store(d)) is not None]

    @staticmethod
    def _table(output: Any, track: Track) -> list[int] | None:
        state = getattr(output, "kv_connector_block_state", None)
        if state is None:
            return track.table
        tables = state.get_block_ids(track.request.request_id)
        return tables[0] if tables else None

    @staticmethod
    def _open_draft(
        drafts: dict[int, _Draft],
        view: View,
        writers: list[WorkerInfo],
        wanted: int,
        patience_seconds: float,
    ) -> _Draft:
        draft = drafts.get(id(view))
        if draft is None:
            credits = view.refresh_credits(writers)
            if credits is not None:
                credits.poll()
                if credits.available < wanted:
                    credits.wait(patience_seconds)
            room = credits.available if credits is not None else 0
            draft = drafts[id(view)] = _Draft(view, room)
        return draft

    def _draft(
        self,
        draft: _Draft,
        request_id: str,
        keys: Keys,
        table: list[int],
        at: int,
        full: int,
        traceparent: str,
    ) -> int:
        """Add a request's blocks from `at` up to `full`; return how far the slots went."""
        per_block, stored = self._engine.group_blocks, draft.view.stored
        while at < full:
            key = keys[at]
            if key not in stored:
                blocks = table[at * per_block : (at + 1) * per_block]
                # Block 0 stands for "given back": its bytes are not this request's.
                if len(draft.keys) == draft.room or 0 in blocks:
                    break
                stored.begin(key)
                draft.requests.append(request_id)
                draft.indices.append(at)
                draft.keys.append(key)
                draft.parents.append(keys[at - 1] if at else bytes(len(key)))
                draft.blocks.append(blocks)
                if traceparent:
                    draft.traceparents[traceparent] = None
            at += 1
        return at

    def ended(self, track: Track, table: list[int]) -> None:
        """A request has ended; what is not stored yet may be stored late.

        Args:
            track: of the request.
            table: its engine blocks; they are free from now on.
        """
        per_block, size = self._engine.group_blocks, self._engine.engine_block_tokens
        # The last token's own KV is not computed; what is there may be a rejected draft's.
        tokens = min(track.extent, int(track.request.num_tokens) - 1, len(table) * size)
        keys = track.keys(per_block)
        full = min(tokens // self._engine.block_tokens, len(keys))
        view = track.view
        if view is None or not track.stores or not track.stored < full:
            return
        self._late.append(
            _Late(
                view,
                track.run,
                track.request.request_id,
                keys,
                list(table),
                track.stored,
                full,
                self._clock(),
                track.traceparent,
            )
        )
        del self._late[:-_MOST_LATE]

    def stop(self) -> None:
        """Store nothing more, ever."""
        self._stopped = True
        self._late.clear()

    def forget_late(self) -> None:
        """Store nothing more of requests that have ended."""
        self._late.clear()

    def _store(self, draft: _Draft) -> Store | None:
        credits = draft.view.credits
        if not draft.keys or credits is None:
            return None
        taken = credits.take(len(draft.keys))
        job_id = next(self._ids)
        self._fresh = True
        self._jobs[job_id] = _Job(
            draft.view, draft.view.run, draft.requests, draft.indices, draft.keys, self._clock()
        )
        return Store(
            job_id,
            draft.view.spec,
            credits.boot_id,
            credits.owner_id,
            credits.writers,
            taken.grants,
            taken.slots,
            np.array(draft.blocks, np.int32),
            b"".join(draft.keys),
            b"".join(draft.parents),
            tuple(draft.traceparents),
        )

    def _expire(self) -> None:
        """Forget stores that nobody reports: vLLM without reports from workers, a lost worker."""
        while self._jobs:
            job_id, job = next(iter(self._jobs.items()))
            if self._clock() - job.began < _FORGOTTEN_SECONDS:
                return
            del self._jobs[job_id]
            for key in job.keys:
                job.view.stored.end(key, arrived=False)

    def finished(self, reports: dict[int, list[bytes]], tracks: dict[str, Track]) -> None:
        """Take in the outcomes of stores; a job is over when every shard's writer has spoken."""
        for job_id, outcomes in reports.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.outcomes += outcomes
            if len(job.outcomes) >= self._engine.shards:
                del self._jobs[job_id]
                self._settle(job, tracks)

    def _settle(self, job: _Job, tracks: dict[str, Track]) -> None:
        if job.view.run != job.run:
            return
        for i, key in enumerate(job.keys):
            said = [outcome[i] for outcome in job.outcomes]
            arrived = _ARRIVED.issuperset(said)
            job.view.stored.end(key, arrived)
            track = tracks.get(job.requests[i])
            if arrived or track is None or track.view is not job.view or track.healed:
                continue
            # Once per request: what we believed to be stored is not there, or the copy failed.
            track.healed = True
            if CommitOutcome.PARENT_MISSING in said:
                job.view.stored.forget(track.keys(self._engine.group_blocks))
                track.stored = 0
            else:
                track.stored = min(track.stored, job.indices[i])

    def top_up(self, view: View, tracks: Iterable[Track], writers: list[WorkerInfo]) -> None:
        """Reserve what the requests at hand will need next."""
        if not self._settings.store:
            return
        credits = view.refresh_credits(writers)
        if credits is None:
            return
        credits.poll()
        if credits.available >= self._most(view):
            return
        mine = [track for track in tracks if track.view is view and track.stores]
        wanted = sum(late.full - late.at for late in self._late if late.view is view)
        most = self._most(view)
        for track in mine:
            full = len(track.request.block_hashes) // self._engine.group_blocks
            # One more for what it generates.
            wanted += max(full - track.stored, 0) + 1
            if wanted >= most:
                break
        credits.top_up(min(wanted, most), lambda: self._protected(mine))

    def _most(self, view: View) -> int:
        """Return the most slots to have: for two steps, and not too many bytes."""
        steps = 2 * -(-self._engine.step_tokens // self._engine.block_tokens) + 2
        return max(1, min(steps, self._settings.credit_bytes // view.spec.block_bytes))

    def _protected(self, tracks: list[Track]) -> Keys | Sequence[bytes]:
        """Return the last stored key of each running request: no chain makes room for its tail."""
        keys = [
            track.keys(self._engine.group_blocks)[track.stored - 1]
            for track in tracks[:_MOST_PROTECTED]
            if track.stored
        ]
        return Keys(b"".join(keys), len(keys[0])) if keys else ()

    def level(
        self, views: list[View], tracks: Collection[Track], writers: list[WorkerInfo]
    ) -> None:
        """Reserve what the requests at hand will need next; give back what others needed."""
        in_use = {id(track.view) for track in tracks}
        for view in views:
            self.top_up(view, tracks, writers)
        self.give_back([view for view in views if id(view) not in in_use])

    def give_back(self, views: list[View]) -> None:
        """No request of these is left: give back slots but a few for the next one's first step."""
        if self._late:
            return
        for view in views:
            if view.credits is not None:
                keep = self._settings.idle_credit_bytes // len(views)
                view.credits.give_back(keep // view.spec.block_bytes)

    def pending(self) -> bool:
        """Return whether stores are under way that have not begun too long ago."""
        if self._fresh and self._engine.delayed_stores:
            return True
        if self._late and self._clock() - self._late[-1].began < _LATE_SECONDS:
            return True
        newest = next(reversed(self._jobs.values()), None)
        return newest is not None and self._clock() - newest.began < _PENDING_SECONDS
