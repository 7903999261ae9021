"""Time to first token while the disk becomes slower: a request is never slower with kvstore.

Two real vLLM engines stand side by side, one without kvstore and one with it, and answer the same
prompts in turns: without, with, without again. The third is the second side of an A/A comparison:
how much two runs of the same thing differ on this machine. Every prompt's blocks are on disk and
nowhere else before the engine with kvstore gets it. For each speed the daemon is started anew with
its disk throttled to it, so that what it has learned about its disk is learned anew as well. Then
the same prompts are asked for behind others (`queued`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvstore.cli.bench import queued
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.cli.demo.engine_child import EngineChild, Narrate
from kvstore.cli.plain import plain
from kvstore.client import Client
from kvstore.space import SpaceSpec

__all__ = ["Step", "SweepSettings", "plot", "sweep"]

_WAIT_S: Final = 60.0
_POLL_S: Final = 0.02
_SETTLE_S: Final = 0.5
_OUTPUT_TOKENS: Final = 2
_WARM_UP_TEXT: Final = 5000
_AHEAD_TEXT: Final = 10_000


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What the sweep runs with.

    Attributes:
        model: directory of the checkpoint.
        directory: scratch directory.
        speeds: disk speeds in bytes a second; None: as fast as it is.
        prompts: different prompts.
        rounds: how often each is asked for, at each speed.
        prompt_tokens: tokens of each.
        block_tokens: of the engine.
    """

    model: Path
    directory: Path
    speeds: Sequence[int | None]
    prompts: int = 10
    rounds: int = 3
    prompt_tokens: int = 1024
    block_tokens: int = 128


