"""The demo's four rows, and what each of them needs to have happened before.

1. cold: the engine computes every prompt, and stores its blocks
2. warm, same engine: it loads them
3. warm, new engine: the process is another one, the daemon the same
4. warm, from disk: a new daemon that must not look at saved host memory (``--discard-host``)

The engine's own prefix cache is off throughout. Before a row counts, its engine gets an unrelated
prompt of the same length, so that one-time costs (thread pools, first touches) are not measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.cli.demo.engine_child import Answer, EngineChild, Narrate
from kvstore.cli.demo.hit_rate import HitRates, read_hit_rates
from kvstore.client import Client
from kvstore.units import format_seconds

__all__ = ["DemoResult", "DemoSettings", "Row", "run_demo"]

# Usage comes with heartbeats, one a second.
_SETTLE_TIMEOUT_S: Final = 15.0
_POLL_S: Final = 0.05
# Numbers of unrelated texts, far from those of the prompts.
_WARM_UP_TEXT: Final = 1000


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo runs with.

    Attributes:
        model: directory of the model's checkpoint.
        directory: scratch directory, removed by the caller.
        prompts: prompts per row.
        prompt_tokens: tokens of each prompt.
        output_tokens: tokens generated for each.
        block_tokens: the engine's block size, which is also kvstore's.
    """

    model: Path
    directory: Path
    prompts: int = 6
    prompt_tokens: int = 1500
    output_tokens: int = 16
    block_tokens: int = 128

    @property
    def full_block_tokens(self) -> int:
        """Tokens of one prompt that fill whole blocks: the most that can be reused."""
        return self.prompt_tokens // self.block_tokens * self.block_tokens


