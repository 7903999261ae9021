"""An engine that drives the connector like vLLM's scheduler and workers do, without a model.

Its "KV" is a function of the tokens before, so that every byte in the cache can be checked at any
time: `MiniEngine.check` finds a block that was loaded wrongly, stored too early or overwritten.
The order of the hooks is that of vLLM 0.32, or of 0.26 with `old=True`.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import time
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_store import DAEMONS, FakeClient, FakeDaemon

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.scheduler_side import SchedulerSide
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.worker_side import WorkerSide

BLOCK = 4  # tokens of an engine block
LAYERS = 3
WIDTH = 8


class Request:
    """What the connector reads of vLLM's Request."""

    def __init__(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.max_tokens = max_tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.lora_request: Any = None
        self.skip_reading_prefix_cache = False
        self.status = "waiting"
        self.table: list[int] = []
        self.seen = False
        self.preempted = False
        self.rehash()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def rehash(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.tokens):
            at = len(self.block_hashes)
            parent = self.block_hashes[-1] if at else b"root"
            text = repr(self.tokens[at * BLOCK : (at + 1) * BLOCK]).encode()
            self.block_hashes.append(hashlib.sha256(parent + text).digest())

    def rows(self, shard: int) -> np.ndarray[Any, Any]:
        """What the cache must hold, shape (tokens, layers, width)."""
        crcs = list(itertools.accumulate(self.tokens, lambda c, t: zlib.crc32(bytes([t]), c)))
        base = np.array(crcs, np.uint32)[:, None, None]
        other = np.arange(LAYERS * WIDTH, dtype=np.uint32).reshape(LAYERS, WIDTH)
        rows: np.ndarray[Any, Any] = (base ^ (other + 97 * shard)).astype(np.int64)
        return rows


class Shell(KVStoreConnector):
    """The connector without vLLM's configuration."""

    def __init__(self, scheduler: SchedulerSide | None, worker: WorkerSide | None) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._connector_metadata = None


@dataclass
class Rank:
    caches: dict[str, torch.Tensor]
    worker: WorkerSide
    shell: Shell


@dataclass
class MiniEngine:
    """One engine.

    Attributes:
        daemon: shared with other engines of the test.
        blocks: of the KV cache; block 0 is nobody's.
        group: engine blocks per stored block.
        shards: tensor-parallel ranks.
        local: whether it has a prefix cache of its own.
        old: order of hooks and fields of vLLM 0.26.
        step_tokens: most tokens of a step.
    """

    daemon: FakeDaemon
    blocks: int = 64
    group: int = 2
    shards: int = 1
    local: bool = False
    old: bool = False
    step_tokens: int = 32
    resumed_as_new: bool = False
    settings: Settings = field(default_factory=lambda: Settings(step_wait_seconds=0.0))
    delayed_stores: bool = False

    def __post_init__(self) -> None:
        DAEMONS["mini"] = self.daemon
        self.shape = EngineShape(
            engine_block_tokens=BLOCK,
            group_blocks=self.group,
            ranks=self.shards,
            tensor_parallel=self.shards,
            pipeline_parallel=1,
            replicas=1,
            model="mini",
            weights="1",
            dtype="int64",
            hash_algorithm="sha256_cbor",
            prefix_caching=self.local,
            step_tokens=self.step_tokens,
            delayed_stores=self.delayed_stores,
            refusal="",
        )
        self.now = 0.0
        self.scheduler = SchedulerSide(
            self.settings, self.shape, FakeClient("mini"), clock=lambda: self.now
        )
        self.top = Shell(self.scheduler, None)
        self.ranks = [self._rank(r) for r in range(self.shards)]
        infos = {r: rank.shell.get_handshake_metadata() for r, rank in enumerate(self.ranks)}
        self.top.set_xfer_handshake_metadata(pickle.loads(pickle.dumps(infos)))
        self.free = list(range(1, self.blocks))
        self.refs = [0] * self.blocks
        self.cached: dict[bytes, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.all: dict[str, Request] = {}
        self.received: set[str] = set()
        self.recv_counts: dict[str, int] = {}
        self.loaded_tokens = 0
        self.names = itertools.count()
        self.planned = 0
        self.failed_blocks = 0

    def _rank(self, rank: int) -> Rank:
        # One allocation per layer: the layout of vLLM 0.26, and of CPUs.
        caches = {
            f"layer{i}": torch.zeros((self.blocks, 1, BLOCK, WIDTH), dtype=torch.int64)
            for i in range(LAYERS)
        }
        worker = WorkerSide(self.shape, FakeClient("mini"), tensor_rank=rank, pipeline_rank=0)
        worker.register(caches, self.blocks, "mini")
        return Rank(caches, worker, Shell(None, worker))

    # The scheduler.

    def add(
        self, tokens: list[int], max_tokens: int = 1, name: str = "", lora: Any = None
    ) -> Request:
        request = Request(name or f"r{next(self.names)}", tokens, max_tokens)
        request.lora_request = lora
        self.all[request.request_id] = request
        self.waiting.append(request)
        self.top.on_new_request(request)
        return request

    def _allocate(self, request: Request, tokens: int, keep: list[int]) -> list[int] | None:
        need = -(-tokens // BLOCK) - len(request.table) - len(keep)
        fresh = [b for b in keep if self.refs[b] == 0]
        if need > len(self.free) - len(fresh):
            return None
        for block in keep:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
        new = [self.free.pop(0) for _ in range(max(need, 0))]
        for block in new:
            self.refs[block] += 1
            self.cached = {h: b for h, b in self.cached.items() if b != block}
        request.table += keep + new
        return keep + new

    def _release(self, request: Request) -> None:
        for block in reversed(request.table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)
        request.table = []

    def _cache(self, request: Request) -> None:
        if self.local:
            for i in range(request.num_computed_tokens // BLOCK):
                self.cached.setdefault(request.block_hashes[i], request.table[i])

    def _hits(self, request: Request) -> list[int]:
        hits = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in self.cached:
                break
            hits.append(self.cached[key])
        return hits

    def abort(self, request: Request) -> None:
        held = request.status == "loading" and request.request_id not in self.received
        self.received.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        assert self.top.request_finished_all_groups(request, (request.table,)) == (False, None)
        if not held:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self._release(request)
        del self.all[request.request_id]

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.status, request.preempted = "waiting", True
        self.waiting.insert(0, request)

    def schedule(self) -> SimpleNamespace:
        budget = self.step_tokens
        scheduled: dict[str, int] = {}
        new, cached_ids, cached_blocks, cached_computed, resumed = [], [], [], [], set()
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            fresh = self._allocate(request, request.num_computed_tokens + count, [])
            while fresh is None and self.running[-1] is not request:
                victim = self.running[-1]
                self.preempt(victim)
                scheduled.pop(victim.request_id, None)
                fresh = self._allocate(request, request.num_computed_tokens + count, [])
            if fresh is None or not count:
                continue
            scheduled[request.request_id] = count
            cached_ids.append(request.request_id)
            cached_blocks.append((fresh,) if fresh else None)
            cached_computed.append(request.num_computed_tokens)
            budget -= count
        for request in list(self.waiting):
            if budget <= 0:
                break
            if request.status == "loading":
                if request.request_id not in self.received:
                    continue
                self.received.remove(request.request_id)
                if request.num_computed_tokens == 0:
                    self._release(request)
                else:
                    self._cache(request)
                request.num_computed_tokens = min(
                    request.num_computed_tokens, request.num_tokens - 1
                )
                request.status = "waiting"
            external, wait = 0, False
            hits: list[int] = []
            computed = request.num_computed_tokens
            if computed == 0:
                hits = self._hits(request)
                computed = len(hits) * BLOCK
                found, wait = self.top.get_num_new_matched_tokens(request, computed)
                if found is None:
                    continue
                external = found
                assert computed + external <= request.num_tokens
                assert wait == (external > 0)
            count = 0 if wait else min(request.num_tokens - computed - external, budget)
            if self._allocate(request, computed + external + count, hits) is None:
                break
            tables = (list(request.table),)
            self.top.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda t=tables: t), external
            )
            request.num_computed_tokens = computed + external
            if wait:
                request.status = "loading"
                self.loaded_tokens += external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = count
            budget -= count
            if request.preempted and not self.resumed_as_new:
                cached_ids.append(request.request_id)
                cached_blocks.append(tables)
                cached_computed.append(request.num_computed_tokens)
                resumed.add(request.request_id)
            else:
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        block_ids=tables,
                        num_computed_tokens=request.num_computed_tokens,
                    )
                )
        keep = [i for i, r in enumerate(cached_ids) if r in scheduled]
        output = SimpleNamespace(
            scheduled_new_reqs=[n for n in new if n.req_id in scheduled],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[cached_ids[i] for i in keep],
                resumed_req_ids=resumed,
                new_block_ids=[cached_blocks[i] for i in keep],
                num_computed_tokens=[cached_computed[i] for i in keep],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=set(),
        )
        if not self.old:
            output.kv_connector_block_state = SimpleNamespace(
                get_block_ids=lambda r: (self.all[r].table,) if r in scheduled else None
            )
        return output

    # The workers.

    def _forward(self, rank: int, scheduled: dict[str, int]) -> None:
        for request_id, count in scheduled.items():
            request = self.all[request_id]
            rows = request.rows(rank)
            begin = request.num_computed_tokens
            # Attention reads everything before: what was loaded must be right.
            self._compare(request, rank, begin)
            for at in range(begin, begin + count):
                block, inside = request.table[at // BLOCK], at % BLOCK
                for i, cache in enumerate(self.ranks[rank].caches.values()):
                    cache[block, 0, inside] = torch.from_numpy(rows[at, i])

    def _compare(self, request: Request, rank: int, tokens: int) -> None:
        rows = request.rows(rank)
        for i, cache in enumerate(self.ranks[rank].caches.values()):
            for at in range(tokens):
                row = cache[request.table[at // BLOCK], 0, at % BLOCK].numpy()
                assert (row == rows[at, i]).all(), (request.request_id, at, i)

    def _work(self, rank: int, meta: Any, scheduled: dict[str, int]) -> SimpleNamespace:
        shell = self.ranks[rank].shell
        if not self.old:
            shell.handle_preemptions(meta)
        shell.bind_connector_metadata(meta)
        if self.old:
            shell.start_load_kv(None)
        self._forward(rank, scheduled)
        if not self.old:
            shell.start_load_kv(None)
        if scheduled or not self.old:
            shell.wait_for_save()
        _, received = shell.get_finished(set())
        output = SimpleNamespace(
            finished_recving=received or set(),
            invalid_block_ids=shell.get_block_ids_with_load_errors(),
        )
        if not self.old:
            output.kv_connector_worker_meta = pickle.loads(
                pickle.dumps(shell.build_connector_worker_meta())
            )
        shell.clear_connector_metadata()
        return output

    def step(self) -> None:
        self.now += 0.01
        output = self.schedule()
        meta = self.top.build_connector_meta(output)
        scheduled = output.num_scheduled_tokens
        self.planned += sum(len(store.slots) for store in meta.stores) * self.shards
        outputs = [
            self._work(r, pickle.loads(pickle.dumps(meta)), scheduled) for r in range(self.shards)
        ]
        self._update(outputs, scheduled)
        if not scheduled:
            time.sleep(0.001)  # as vLLM does, to let other threads have the GIL

    def _update(self, outputs: list[SimpleNamespace], scheduled: dict[str, int]) -> None:
        invalid: set[int] = set().union(*(o.invalid_block_ids for o in outputs))
        self.failed_blocks += len(invalid)
        received = set()
        for output in outputs:
            for request_id in output.finished_recving:
                left = self.recv_counts.pop(request_id, self.shards) - 1
                if left:
                    self.recv_counts[request_id] = left
                else:
                    received.add(request_id)
        report = None
        if not self.old:
            for output in outputs:
                meta = output.kv_connector_worker_meta
                report = report.aggregate(meta) if report is not None and meta else report or meta
        for request in self.waiting:
            if request.status == "loading":
                for i in range(-(-request.num_computed_tokens // BLOCK)):
                    if request.table[i] in invalid:
                        request.num_computed_tokens = i * BLOCK
                        break
        for request_id, count in scheduled.items():
            request = self.all[request_id]
            request.num_computed_tokens += count
            if request.num_computed_tokens < request.num_tokens:
                continue
            self._cache(request)
            if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                raise AssertionError("went on after its end")
            request.tokens.append(zlib.crc32(bytes(request.tokens)) % 251)
            request.rehash()
            if request.num_tokens - request.num_prompt_tokens == request.max_tokens:
                self.running.remove(request)
                request.status = "finished"
                self.top.request_finished_all_groups(request, (request.table,))
                self._drop(request)
        combined = SimpleNamespace(
            finished_recving=received, invalid_block_ids=invalid, kv_connector_worker_meta=report
        )
        self.top.update_connector_output(combined)
        for request_id in received:
            # vLLM asserts the same: each started load is reported once, no other ever.
            request = self.all[request_id]
            if request.status == "loading":
                assert request_id not in self.received
                self.received.add(request_id)
            else:
                assert request.status == "finished"
                self._drop(request)

    def run(self, *requests: Request, steps: int = 2000) -> None:
        """Step until the requests are finished (all, when none is named) and nothing is pending."""
        for _ in range(steps):
            left = [r for r in requests if r.status != "finished"] if requests else self.all
            if not left and not self.top.has_pending_push_work():
                return
            self.step()
        raise AssertionError(
            f"still at work: {[(r.request_id, r.status) for r in self.all.values()]}"
        )

    def finish(self, *requests: Request) -> None:
        """Step until the requests are finished, and not a step longer."""
        while any(request.status != "finished" for request in requests):
            self.step()

    def settle(self) -> None:
        """Wait until all that was planned is committed. Only where no other engine stores."""
        deadline = time.monotonic() + 60
        while len(self.daemon.commits) < self.planned:
            assert time.monotonic() < deadline, (self.daemon.commits, self.planned)
            time.sleep(0.001)

    def close(self) -> None:
        for rank in self.ranks:
            rank.shell.shutdown()
        self.top.shutdown()