@dataclass(slots=True)
class Step:
    """One speed, and what each request came to, paired by position.

    Page faults until the first token tell a slower engine from a slower cache: see `ALLOCATOR`.

    Attributes:
        speed: of the disk, bytes a second; None: not throttled.
        without: seconds to the first token without kvstore.
        kvstore: the same with it.
        again: without it again.
        reused_tokens: loaded, with kvstore.
        without_faults: page faults without kvstore.
        kvstore_faults: with it.
    """

    speed: int | None
    without: list[float] = field(default_factory=list)
    kvstore: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)
    without_faults: list[int] = field(default_factory=list)
    kvstore_faults: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return samples and what they come to."""
        return {
            "bytes_per_second": self.speed,
            "without_s": self.without,
            "kvstore_s": self.kvstore,
            "without_again_s": self.again,
            "reused_tokens": self.reused_tokens,
            "without_page_faults": self.without_faults,
            "kvstore_page_faults": self.kvstore_faults,
            "p50_ratio": median(self.kvstore) / median(self.without),
            "p95_ratio": _p95(self.kvstore) / _p95([*self.without, *self.again]),
            "aa_p50_ratio": median(self.again) / median(self.without),
            "aa_p95_ratio": _p95(self.again) / _p95(self.without),
        }


def _p95(samples: Sequence[float]) -> float:
    return sorted(samples)[min(len(samples) - 1, int(0.95 * len(samples)))]


class _Sweep:
    def __init__(self, settings: SweepSettings, say: Narrate) -> None:
        self._settings = settings
        self._say = say
        self._daemons = 0
        self._ahead = 0

    @contextlib.contextmanager
    def daemon(self, speed: int | None, *more: str) -> Iterator[tuple[ChildDaemon, Client]]:
        """Run a daemon whose disk is that fast, with some more options."""
        self._daemons += 1
        directory = self._settings.directory
        options = ["--disk", str(directory / "disk"), "--disk-capacity", "4GiB"]
        options += ["--host-pool", "1GiB", "--discard-host", *more]
        if speed is not None:
            options += ["--disk-throttle", str(speed)]
        with (
            ChildDaemon(directory, options, f"daemon-{self._daemons}") as daemon,
            connect(daemon.address) as client,
        ):
            yield daemon, client

    def engine(self, name: str, target: str) -> EngineChild:
        settings = self._settings
        return EngineChild(
            name,
            model=settings.model,
            directory=settings.directory,
            target=target,
            max_model_len=queued.AHEAD_FACTOR * settings.prompt_tokens + _OUTPUT_TOKENS + 1,
            block_tokens=settings.block_tokens,
            say=self._say,
            # A longer prompt fills several steps, and others wait meanwhile.
            step_tokens=settings.prompt_tokens,
        )

    def store(self, client: Client, engine: EngineChild, prompts: Sequence[list[int]]) -> None:
        """Have every prompt computed and its blocks written to disk."""
        blocks = len(prompts) * (self._settings.prompt_tokens // self._settings.block_tokens)
        end = time.monotonic() + _WAIT_S + 5 * len(prompts)
        # What an engine computes before it was granted slots, or faster than it is, is not stored
        # the first time.
        while sum(space.blocks for space in client.spaces()) < blocks:
            if time.monotonic() > end:
                raise ChildError(f"{blocks} blocks were not stored in time")
            for prompt in prompts:
                engine.generate(prompt, _OUTPUT_TOKENS)
            time.sleep(_SETTLE_S)
        if not client.flush(_WAIT_S).done:
            raise ChildError("not everything was written to disk")

    def step(
        self,
        speed: int | None,
        plain: EngineChild,
        with_kvstore: EngineChild,
        prompts: Sequence[list[int]],
        warm_up: Sequence[list[int]],
    ) -> Step:
        step = Step(speed)
        with self.daemon(speed) as (_, client):
            spec = _spec(client)
            self._until_attached(client)
            for prompt in warm_up:
                with_kvstore.generate(prompt, 1)
                plain.generate(prompt, 1)
            space = client.open_space(spec)
            for _ in range(self._settings.rounds):
                for prompt in prompts:
                    client.flush(_WAIT_S)
                    space.evict(tier="host")
                    without = plain.generate(prompt, _OUTPUT_TOKENS)
                    step.without.append(without.ttft_s)
                    step.without_faults.append(without.page_faults)
                    answer = with_kvstore.generate(prompt, _OUTPUT_TOKENS)
                    step.kvstore.append(answer.ttft_s)
                    step.reused_tokens.append(answer.cached_tokens)
                    step.kvstore_faults.append(answer.page_faults)
                    step.again.append(plain.generate(prompt, _OUTPUT_TOKENS).ttft_s)
        return step

    def queued(
        self, speed: int | None, engine: EngineChild, prompts: Sequence[list[int]]
    ) -> queued.Queued:
        """Ask for each prompt behind another one, from disk and from memory."""
        tokens = queued.AHEAD_FACTOR * self._settings.prompt_tokens

        def ahead() -> list[int]:
            self._ahead += 1
            return engine.encode(_AHEAD_TEXT + self._ahead, tokens)

        # What is asked for once need not fill the throttled disk.
        with self.daemon(speed, "--write-policy", "reused") as (_, client):
            spec = _spec(client)
            self._until_attached(client)
            # The engine's first request to a daemon finds no slots reserved.
            engine.generate(ahead(), 1)
            space = client.open_space(spec)
            return queued.measure(speed, engine, client, space, prompts, ahead)

    @staticmethod
    def _until_attached(client: Client) -> None:
        """Wait until the engine has found this daemon: a client besides this one."""
        end = time.monotonic() + _WAIT_S
        while len(client.stats().clients) < 2:
            if time.monotonic() > end:
                raise ChildError("the engine did not find the daemon")
            time.sleep(_POLL_S)


def _spec(client: Client) -> SpaceSpec:
    [space] = client.spaces()
    return SpaceSpec(**plain(space.spec))


def sweep(settings: SweepSettings, say: Narrate) -> tuple[list[Step], list[queued.Queued]]:
    """Run all speeds: requests alone, and requests behind others.

    Raises:
        KVStoreError: a process failed or took too long.
    """
    run = _Sweep(settings, say)
    address = f"unix://{settings.directory / 'kvstore.sock'}"
    with contextlib.ExitStack() as stack:
        with run.daemon(None) as (daemon, client):
            plain = run.engine("engine without kvstore", "")
            stack.callback(plain.stop)
            with_kvstore = run.engine("engine with kvstore", daemon.address)
            stack.callback(with_kvstore.stop)
            assert daemon.address == address
            tokens = settings.prompt_tokens
            prompts = [with_kvstore.encode(n, tokens) for n in range(settings.prompts)]
            warm_up = [with_kvstore.encode(_WARM_UP_TEXT + n, tokens) for n in range(2)]
            say(f"storing {len(prompts)} prompts of {tokens} tokens")
            run.store(client, with_kvstore, [*prompts, *warm_up])
        steps, behind = [], []
        for speed in settings.speeds:
            name = "unlimited" if speed is None else f"{speed / 1e6:.0f} MB/s"
            step = run.step(speed, plain, with_kvstore, prompts, warm_up)
            steps.append(step)
            say(
                f"disk {name}: {median(step.without):.2f} s without, "
                f"{median(step.kvstore):.2f} s with kvstore, "
                f"{median(step.reused_tokens):.0f} tokens loaded"
            )
            behind.append(run.queued(speed, with_kvstore, prompts))
            say(
                f"disk {name}, behind others: {median(behind[-1].disk):.2f} s from disk, "
                f"{median(behind[-1].host):.2f} s from memory, "
                f"{median(behind[-1].disk_tokens):.0f} tokens loaded"
            )
    return steps, behind


def plot(steps: Sequence[Step], path: Path) -> None:
    """Draw TTFT against disk speed, without and with kvstore, and where it begins to load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Curves go from slow to fast, in whatever order speeds were measured.
    steps = sorted(steps, key=lambda s: inf if s.speed is None else s.speed)
    fastest = max((s.speed for s in steps if s.speed is not None), default=1e9)
    x = [(s.speed if s.speed is not None else 4 * fastest) / 1e6 for s in steps]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    lines = (
        ("computed, without kvstore", "#777777", [s.without for s in steps]),
        ("with kvstore", "#1f6fb4", [s.kvstore for s in steps]),
    )
    for name, color, samples in lines:
        middle = [median(of) * 1e3 for of in samples]
        low = [min(of) * 1e3 for of in samples]
        high = [_p95(of) * 1e3 for of in samples]
        axes.plot(x, middle, "o-", color=color, label=f"{name} (median; least to P95)")
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    loading = [at for at, s in zip(x, steps, strict=True) if median(s.reused_tokens) > 0]
    if loading:
        axes.axvline(min(loading), color="#1f6fb4", linestyle=":")
        # At the line's foot, where no curve and no legend is.
        place = axes.get_xaxis_transform()
        axes.text(min(loading), 0.03, " loads from here on", va="bottom", transform=place)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("disk speed, MB/s (the last point: not throttled)")
    axes.set_ylabel("time to first token, ms")
    figure.legend(frameon=False, loc="outside upper center", ncols=2, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