@dataclass(slots=True)
class Row:
    """What one row measured.

    Attributes:
        name: the row's label.
        ttft_seconds: time to first token of each prompt.
        reused_tokens: tokens not computed, as the engine counts them.
        served_tokens: the same by the tier that held them, as the daemon counts them.
        outputs: generated tokens of each prompt.
    """

    name: str
    ttft_seconds: list[float] = field(default_factory=list)
    reused_tokens: int = 0
    served_tokens: dict[str, int] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def ttft_p50_seconds(self) -> float:
        """Median time to first token."""
        return median(self.ttft_seconds)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All rows, the cold one first.

    Attributes:
        settings: what it ran with.
        rows: what each measured.
        hit_rates: of each daemon.
    """

    settings: DemoSettings
    rows: list[Row]
    hit_rates: list[HitRates] = field(default_factory=list)

    @property
    def reusable_tokens(self) -> int:
        """Tokens in full blocks of all prompts together."""
        return self.settings.full_block_tokens * self.settings.prompts

    @property
    def tokens_identical(self) -> bool:
        """Whether all rows generated the same tokens."""
        return all(row.outputs == self.rows[0].outputs for row in self.rows)

    def speed_up(self, row: Row) -> float:
        """Return how many times faster than cold a row is."""
        return self.rows[0].ttft_p50_seconds / row.ttft_p50_seconds

    def problems(self) -> list[str]:
        """Say what is not as it must be, one line each."""
        found = [] if self.tokens_identical else ["generated tokens differ between rows"]
        if self.rows[0].reused_tokens:
            found.append(f"{self.rows[0].name}: reused tokens before anything was stored")
        for row in self.rows[1:]:
            if row.reused_tokens < 0.9 * self.reusable_tokens:
                found.append(
                    f"{row.name}: reused {row.reused_tokens} of {self.reusable_tokens} tokens"
                )
        if not self.rows[-1].served_tokens.get("disk"):
            found.append(f"{self.rows[-1].name}: was not served from disk")
        return found + [problem for rates in self.hit_rates if (problem := rates.problem())]


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError(f"waited {_SETTLE_TIMEOUT_S:.0f} s in vain until {what}")
        time.sleep(_POLL_S)


class _Demo:
    """Runs the rows one after the other."""

    def __init__(self, settings: DemoSettings, say: Narrate) -> None:
        self._settings = settings
        self._say = say
        self._prompts: list[list[int]] = []
        self._warm_ups = 0
        # Of the daemon that runs: what engines were asked, and what their outputs said.
        self._asked = self._prompt_tokens = self._cached_tokens = 0

    @contextlib.contextmanager
    def daemon(self, name: str, *options: str) -> Iterator[tuple[ChildDaemon, Client]]:
        """Run a daemon on the scratch directory, with a client to watch it."""
        self._say(f"starting {name} …")
        disk = self._settings.directory / "disk"
        fixed = ["--disk", str(disk), "--disk-capacity", "2GiB", "--host-pool", "1GiB"]
        fixed += ["--metrics", "127.0.0.1:0"]
        self._asked = self._prompt_tokens = self._cached_tokens = 0
        with ChildDaemon(
            self._settings.directory, [*fixed, *options], name.replace(" ", "-")
        ) as daemon:
            self._say(f"  ready after {format_seconds(daemon.start_seconds)}")
            with connect(daemon.address) as client:
                yield daemon, client

    @contextlib.contextmanager
    def engine(self, target: str, name: str) -> Iterator[EngineChild]:
        """Run an engine that has seen one unrelated prompt."""
        settings = self._settings
        engine = EngineChild(
            name,
            model=settings.model,
            directory=settings.directory,
            target=target,
            max_model_len=settings.prompt_tokens + settings.output_tokens + 1,
            block_tokens=settings.block_tokens,
            say=self._say,
        )
        try:
            if not self._prompts:
                self._prompts = [
                    engine.encode(number, self._settings.prompt_tokens)
                    for number in range(self._settings.prompts)
                ]
            self._warm_ups += 1
            unrelated = engine.encode(_WARM_UP_TEXT + self._warm_ups, self._settings.prompt_tokens)
            self._say("  one unrelated prompt, not counted")
            self._generate(engine, unrelated)
            yield engine
        finally:
            engine.stop()

    def _generate(self, engine: EngineChild, prompt: list[int]) -> Answer:
        """Send one prompt, and keep count."""
        answer = engine.generate(prompt, self._settings.output_tokens)
        self._asked += 1
        self._prompt_tokens += len(prompt)
        self._cached_tokens += answer.cached_tokens
        return answer

    def hit_rates(self, name: str, daemon: ChildDaemon, client: Client) -> HitRates:
        """Compare what the engines' outputs said with what their daemon shows."""

        def reported() -> bool:
            return client.stats().usage.requests >= self._asked

        _wait_until(reported, f"the engines had reported all {self._asked} prompts")
        metrics = daemon.ready["metrics"]
        return read_hit_rates(name, client, metrics, self._prompt_tokens, self._cached_tokens)

    def row(self, name: str, engine: EngineChild, client: Client) -> Row:
        """Send every prompt once, one at a time."""
        settings, row = self._settings, Row(name)
        self._say(f"{name}: {settings.prompts} prompts of {settings.prompt_tokens} tokens")
        before = _served(client)
        for prompt in self._prompts:
            answer = self._generate(engine, prompt)
            row.ttft_seconds.append(answer.ttft_s)
            row.reused_tokens += answer.cached_tokens
            row.outputs.append(answer.tokens)
        if row.reused_tokens:

            def accounted() -> bool:
                return sum(_served(client).values()) - sum(before.values()) >= row.reused_tokens

            _wait_until(accounted, "the engine had reported what it loaded")
        after = _served(client)
        row.served_tokens = {
            tier: after[tier] - before[tier] for tier in after if after[tier] > before[tier]
        }
        self._say(f"  first token after {format_seconds(row.ttft_p50_seconds)} (median)")
        return row

    def stored(self, client: Client) -> None:
        """Wait until every block of the prompts, and of the unrelated one, is in the store."""
        settings = self._settings
        blocks = (settings.prompts + 1) * (settings.prompt_tokens // settings.block_tokens)

        def complete() -> bool:
            return sum(space.blocks for space in client.spaces()) >= blocks

        _wait_until(complete, f"{blocks} blocks were stored")


def _served(client: Client) -> dict[str, int]:
    """Return the tokens that engines reported as reused so far, by tier."""
    usage = client.stats().usage
    return {
        "gpu": usage.reused_tokens_gpu,
        "host": usage.reused_tokens_host,
        "disk": usage.reused_tokens_disk,
    }


def run_demo(settings: DemoSettings, say: Narrate) -> DemoResult:
    """Run all four rows.

    Args:
        settings: what to run with.
        say: takes one line at a time about what is going on.

    Raises:
        KVStoreError: a process failed or took too long.
    """
    demo, rows, rates = _Demo(settings, say), [], []
    with demo.daemon("daemon 1") as (daemon, client):
        with demo.engine(daemon.address, "engine 1") as engine:
            rows.append(demo.row("cold", engine, client))
            demo.stored(client)
            rows.append(demo.row("warm, same engine", engine, client))
        say("engine 1 is gone; another process starts from nothing")
        with demo.engine(daemon.address, "engine 2") as engine:
            rows.append(demo.row("warm, new engine", engine, client))
            rates.append(demo.hit_rates("daemon 1", daemon, client))
        say("flushing everything to disk, then stopping the daemon")
        client.flush(timeout_s=60)
    with (
        demo.daemon("daemon 2", "--discard-host") as (daemon, client),
        demo.engine(daemon.address, "engine 3") as engine,
    ):
        rows.append(demo.row("warm, from disk", engine, client))
        rates.append(demo.hit_rates("daemon 2", daemon, client))
    return DemoResult(settings, rows, rates)
