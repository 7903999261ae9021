"""Time to first token of vLLM with kvstore beside its peers, what kvstore costs, and whether it is right.

    python3 scripts/gpu/compare.py --out result.json --disk DIR [--part ttft --part cost …]

Parts, each with a limit of time; what is known is written to the result after every step:

- ttft     Llama-3-8B shape, eight prompts of 10,000 tokens: cold, warm, eight at once, a hit in the
           engine's own cache; engines run side by side and are asked in turns
- cost     the cache switched on and off by turns inside one engine: cold TTFT, inter-token latency
- restart  a new engine beside the same daemon; a new daemon, from disk; peers after the same
- correct  greedy tokens against the engine's own prefix cache; aborts and preemptions; leaks
- memory   GPU memory after exits in order and by SIGKILL

A warm round counts only when the engine's own cache was reset and found nothing, and at least 95 %
of the prompts' tokens came from outside; otherwise its row says so and has no ratio. Ratios are
of one call of this program: absolute times of shared machines move.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modes import LLAMA_8B, SMALL, Host, Mode, gpu_used_mib, kill, random_model, start, write_config

from kvstore.cli.child import Child, ChildError, interruptible
from kvstore.cli.plain import plain
from kvstore.client import Client
from kvstore.space import SpaceSpec

_GIB = 1 << 30
_START_S = 240.0
_ANSWER_S = 120.0
_FOUND = 0.95  # of the prompts' tokens; the last block of a prompt is always computed
_ROUNDS = 3
# Stores that are under way when a request ends are given so long.
_SETTLE_S = 2.0

Result = dict[str, Any]


class Run:
    """The result, written after every step, and what must be cleaned up."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        """Begin with an empty result."""
        self.arguments = arguments
        self.scratch = scratch
        self.result: Result = {"command": " ".join(sys.argv), "parts": {}}
        self.begin = time.monotonic()

    def say(self, line: str) -> None:
        """Print progress."""
        print(f"[{time.monotonic() - self.begin:5.1f} s] {line}", flush=True)

    def save(self) -> None:
        """Write the result as it is now."""
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        path = self.arguments.out
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1) + "\n")
        temporary.replace(path)

    def put(self, part: str, name: str, value: Any) -> None:
        """Add to the result."""
        self.result["parts"].setdefault(part, {})[name] = value
        self.save()


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """Engines that run side by side and are asked in turns."""

    def __init__(self, run: Run, model: Path, engine: Result, environment: dict[str, str]) -> None:
        """Start nothing yet."""
        self._run = run
        self._model = model
        self._engine = engine
        self._environment = environment
        self._children: dict[str, Child] = {}
        self.failed: dict[str, str] = {}

    def start(self, hosts: Sequence[Host], engine: Result | None = None) -> None:
        """Start engines at once and wait for all; one that fails is left out and noted."""
        waiting = []
        for host in hosts:
            child, settings = start(
                host, self._model, {**self._engine, **(engine or {})}, self._environment
            )
            self._children[host.mode.name] = child
            waiting.append((host.mode.name, child, settings))

        def ready(item: tuple[str, Child, Result]) -> tuple[str, str, float]:
            name, child, settings = item
            try:
                return name, "", child.ask(settings, _START_S)["start_seconds"]
            except (ChildError, ValueError) as error:
                return name, str(error), 0.0

        with ThreadPoolExecutor(len(waiting)) as pool:
            for name, problem, seconds in pool.map(ready, waiting):
                if problem:
                    self.failed[name] = problem
                    self._children.pop(name).kill()
                self._run.say(f"{name}: {problem or f'engine started in {seconds:.0f} s'}")

    @property
    def names(self) -> list[str]:
        """Engines that run."""
        return list(self._children)

    def ask(self, name: str, do: str, **arguments: Any) -> Result:
        """Ask one engine.

        Raises:
            ChildError: it answers with an error, too late, or is gone.
        """
        answer: Result = self._children[name].ask({"do": do, **arguments}, _ANSWER_S)
        return answer

    def drop(self, name: str, problem: str) -> None:
        """Go on without an engine."""
        self.failed[name] = problem
        self._run.say(f"{name}: {problem}")
        self._children.pop(name).kill()

    def each(self, what: Callable[[str], None]) -> None:
        """Do something with every engine in turn; one that fails is dropped."""
        for name in self.names:
            try:
                what(name)
            except ChildError as error:
                self.drop(name, str(error))

    def stop(self, names: Sequence[str] | None = None, *, violently: bool = False) -> None:
        """End engines."""
        for name in names or self.names:
            child = self._children.pop(name, None)
            if child is None:
                continue
            if violently:
                kill(child)
            else:
                child.stop(timeout_s=15)

    def __exit__(self, *_: object) -> None:
        """End what runs."""
        self.stop(violently=True)


def spread(values: Sequence[float]) -> Result:
    """Return median, least and most, and every sample."""
    return {
        "p50": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "samples": [round(value, 2) for value in values],
    }


def warm_row(answer: Result, tokens: int) -> Result:
    """Return a warm round, and what is wrong with it."""
    row = spread(answer["ms"])
    row["cached"] = answer["cached"]
    row["external"] = answer.get("external")
    wanted = tokens * len(answer["cached"]) * _FOUND
    if sum(answer["cached"]) < wanted:
        row["invalid"] = f"only {sum(answer['cached'])} of {wanted:.0f} tokens were found"
    elif answer.get("external") is not None and answer["external"] < wanted:
        row["invalid"] = f"only {answer['external']} of {wanted:.0f} tokens came from outside"
    return row


@contextlib.contextmanager
def hosts(run: Run, modes: Sequence[Mode]) -> Iterator[list[Host]]:
    """Start what outlives engines; a helper that does not start is left out."""
    with contextlib.ExitStack() as stack:
        started = []
        for mode in modes:
            try:
                host = Host(mode, run.scratch, int(run.arguments.pool_gib * _GIB))
            except ChildError as error:
                run.put("failed", mode.name, str(error))
                continue
            stack.callback(host.close)
            started.append(host)
        yield started


def _disk(run: Run, name: str) -> list[str]:
    return ["--disk", str(run.arguments.disk / name), "--disk-capacity", "20GiB"]


def part_ttft(run: Run) -> None:
    """Peers and kvstore, by turns."""
    arguments = run.arguments
    model = run.scratch / "llama"
    write_config(model, LLAMA_8B if not arguments.model else {})
    waves = [
        ["none", "pegaflow", "ours", "ours_pool"],
        ["native", "lmcache", "ours_again"],
    ]
    for wave in waves:
        modes = [_mode(run, name) for name in wave if not arguments.mode or name in arguments.mode]
        if modes:
            _ttft_wave(run, model, modes)


def _mode(run: Run, name: str) -> Mode:
    if name == "ours_pool":
        pool = ["--gpu-pool", f"{run.arguments.gpu_pool_gib:g}GiB"]
        return Mode(name, "ours", [*_disk(run, name), *pool], run.arguments.extra)
    if name.startswith("ours"):
        return Mode(name, "ours", _disk(run, name), run.arguments.extra)
    return Mode(name, name)


def _big(run: Run) -> Result:
    return {
        "load_format": "dummy",
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(run.arguments.kv_gb * 1e9),
        "enforce_eager": not run.arguments.graphs,
    }


def _ttft_wave(run: Run, model: Path, modes: Sequence[Mode]) -> None:
    count, tokens = run.arguments.count, run.arguments.tokens
    rows: dict[str, Result] = {mode.name: {} for mode in modes}

    def note(name: str, what: str, value: Any) -> None:
        rows[name][what] = value
        run.put("ttft", name, rows[name])

    with hosts(run, modes) as started, Fleet(run, model, _big(run), {}) as fleet:
        fleet.start(started)

        def cold(name: str) -> None:
            fleet.ask(name, "ttft", seed=99, count=2, tokens=tokens)
            note(
                name,
                "cold",
                spread(fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)["ms"]),
            )
            together = fleet.ask(name, "together", seed=8, count=count, tokens=tokens)
            note(name, "cold_together_ms", round(together["ms"], 1))
            # Once more, so that the prompts that are asked for again are the last ones stored.
            fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)

        def warm(turn: int) -> Callable[[str], None]:
            def ask(name: str) -> None:
                fleet.ask(name, "reset")
                row = warm_row(fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens), tokens)
                note(name, f"warm_{turn}", row)
                run.say(f"{name}: warm p50 {row['p50']} ms {row.get('invalid', '')}")

            return ask

        def together(turn: int) -> Callable[[str], None]:
            def ask(name: str) -> None:
                fleet.ask(name, "reset")
                answer = fleet.ask(name, "together", seed=7, count=count, tokens=tokens)
                found = warm_row({**answer, "ms": [answer["ms"]]}, tokens)
                note(name, f"together_{turn}", found)
                run.say(f"{name}: together {found['p50']} ms {found.get('invalid', '')}")

            return ask

        def own(name: str) -> None:
            fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)
            answer = fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)
            row = spread(answer["ms"])
            row["cached"], row["external"] = answer["cached"], answer["external"]
            note(name, "own_hit", row)
            run.say(f"{name}: own hit p50 {row['p50']} ms")

        fleet.each(cold)
        time.sleep(_SETTLE_S)
        for turn in range(_ROUNDS):
            fleet.each(warm(turn))
        for turn in range(_ROUNDS):
            fleet.each(together(turn))
        fleet.each(own)
        for host in started:
            if host.daemon is not None:
                note(host.mode.name, "daemon", _daemon(host))
        for name, problem in fleet.failed.items():
            note(name, "failed", problem)


def _daemon(host: Host) -> Result:
    """Return the daemon's own account, as far as it explains what was measured."""
    assert host.daemon is not None
    with Client(host.daemon.address) as client:
        stats = client.stats()
    tiers = {}
    for tier in stats.tiers:
        tiers[str(tier.tier)] = {
            "blocks": tier.blocks,
            "hit_tokens": tier.hit_tokens,
            "io_engine": tier.io_engine,
            "state": tier.state,
            "read_bytes": tier.read_bytes,
            "written_bytes": tier.written_bytes,
        }
    clients = [
        {"client": c.client, "leases": c.leases, "granted_bytes": c.granted_bytes}
        for c in stats.clients
    ]
    return {"tiers": tiers, "clients": clients}


