"""The connector's half in the scheduler: asks for leases and slots, plans loads and stores.

Runs on the scheduler's thread. Nothing here calls the daemon and waits, except that one scheduling
step may wait a few milliseconds in all for answers to questions sent earlier.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvstore import tracing
from kvstore.connectors.vllm.guard import guarded, log_once
from kvstore.connectors.vllm.metadata import Load, StepMeta, WorkerInfo, WorkerReport
from kvstore.connectors.vllm.pace import Pace
from kvstore.connectors.vllm.roster import Roster
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.space import EngineShape, root_seed, space_spec
from kvstore.connectors.vllm.stats import StatsLog
from kvstore.connectors.vllm.store import Client, Lease, Space
from kvstore.connectors.vllm.store_plan import StorePlan
from kvstore.connectors.vllm.traces import begin_lookup, end_lookup
from kvstore.connectors.vllm.tracks import MOST_ID_CHARS, ActiveLoad, Track, queue_seconds
from kvstore.connectors.vllm.usage import Usage
from kvstore.connectors.vllm.views import View, Views
from kvstore.connectors.vllm.weights import Adapters
from kvstore.errors import KVStoreError
from kvstore.space import SpaceSpec

__all__ = ["SchedulerSide"]

MISS: Final = (0, False)
LATER: Final = (None, False)

# A request that waits in the queue asks again after so long.
_ASK_AGAIN_SECONDS: Final = 1.0
# How long an engine that starts beside a daemon waits for it.
_ATTACH_SECONDS: Final = 5.0
# How long a request that could not be allocated goes without its lease.
_PAUSE_SECONDS: Final = 0.5


class SchedulerSide:
    """State of all requests.

    Attributes:
        stats: what vLLM's own metrics show.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineShape,
        client: Client,
        *,
        clock: Callable[[], float] = time.monotonic,
        enabled: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait for the workers' handshake; until then everything misses.

        Args:
            settings: the connector's.
            engine: the engine.
            client: this process's.
            clock: seconds.
            enabled: asked for each new request: whether to look it up and to store it.
        """
        self._enabled = enabled
        self.settings = settings
        self.engine = engine
        self._client = client
        self._clock = clock
        self._roster = Roster(engine)
        self._views = Views(client, self._spec)
        self._adapters = Adapters()
        self._view_id = ""
        self._tracks: dict[str, Track] = {}
        self._loads: dict[str, ActiveLoad] = {}
        self._loading: dict[bytes, str] = {}  # key -> request that loads it
        self._pending: list[Load] = []
        self._load_ids = itertools.count(1)
        # Loads reported before their bytes were there, by load id: how many ranks' bytes are on
        # their way, and the leases that wait for them.
        self._airborne: Counter[int] = Counter()
        self._late_leases: dict[int, Lease] = {}
        self._pace = Pace(engine.step_tokens, clock)
        self.stats = StatsLog(client.report_time)
        self._usage = Usage(client, self.stats)
        self._plan = StorePlan(engine, settings, clock=clock)
        self._budget = settings.step_wait_seconds
        self._step = 0

    def _spec(self, adapter: str) -> SpaceSpec:
        return space_spec(
            self.engine,
            self.settings,
            layout=self._roster.layout,
            shard_bytes=self._roster.shard_bytes,
            seed=root_seed(),
            view=self._view_id,
            adapter=adapter,
        )

    def set_workers(self, infos: list[WorkerInfo]) -> None:
        """Take in the workers' handshakes."""
        self._roster.admit(infos)
        if self._roster.complete and self._roster.devices:
            self._client.attachment.use_devices(self._roster.devices)
        if self._roster.complete and any(info.attachment_id for info in infos):
            # The workers have found it. Later, what this needs of Python's lock comes between steps.
            self._client.attachment.wait_active(_ATTACH_SECONDS)

    def on_new_request(self, request: Any) -> None:
        """Send Acquire at once: the answer is on its way while the request waits in the queue."""
        adapter = self._adapters.identity(getattr(request, "lora_request", None))
        track = self._tracks[request.request_id] = Track(request, adapter or "")
        if adapter is None or not self._enabled():
            track.loads = track.stores = False
            return
        view = self._view(track)
        if view is None:
            return
        space = view.space()
        if space is not None:
            size, rate = self.engine.block_tokens, self._pace.rate
            self._ask(track, space, queue_seconds(track, self._tracks.values(), size, rate))
            self._plan.top_up(view, self._tracks.values(), self._roster.writers)

    def _view(self, track: Track) -> View | None:
        """Return the view that a request belongs to; None while workers are not all known."""
        if not self._roster.complete:
            return None
        view = self._views.get(track.adapter)
        track.follow(view)
        return view

    def _ask(self, track: Track, space: Space, queued: float = 0.0) -> None:
        """Send Acquire for all of a request's full blocks, unless there are none.

        For `queued` seconds others are computed, and waiting costs nothing.
        """
        if not self._may_load(track) or track.asked is not None or track.lease is not None:
            return
        keys = track.keys(self.engine.group_blocks)
        if not len(keys):
            return
        track.asked_blocks = len(keys)
        track.asked_at = self._clock()
        track.turn_at = track.asked_at + queued
        track.arrivals = track.view.stored.arrivals if track.view else 0
        span = begin_lookup(track, len(keys))
        with tracing.using(span):
            track.asked = space.acquire(
                keys,
                deadline_s=queued + self.settings.disk_wait_seconds,
                queued_s=queued,
                prefill_tokens_per_second=self._pace.rate(len(keys) * self.engine.block_tokens)
                or None,
                request_id=track.request.request_id[:MOST_ID_CHARS],
            )
        self.stats.lookup(track.asked)
        end_lookup(span, track.asked)

    def _may_load(self, track: Track) -> bool:
        return (
            self.settings.load
            and track.loads
            and not getattr(track.request, "skip_reading_prefix_cache", False)
            and self._roster.loads(self._client.attachment)
        )

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answer how many tokens after `local_tokens` can be loaded.

        Returns:
            The number, or None for "ask again in the next step"; and whether they are loaded
            asynchronously.
        """
        track = self._tracks.get(request.request_id)
        if track is None:
            self.on_new_request(request)
            track = self._tracks[request.request_id]
        track.local_tokens = local_tokens
        view, now = self._view(track), self._clock()
        if view is None or request.request_id in self._loads or not self._may_load(track):
            return MISS
        if track.given_back_at is not None:
            if now - track.given_back_at < _PAUSE_SECONDS:
                return LATER
            track.given_back_at = None
        if track.missed_at is not None:
            if now - track.missed_at < _ASK_AGAIN_SECONDS:
                return MISS
            track.missed_at = None
        if self._has_all(track, view, local_tokens):
            return self._miss(track, now)
        return self._answer(track, view, local_tokens, now)

    def _has_all(self, track: Track, view: View, local_tokens: int) -> bool:
        """Whether the engine has by itself what could be loaded, and it is known to be stored.

        Then the answer to Acquire, which has been sent and so counts as a use, is not waited for.
        """
        keys = track.keys(self.engine.group_blocks)
        left = len(keys) * self.engine.block_tokens - local_tokens
        if left >= self.settings.min_load_tokens or not len(keys):
            return False
        if keys[len(keys) - 1] not in view.stored:
            return False
        track.stored = max(track.stored, len(keys))
        return True

    def _answer(
        self, track: Track, view: View, local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        lease = track.lease
        if lease is None:
            space = view.space() or view.open_once(self.settings.answer_seconds)
            if space is None:
                return self._miss(track, now)
            if track.asked is None:
                self._ask(track, space)
                # A request of a single step is stored in that step or not at all.
                self._plan.top_up(view, self._tracks.values(), self._roster.writers)
            if track.asked is None:
                return self._miss(track, now)
            arrived = self._arrived(track, view)
            if arrived is None:
                worth = track.asked_blocks * self.engine.block_tokens - local_tokens
                in_time = now - track.asked_at < self.settings.answer_seconds
                if in_time and self._pace.worth_a_step(worth):
                    return LATER
                return self._miss(track, now)
            lease = arrived
        if lease.lost:
            return self._miss(track, now)
        growing, blocks = lease.growing, lease.blocks
        if growing and now < track.turn_at:
            return self._ask_again(track, view, local_tokens, now)
        track.stored = max(track.stored, blocks)
        if not growing and track.answered_at is None:
            view.learned(lease, track.keys(self.engine.group_blocks), track.arrivals)
        block_tokens = self.engine.block_tokens
        if growing and now - track.turn_at < self.settings.disk_wait_seconds:
            missing = (track.asked_blocks - blocks) * block_tokens
            if self._pace.worth_a_step(missing):
                return LATER
        tokens = blocks * block_tokens - local_tokens
        if tokens < self.settings.min_load_tokens:
            return self._miss(track, now)
        first = local_tokens // block_tokens
        if self.engine.prefix_caching and self._loaded_by_another(track, first):
            return LATER
        if track.answered_at is None:
            track.answered_at = now
        elif now - track.answered_at > self.settings.hold_seconds:
            track.let_go()
            track.given_back_at = now
            return LATER
        return tokens, True

    def _ask_again(
        self, track: Track, view: View, local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """It is a request's turn earlier than was thought: from here on waiting costs time."""
        early, space = track.lease, view.space()
        if space is None or early is None:
            return self._miss(track, now)
        track.lease = None
        self._ask(track, space)
        # After asking: what is on its way is not dropped in between.
        early.release()
        return self._answer(track, view, local_tokens, now)

    def _arrived(self, track: Track, view: View) -> Lease | None:
        """Return the lease if the answer is there, or comes within what the step may wait."""
        asked = track.asked
        if asked is None:
            return None
        if not asked.done() and self._budget > 0:
            began = self._clock()
            with contextlib.suppress(TimeoutError):
                asked.exception(timeout=self._budget)
            self._budget -= self._clock() - began
        if not asked.done():
            return None
        track.asked = None
        try:
            track.lease = asked.result()
        except KVStoreError as error:
            view.failed(error)
            # As if the answer were still to come, until asking again is due.
            track.asked_at = -math.inf
        return track.lease

    def _miss(self, track: Track, now: float) -> tuple[int | None, bool]:
        track.let_go()
        track.missed_at = now
        return MISS

    def _loaded_by_another(self, track: Track, block: int) -> bool:
        """Whether another request loads what this one needs: then the engine will have it."""
        keys = track.keys(self.engine.group_blocks)
        owner = self._loading.get(keys[block]) if block < len(keys) else None
        return owner is not None and owner != track.request.request_id

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Plan the load that `matched` promised; blocks are there for it now.

        From here on the engine waits for this load, so whatever goes wrong, one is planned.
        """
        track = self._tracks.get(request.request_id)
        if track is not None:
            # Preempted later, it may ask again at once: what it computes is stored.
            track.missed_at = None
            # Of the blocks that it has now, nothing is computed.
            track.extent = 0
        if tokens <= 0:
            if track is not None:
                if request.request_id not in self._loads:
                    track.let_go()
                self._usage.count(track)
            return
        size = self.engine.engine_block_tokens
        local = track.local_tokens if track is not None else 0
        begin, count = local // size, -(-tokens // size)
        table = blocks.get_block_ids()[0]
        ids = np.array(table[begin : begin + count], np.int32)
        doomed = Load(request.request_id, ids, 0, np.empty(0, np.uint64), b"")
        load = self._plan_load(track, ids, begin) if track is not None else None
        if load is None and track is not None:
            track.loads = False
        self._pending.append(load or doomed)

    @guarded(lambda: None)
    def _plan_load(self, track: Track, ids: Any, begin: int) -> Load | None:
        request_id, per_block = track.request.request_id, self.engine.group_blocks
        first, skip = divmod(begin, per_block)
        end = -(-(begin + len(ids)) // per_block)
        lease = track.lease
        keys = list(track.keys(per_block)[first:end])
        load_id = next(self._load_ids)
        active = ActiveLoad(track, lease, ids, keys, first, skip, {}, load_id)
        self._loads[request_id] = active
        track.lease = track.answered_at = None
        for key in keys:
            self._loading.setdefault(key, request_id)
        self._usage.count(track)
        if lease is None or lease.blocks < end:
            return None
        tiers = lease.tiers[first:end]
        for i in range(len(ids)):
            tier = tiers[(skip + i) // per_block]
            tokens = active.tier_tokens.get(tier, 0) + self.engine.engine_block_tokens
            active.tier_tokens[tier] = tokens
        slots = lease.slots[first:end].copy()
        return Load(request_id, ids, skip, slots, lease.boot_id, load_id, track.traceparent)

    def tier_tokens(self, request: Any) -> dict[int, int]:
        """Return the tokens of a request's load, by tier (2 host, 3 disk)."""
        active = self._loads.get(request.request_id)
        return dict(active.tier_tokens) if active is not None else {}

    def build(self, output: Any) -> StepMeta:
        """Make this step's metadata. Must not fail: loads in it are waited for."""
        self._step += 1
        self._budget = self.settings.step_wait_seconds
        meta = StepMeta(self._step, self._pending, handed_out=None)
        meta.idle = not output.total_num_scheduled_tokens
        self._pending = []
        self._fill(meta, output)
        if meta.handed_out is None:
            # Who owns which block is not known any more: nothing can be stored safely.
            self._plan.stop()
        return meta

    @guarded(lambda: None)
    def _fill(self, meta: StepMeta, output: Any) -> None:
        self._pace.begin(int(output.total_num_scheduled_tokens))
        meta.handed_out = self._plan.follow(output, self._tracks, meta.loads)
        if self.settings.store and self._roster.complete:
            meta.stores = self._plan.stores(
                output, self._tracks, self._view, self._roster.writers, self._budget
            )
            self._plan.level(self._views.all(), self._tracks.values(), self._roster.writers)

    def output(self, output: Any) -> None:
        """Take in what the workers have finished."""
        self._pace.end()
        invalid = output.invalid_block_ids
        if invalid:
            bad = np.fromiter(invalid, np.int64, len(invalid))
            for active in self._loads.values():
                failed = np.flatnonzero(np.isin(active.blocks, bad))
                if len(failed) and not 0 <= active.failed_at <= failed[0]:
                    active.failed_at = int(failed[0])
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            self._fly(report)
        for request_id in output.finished_recving or ():
            self._loaded(request_id)
        if isinstance(report, WorkerReport):
            if report.infos:
                self._roster.update(report.infos)
                if self._roster.complete:
                    self._client.attachment.use_devices(self._roster.devices)
            self._plan.finished(report.stored, self._tracks)
            for view in self._views.all()[:1]:
                self._usage.moved(view.space(), report.loaded_bytes, report.stored_bytes)

    def _fly(self, report: WorkerReport) -> None:
        """Keep the leases of loads whose bytes are on their way; release those that have landed."""
        self._airborne.update(report.early)
        self._airborne.subtract(report.landed)
        for load_id in report.landed:
            if self._airborne[load_id] <= 0:
                del self._airborne[load_id]
                lease = self._late_leases.pop(load_id, None)
                if lease is not None:
                    lease.release()

    def _loaded(self, request_id: str) -> None:
        """All ranks have finished a load."""
        active = self._loads.pop(request_id, None)
        if active is None:
            return
        for key in active.keys:
            if self._loading.get(key) == request_id:
                del self._loading[key]
        if active.lease is not None and self._airborne[active.load_id] > 0:
            self._late_leases[active.load_id] = active.lease
        elif active.lease is not None:
            active.lease.release()
        track = active.track
        if active.failed_at < 0:
            self._usage.loaded(track, active.tier_tokens)
            if track.view is not None and track.view.run == track.run:
                for key in active.keys:
                    track.view.stored.end(key, arrived=True)
            return
        # Asked again, the same blocks would fail again: this request computes from here on.
        track.loads = False
        block = active.first + (active.skip + active.failed_at) // self.engine.group_blocks
        track.stored = min(track.stored, block)
        if track.view is not None:
            track.view.stored.forget(active.keys[block - active.first :])
        self._usage.load_failed(track)
        log_once(logging.WARNING, "a load failed; its request is computed instead")

    def finished(self, request: Any, table: list[int]) -> None:
        """Forget a request. A load of it that is under way stays known until it ends.

        Args:
            request: vLLM's.
            table: its engine blocks.
        """
        track = self._tracks.pop(request.request_id, None)
        if track is None:
            return
        track.let_go()
        if self.settings.store:
            self._plan.ended(track, table)
        if not self._tracks:
            self._plan.give_back(self._views.all())

    def reset(self) -> None:
        """Move this engine to a view of its own, where nothing is stored yet.

        Others keep what they share; so does this engine after a restart. What running requests
        have computed so far may be of the old weights: it is not stored.
        """
        self._view_id = f"{time.time_ns():x}-{id(self):x}"
        self._views.clear()
        self._plan.forget_late()
        for track in self._tracks.values():
            track.let_go()
            track.view = None
            track.missed_at = track.given_back_at = None
            track.stores = False

    def pending(self) -> bool:
        """Return whether the engine must keep stepping for work under way."""
        if not self._views.all() and self._roster.complete and root_seed():
            # The engine is up and idle: have the space open when the first request comes.
            self._views.get("")
        return bool(self._loads or self._pending or self._late_leases) or self._plan.pending()

    def close(self) -> None:
        """Give everything back."""
        for track in self._tracks.values():
            track.let_go()
        for lease in self._late_leases.values():
            lease.release()
        self._views.close()
        self._client.close()
