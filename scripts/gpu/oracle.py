"""Whether engine blocks hold the bytes of their keys, looked at after every step.

Under batch-invariant kernels a block's bytes follow from its key (vLLM's hash of all tokens up to its
end), whoever computed them, in whatever batch. So the bytes that a key was seen with first are kept, on
the KV cache's own device, and every block that a step has used is compared with those of its key: a
copy to the wrong block, of the wrong bytes, too early or too late shows in the step that uses it.

No kernels are that invariant (vLLM's attention rounds differently where a prefix was cached), so there may
be several versions of a key's bytes. Then a block that was loaded must still hold one of the
versions that this engine has computed: `foreign` counts those that do not.

Comparisons are queued on the stream that the engine computes on, so they see what the step saw; a
thread reads what they came to.
"""

from __future__ import annotations

import json
import queue
import threading
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

# Compared at a time: bounds the memory for intermediate results.
_PIECE = 128
_MOST_EXAMPLES = 60


@dataclass(slots=True)
class Used:
    """One block that a request uses in a step.

    Attributes:
        request: whose.
        index: of the block in the request.
        block: engine block.
        key: vLLM's hash.
        made: where its bytes are from: L loaded, P computed with other tokens, D one by one.
    """

    request: str
    index: int
    block: int
    key: bytes
    made: str