def part_cost(run: Run) -> None:
    """What the cache costs when it finds nothing: on and off by turns in one engine."""
    model = run.scratch / "llama"
    write_config(model, LLAMA_8B)
    tokens, turns = run.arguments.tokens, run.arguments.turns
    with (
        hosts(run, [_mode(run, "ours")]) as started,
        Fleet(run, model, _big(run), {}) as fleet,
    ):
        fleet.start(started)
        fleet.ask("ours", "ttft", seed=99, count=2, tokens=tokens)
        cold: dict[bool, list[float]] = {True: [], False: []}
        gaps: dict[bool, list[float]] = {True: [], False: []}
        steps: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns):
            for on in (True, False) if turn % 2 else (False, True):
                fleet.ask("ours", "switch", on=on)
                seed = 1000 + 2 * turn + on
                answer = fleet.ask("ours", "ttft", seed=seed, count=1, tokens=tokens)
                cold[on] += answer["ms"]
                if sum(answer["cached"]):
                    raise ChildError("a prompt that must be cold was found")
        for turn in range(max(4, turns // 4)):
            for on in (True, False) if turn % 2 else (False, True):
                fleet.ask("ours", "switch", on=on)
                answer = fleet.ask(
                    "ours",
                    "decode",
                    seed=2000 + 2 * turn + on,
                    count=16,
                    tokens=500,
                    max_tokens=160,
                )
                steps[on] += answer["ms"]
                gaps[on].append(statistics.mean(answer["ms"]))
        daemon = _daemon(started[0])
    run.put(
        "cost",
        "ours",
        {
            "cold_on": spread(cold[True]),
            "cold_off": spread(cold[False]),
            "cold_ratio": statistics.median(cold[True]) / statistics.median(cold[False]),
            "itl_p50_on": statistics.median(steps[True]),
            "itl_p50_off": statistics.median(steps[False]),
            "itl_p50_ratio": statistics.median(steps[True]) / statistics.median(steps[False]),
            "itl_mean_on": spread(gaps[True]),
            "itl_mean_off": spread(gaps[False]),
            "itl_mean_ratio": statistics.median(gaps[True]) / statistics.median(gaps[False]),
            "steps": {str(on): len(values) for on, values in steps.items()},
            "daemon": daemon,
        },
    )


def part_restart(run: Run) -> None:
    """A new engine, a new daemon; peers that keep files, after the same."""
    model = run.scratch / "llama"
    write_config(model, LLAMA_8B)
    count, tokens = min(4, run.arguments.count), run.arguments.tokens
    wanted = run.arguments.mode or ["ours", "native_fs", "lmcache_disk"]
    modes = [_mode(run, name) for name in ("ours", "native_fs", "lmcache_disk") if name in wanted]
    rows: dict[str, Result] = {mode.name: {} for mode in modes}

    def note(name: str, what: str, value: Any) -> None:
        rows[name][what] = value
        run.put("restart", name, rows[name])

    with hosts(run, modes) as started, Fleet(run, model, _big(run), {}) as fleet:
        fleet.start(started)

        def cold(name: str) -> None:
            fleet.ask(name, "ttft", seed=99, count=2, tokens=tokens)
            answer = fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)
            note(name, "cold", spread(answer["ms"]))

        def warm(what: str) -> Callable[[str], None]:
            def ask(name: str) -> None:
                row = warm_row(fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens), tokens)
                samples = row["samples"]
                row["first_over_later"] = round(samples[0] / statistics.median(samples[1:]), 3)
                note(name, what, row)
                run.say(f"{name}: {what} {samples} {row.get('invalid', '')}")

            return ask

        fleet.each(cold)
        for host in started:
            if host.daemon is not None:
                with Client(host.daemon.address) as client:
                    client.flush(60.0)
        time.sleep(4 * _SETTLE_S)  # peers write behind, and cannot be asked when they are done
        fleet.stop()
        for name in rows:  # what the peers' files still have in the page cache would be memory
            _drop_caches(run.scratch / name)
        fleet.start(started)
        fleet.each(warm("new_engine"))
        ours = next((host for host in started if host.daemon is not None), None)
        if ours is None or "ours" not in fleet.names:
            return
        fleet.each(lambda name: fleet.ask(name, "reset") and None)
        assert ours.daemon is not None
        ours.daemon.stop()
        ours.start_daemon()
        note("ours", "daemon_after_restart", _daemon(ours))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with Client(ours.daemon.address) as client:
                if sum("vllm" in c.client or c.leases >= 0 for c in client.stats().clients) > 1:
                    break
            time.sleep(0.2)
        time.sleep(_SETTLE_S)
        before = _daemon(ours)
        warm("new_daemon_from_disk")("ours")
        note("ours", "daemon_before", before)
        note("ours", "daemon_after", _daemon(ours))


def _drop_caches(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def part_correct(run: Run) -> None:
    """Tokens, leaks, preemption and aborts, on a small model whose weights matter."""
    arguments = run.arguments
    model = Path(arguments.model) if arguments.model else run.scratch / "small"
    if not arguments.model:
        random_model(model, SMALL)
    engine = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "enforce_eager": not arguments.graphs,
        **arguments.small,
    }
    environment = {"VLLM_BATCH_INVARIANT": "1"} if arguments.invariant else {}
    modes = [Mode("none", "none"), _mode(run, "ours")]
    found: Result = {}

    def note(what: str, value: Any) -> None:
        found[what] = value
        run.put("correct", "ours", found)

    with hosts(run, modes) as started, Fleet(run, model, engine, environment) as fleet:
        fleet.start(started)
        ours = next(host for host in started if host.daemon is not None)
        assert ours.daemon is not None
        prompts = {"seed": 5, "count": 4, "tokens": 1500, "max_tokens": 32}
        cold = fleet.ask("ours", "ttft", **prompts)
        reference = fleet.ask("none", "ttft", **prompts)
        own = fleet.ask("none", "ttft", **prompts)
        time.sleep(_SETTLE_S)
        fleet.ask("ours", "reset")
        loaded = fleet.ask("ours", "ttft", **prompts)
        with Client(ours.daemon.address) as client:
            client.flush(60.0)
            for info in client.spaces():
                space = client.open_space(SpaceSpec(**plain(info.spec)))
                note("evicted", str(space.evict(tier="host")))
        fleet.ask("ours", "reset")
        from_disk = fleet.ask("ours", "ttft", **prompts)
        note(
            "found", {"loaded": loaded["cached"], "own": own["cached"], "disk": from_disk["cached"]}
        )
        note("tokens_loaded_equal_own_hit", loaded["tokens"] == own["tokens"])
        note("tokens_from_disk_equal_own_hit", from_disk["tokens"] == own["tokens"])
        note("tokens_cold_equal", cold["tokens"] == reference["tokens"])
        note("own_hit_equal_cold", own["tokens"] == reference["tokens"])
        run.say(f"correct: {found}")
        storm = {
            "seed": 11,
            "count": arguments.storm,
            "bases": 12,
            "longest": 3000,
            "max_tokens": 24,
            "abort": 0.25,
        }
        fleet.ask("none", "reset")
        fleet.ask("ours", "reset")
        calm = fleet.ask("none", "storm", **storm)
        wild = fleet.ask("ours", "storm", **storm)
        both = [index for index in calm["tokens"] if index in wild["tokens"]]
        whole = [i for i in both if len(calm["tokens"][i]) == len(wild["tokens"][i])]
        equal = sum(calm["tokens"][i] == wild["tokens"][i] for i in whole)
        note(
            "storm",
            {
                "requests": arguments.storm,
                "compared": len(whole),
                "equal": equal,
                **{
                    f"{name}_{key}": answer[key]
                    for name, answer in (("none", calm), ("ours", wild))
                    for key in (
                        "aborted",
                        "cached",
                        "external_prefix_cache_hits",
                        "num_preemptions",
                    )
                    if key in answer
                },
            },
        )
        time.sleep(3 * _SETTLE_S)
        after = _daemon(ours)
        note("daemon_after_storm", after)
        note("leases_after_storm", sum(c["leases"] for c in after["clients"]))
        run.say(f"correct: storm {found['storm']}, leases {found['leases_after_storm']}")
        fleet.stop(violently=True)
        time.sleep(2 * _SETTLE_S)
        note("clients_after_kill", _daemon(ours)["clients"])