@dataclass(slots=True)
class Account:
    """What was found.

    Attributes:
        steps: looked at.
        comparisons: of a block with the first bytes of its key.
        distinct: keys.
        blocks: per way of making, "first:this": different (key, block) pairs compared.
        differing: likewise, those that differed.
        roots: likewise, those that differed though all blocks before them were equal.
        versions: of keys' bytes that were computed, beyond the first.
        loaded: different (key, version, block) that were loaded.
        foreign: those among them whose version was never computed here.
        examples: the first of them.
        copies: what `checked` found about single copies.
        problem: why no more was looked at; "" while all is well.
    """

    steps: int = 0
    comparisons: int = 0
    distinct: int = 0
    blocks: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    roots: Counter[str] = field(default_factory=Counter)
    versions: int = 0
    loaded: int = 0
    foreign: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    copies: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Oracle:
    """Keeps first bytes, compares later ones."""

    def __init__(self, segments: list[torch.Tensor], capacity: int, out: Path) -> None:
        """Take memory.

        Args:
            segments: views of the KV cache, each (blocks, values).
            capacity: most keys; further ones are not looked at.
            out: file for the account.
        """
        self._segments = segments
        self._first = [part.new_empty((capacity, part.shape[1])) for part in segments]
        self._capacity = capacity
        self._rows: dict[bytes, int] = {}
        self._about: list[Used] = []
        self._said: set[tuple[int, bytes, str]] = set()
        # Checksums of the versions of each key that were computed, and what was loaded.
        self._computed: dict[bytes, set[int]] = {}
        self._loaded: set[tuple[bytes, int, int]] = set()
        draw = torch.Generator().manual_seed(1)
        self._weights = [
            torch.randint(1, 1 << 40, (part.shape[1],), generator=draw).to(part.device)
            for part in segments
        ]
        self._out = out
        self.account = Account()
        self.guard = threading.Lock()
        self._results: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="oracle", daemon=True).start()

    def look(self, step: int, used: list[Used]) -> None:
        """Compare a step's blocks; on the engine's thread, after its forward pass."""
        fresh: dict[bytes, Used] = {}
        for one in used:
            if one.key not in self._rows and len(self._rows) < self._capacity:
                self._rows[one.key] = len(self._about)
                self._about.append(one)
                fresh[one.key] = one
        if fresh:
            rows = self._index([self._rows[key] for key in fresh])
            blocks = self._index([one.block for one in fresh.values()])
            for first, part in zip(self._first, self._segments, strict=True):
                first.index_copy_(0, rows, part.index_select(0, blocks))
        known = [one for one in used if one.key in self._rows]
        found = [self._compare(known[at : at + _PIECE]) for at in range(0, len(known), _PIECE)]
        if not found:
            return
        whole = [
            torch.cat(parts, -1).to("cpu", non_blocking=True) for parts in zip(*found, strict=True)
        ]
        event = None
        if self._segments[0].is_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
        self._results.put((step, known, whole, event))

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._segments[0].device)

    def _compare(self, used: list[Used]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return per segment and block: values that differ, by how much at most; and checksums."""
        rows = self._index([self._rows[one.key] for one in used])
        blocks = self._index([one.block for one in used])
        counts, largest = [], []
        checksums = torch.zeros(len(used), dtype=torch.int64, device=blocks.device)
        for first, part, weights in zip(self._first, self._segments, self._weights, strict=True):
            this, that = part.index_select(0, blocks), first.index_select(0, rows)
            whole = torch.int16 if this.element_size() == 2 else torch.int32
            counts.append((this.view(whole) != that.view(whole)).sum(1))
            largest.append((this.float() - that.float()).abs().amax(1))
            checksums = 3 * checksums + (this.view(whole) * weights).sum(1)
        return torch.stack(counts), torch.stack(largest), checksums

    def _read(self) -> None:
        try:
            self._read_all()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: an account that says so
            traceback.print_exc()
            self.account.problem = repr(error)
            self.save()

    def _read_all(self) -> None:
        while (item := self._results.get()) is not None:
            step, used, (counts, largest, checksums), event = item
            if event is not None:
                event.synchronize()
            with self.guard:
                self.account.steps += 1
                self.account.distinct = len(self._rows)
                self._take_in(step, used, counts.numpy(), largest.numpy())
                self._take_versions(used, checksums.tolist())
            if self._results.empty():
                self.save()

    def _take_in(self, step: int, used: list[Used], counts: Any, largest: Any) -> None:
        account = self.account
        account.comparisons += len(used)
        wrong: set[str] = set()
        for at, one in enumerate(used):
            differs = bool(counts[:, at].any())
            first = one.request not in wrong
            if differs:
                wrong.add(one.request)
            known = (one.block, one.key, one.made)
            before = self._about[self._rows[one.key]]
            if known in self._said or before is one:
                continue
            self._said.add(known)
            pair = f"{before.made}:{one.made}"
            account.blocks[pair] += 1
            if not differs:
                continue
            account.differing[pair] += 1
            account.roots[pair] += first
            if len(account.examples) < _MOST_EXAMPLES and (first or len(account.examples) < 20):
                account.examples.append(
                    {
                        "step": step,
                        "request": one.request,
                        "index": one.index,
                        "block": one.block,
                        "made": pair,
                        "first_by": before.request,
                        "root": first,
                        "differing_values": counts[:, at].tolist(),
                        "of": int(self._segments[0].shape[1]),
                        "largest_difference": [round(float(x), 5) for x in largest[:, at]],
                    }
                )

    def _take_versions(self, used: list[Used], checksums: list[int]) -> None:
        """Learn what was computed; see that what was loaded is among it."""
        account = self.account
        for one, checksum in zip(used, checksums, strict=True):
            versions = self._computed.setdefault(one.key, set())
            if "L" not in one.made:
                if checksum not in versions:
                    account.versions += bool(versions)
                    versions.add(checksum)
                continue
            if one.made == "L" and (one.key, checksum, one.block) not in self._loaded:
                self._loaded.add((one.key, checksum, one.block))
                account.loaded += 1
                if checksum not in versions:
                    account.foreign += 1
                    account.examples.append({"foreign": asdict(one) | {"key": one.key.hex()}})

    def save(self) -> None:
        """Write the account."""
        with self.guard:
            account = {one.name: getattr(self.account, one.name) for one in fields(Account)}
            text = json.dumps(account)
        temporary = self._out.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self._out)