def part_memory(run: Run) -> None:
    """GPU memory that is left when everything has ended, one way and another."""
    before = gpu_used_mib()
    model = run.scratch / "small"
    if not (model / "model.safetensors").exists():
        random_model(model, SMALL)
    engine = {"max_model_len": 4096, "enforce_eager": True, **run.arguments.small}
    found: Result = {"before_mib": before}
    with hosts(run, [_mode(run, "ours_pool")]) as started:
        found["daemon_mib"] = gpu_used_mib() - before
        with Fleet(run, model, engine, {}) as fleet:
            fleet.start(started)
            fleet.ask("ours_pool", "ttft", seed=5, count=4, tokens=1500)
            fleet.ask("ours_pool", "reset")
            fleet.ask("ours_pool", "ttft", seed=5, count=4, tokens=1500)
            found["daemon_and_engine_mib"] = gpu_used_mib() - before
            fleet.stop(violently=True)
        time.sleep(_SETTLE_S)
        found["after_kill_of_engine_mib"] = gpu_used_mib() - before
        found["daemon_lives"] = bool(_daemon(started[0]))
    time.sleep(_SETTLE_S)
    found["after_daemon_mib"] = gpu_used_mib() - before
    run.put("memory", "ours_pool", found)
    run.say(f"memory: {found}")


PARTS: dict[str, Callable[[Run], None]] = {
    "ttft": part_ttft,
    "cost": part_cost,
    "restart": part_restart,
    "correct": part_correct,
    "memory": part_memory,
}


def main() -> int:
    """Run the parts that were asked for; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    parser.add_argument("--disk", type=Path, required=True, help="directory for disk tiers")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--mode", action="append", help="only these engines")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20, help="of the cost part, each way")
    parser.add_argument("--storm", type=int, default=200, help="requests of the storm")
    parser.add_argument("--pool-gib", type=float, default=14)
    parser.add_argument("--gpu-pool-gib", type=float, default=12)
    parser.add_argument("--kv-gb", type=float, default=11)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs; starts take longer")
    parser.add_argument(
        "--invariant", action="store_true", help="kernels that batches do not matter to"
    )
    parser.add_argument("--extra", type=json.loads, default={}, help="our connector's settings")
    parser.add_argument("--small", type=json.loads, default={}, help="engine of correct and memory")
    parser.add_argument("--model", default="", help="model directory of correct; default: random")
    arguments = parser.parse_args()
    failed = 0
    with interruptible(), tempfile.TemporaryDirectory(prefix="kvc-") as scratch:
        run = Run(arguments, Path(scratch))
        for name in arguments.part or list(PARTS):
            run.say(f"part: {name}")
            begin = time.monotonic()
            try:
                PARTS[name](run)
            except Exception as error:  # noqa: BLE001 - a part's boundary
                failed += 1
                traceback.print_exc()
                run.put("failed", name, f"{type(error).__name__}: {error}")
            run.put("seconds", name, round(time.monotonic() - begin, 1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
