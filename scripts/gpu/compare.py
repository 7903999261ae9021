"""Time to first token of vLLM with kvstore beside its peers, what kvstore costs, and whether it is right.

    python3 scripts/gpu/compare.py --out result.json --disk DIR [--part vllm --part correct …]

Parts, each with a limit of time; what is known is written to the result after every step:

- vllm     the shape of Llama-3-8B, eight prompts of 10,000 tokens. ttft: cold, warm, eight at once,
           a hit in the engine's own cache; engines run side by side and are asked in turns.
           cost: the cache switched on and off by turns inside one engine: cold TTFT, inter-token
           latency. restart: a new engine beside the same daemon; a new daemon, from disk; peers
           after the same
- correct  greedy tokens against the engine's own prefix cache; aborts and preemptions; leaks
- storm    whose doing it is when tokens differ: every block's bytes and every copy checked
- memory   GPU memory after exits in order and by SIGKILL
- parallel two GPUs, tensor parallel, CUDA graphs, a GPU pool on both: tokens, contexts, memory

A warm round counts only when the engine has said that its own cache was reset, and found at least
95 % of the prompts' tokens all the same; otherwise its row says so and has no ratio. Ratios are of
one call of this program: absolute times of shared machines move.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from correct import part_correct, part_memory
from fleet import Fleet, Result, Run, daemon_account, hosts, mode_of, spread, warm_row
from modes import LLAMA_8B, Host, write_config
from parallel import part_parallel
from storm import part_storm

from kvstore.cli.child import ChildError, interruptible
from kvstore.client import Client

_ROUNDS = 4
# Stores that are under way when a request ends are given so long.
_SETTLE_S = 2.0
_DECODE_TURNS = 14
_AWAIT_S = 240.0
_RESTARTED = 4  # prompts after a restart: files of that size are all that a peer must write
# Blocks in memory, the first four side by side; then those whose point is what survives.
_MEMORY = ("none", "pegaflow", "ours", "ours_pool", "native", "lmcache")
_FILES = ("native_fs", "lmcache_disk")


def _big(run: Run) -> Result:
    return {
        "load_format": "dummy",
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(run.arguments.kv_gb * 1e9),
        "enforce_eager": not run.arguments.graphs,
        **run.arguments.large,
    }


def part_vllm(run: Run) -> None:
    """Three waves of engines of the shape of Llama-3-8B that run side by side.

    The peers that keep their blocks in memory, and kvstore, by turns; then peers whose first
    engine only matters for its successor; then new engines beside what the old ones left.
    """
    arguments = run.arguments
    model = run.scratch / "llama"
    write_config(model, {**LLAMA_8B, **arguments.shape})
    wanted = set(arguments.mode or _MEMORY + _FILES)
    apart = 4 if arguments.apart else len(_MEMORY + _FILES)
    first = [mode_of(run, name) for name in (_MEMORY + _FILES)[:apart] if name in wanted]
    second = [mode_of(run, name) for name in (_MEMORY + _FILES)[apart:] if name in wanted]
    survivors = ("ours", *_FILES)
    with hosts(run, [mode for mode in first if mode.name in survivors]) as kept:
        others = [mode for mode in first if mode.name not in survivors]
        with hosts(run, others) as started, Fleet(run, model, _big(run)) as fleet:
            fleet.start([*started, *kept])
            _await(run)
            _ttft(run, fleet, [*started, *kept])
            fleet.stop([name for name in fleet.names if name != "ours"])
            if "ours" in fleet.names:
                if arguments.turns:
                    with run.step("cost"):
                        _cost(run, fleet)
                # The last prompts stored are those that the next engine is asked for.
                count, tokens = arguments.count, arguments.tokens
                fleet.each(lambda name: fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens))
                for host in kept:
                    _flush(host)
            fleet.stop()
            _written(run, [host for host in kept if host.mode.name in _FILES])
        if arguments.waves < 2:
            return
        with hosts(run, second) as left:
            if left:
                with Fleet(run, model, _big(run)) as fleet:
                    fleet.start(left)
                    _ttft(run, fleet, [host for host in left if host.mode.name in _MEMORY])
                    filed = [host for host in left if host.mode.name in _FILES]
                    _store(run, fleet, filed)
                    fleet.stop()
            again = [*kept, *(host for host in left if host.mode.name in _FILES)]
            if again and not arguments.no_restart:
                with run.step("restart"), Fleet(run, model, _big(run)) as fleet:
                    fleet.start(again)
                    _restart(run, fleet, again)


def _await(run: Run) -> None:
    """Wait for somebody else who uses the GPU: engines may start meanwhile, not be measured."""
    file, deadline = run.arguments.after, time.monotonic() + _AWAIT_S
    while file is not None and not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def _ttft(run: Run, fleet: Fleet, started: Sequence[Host]) -> None:
    count, tokens = run.arguments.count, run.arguments.tokens
    rows: dict[str, Result] = {host.mode.name: {} for host in started}
    by_name = {host.mode.name: host for host in started}
    mine = list(rows)

    def note(name: str, what: str, value: Any) -> None:
        rows[name][what] = value
        run.put("ttft", name, rows[name])

    def cold(name: str) -> None:
        # The first of a new engine, and on a new pool.
        first = fleet.ask(name, "ttft", seed=99, count=2, tokens=tokens)
        note(name, "cold_first_ms", [round(value, 1) for value in first["ms"]])
        together = fleet.ask(name, "together", seed=8, count=count, tokens=tokens)
        note(name, "cold_together_ms", round(together["ms"], 1))
        answer = fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)
        note(name, "cold", spread(answer["ms"]))
        note(name, "cold_cached", answer["cached"])
        run.say(f"{name}: cold {first['ms']}, {together['ms']} together, {rows[name]['cold']}")
        _flush(by_name[name])

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
        row["cached"] = answer["cached"]
        note(name, "own_hit", row)
        run.say(f"{name}: own hit p50 {row['p50']} ms")

    with run.step("ttft"):
        fleet.each(cold, mine)
        time.sleep(_SETTLE_S)
        for turn in range(_ROUNDS):
            fleet.each(warm(turn), mine)
        for turn in range(_ROUNDS):
            fleet.each(together(turn), mine)
        fleet.each(own, mine)
        for host in started:
            if host.daemon is not None:
                note(host.mode.name, "daemon", daemon_account(host))
    for name, problem in fleet.failed.items():
        run.put("failed", name, problem)


def _flush(host: Host) -> None:
    if host.daemon is not None and host.mode.serve and "--disk" in host.mode.serve:
        with Client(host.daemon.address) as client:
            client.flush(60.0)


def _cost(run: Run, fleet: Fleet) -> None:
    """What the cache costs when it finds nothing: on and off by turns in one engine."""
    tokens, turns = run.arguments.tokens, run.arguments.turns
    cold: dict[bool, list[float]] = {True: [], False: []}
    ratios: list[float] = []
    steps: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for on in (True, False) if turn % 2 else (False, True):
            fleet.ask("ours", "switch", on=on)
            seed = 1000 + 2 * turn + on
            answer = fleet.ask("ours", "ttft", seed=seed, count=1, tokens=tokens)
            cold[on] += answer["ms"]
            if sum(answer["cached"]):
                raise ChildError("a prompt that must be cold was found")
    found: Result = {
        "cold_on": spread(cold[True]),
        "cold_off": spread(cold[False]),
        "cold_ratio": statistics.median(cold[True]) / statistics.median(cold[False]),
    }
    run.put("cost", "ours", found)
    run.say(f"cost: cold ratio {found['cold_ratio']:.4f}")
    for turn in range(_DECODE_TURNS):
        pair: dict[bool, list[float]] = {}
        for on in (True, False) if turn % 2 else (False, True):
            fleet.ask("ours", "switch", on=on)
            seed = 2000 + 2 * turn + on
            # Long enough for every request to fill a stored block while it decodes.
            answer = fleet.ask("ours", "decode", seed=seed, count=16, tokens=500, max_tokens=150)
            pair[on] = answer["ms"]
            steps[on] += answer["ms"]
        # An engine's steps become slower and faster by a tenth from minute to minute: only what was
        # measured one after the other is compared.
        ratios.append(statistics.mean(pair[True]) / statistics.mean(pair[False]))
    fleet.ask("ours", "switch", on=True)
    found |= {
        "itl_p50_on": statistics.median(steps[True]),
        "itl_p50_off": statistics.median(steps[False]),
        "itl_p50_ratio": statistics.median(steps[True]) / statistics.median(steps[False]),
        "itl_mean_on": statistics.mean(steps[True]),
        "itl_mean_off": statistics.mean(steps[False]),
        "itl_pairs": [round(ratio, 4) for ratio in ratios],
        "itl_mean_ratio": statistics.median(ratios),
        "itl_p99_on": statistics.quantiles(steps[True], n=100)[98],
        "itl_p99_off": statistics.quantiles(steps[False], n=100)[98],
        "steps": {str(on): len(values) for on, values in steps.items()},
    }
    run.put("cost", "ours", found)
    run.say(
        f"cost: inter-token ratio {found['itl_mean_ratio']:.4f} (p50 {found['itl_p50_ratio']:.4f})"
    )


def _store(run: Run, fleet: Fleet, started: Sequence[Host]) -> None:
    """Have peers store what their next engine is asked for."""
    count, tokens = min(_RESTARTED, run.arguments.count), run.arguments.tokens

    def cold(name: str) -> None:
        fleet.ask(name, "ttft", seed=99, count=1, tokens=tokens)
        answer = fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens)
        run.put("restart_cold", name, spread(answer["ms"]))

    names = [host.mode.name for host in started]
    with run.step("restart_cold"):
        fleet.each(cold, names)
        if names:
            time.sleep(4 * _SETTLE_S)  # they write behind, and cannot be asked when they are done
    _written(run, started)


def _written(run: Run, started: Sequence[Host]) -> None:
    """Note what peers have written, and see that it will be read from the disk."""
    for host in started:
        files = [path for path in host.mode.files.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        run.put("restart_files", host.mode.name, {"files": len(files), "bytes": size})
        for path in files:  # what is in the page cache would be read from memory
            _drop_cache(path)


def _restart(run: Run, fleet: Fleet, started: Sequence[Host]) -> None:
    count, tokens = min(_RESTARTED, run.arguments.count), run.arguments.tokens
    rows: dict[str, Result] = {host.mode.name: {} for host in started}

    def note(name: str, what: str, value: Any) -> None:
        rows[name][what] = value
        run.put("restart", name, rows[name])

    def warm(what: str, reset: bool = False) -> Callable[[str], None]:
        def ask(name: str) -> None:
            if reset:
                fleet.ask(name, "reset")
            row = warm_row(fleet.ask(name, "ttft", seed=7, count=count, tokens=tokens), tokens)
            samples = row["samples"]
            row["first_over_later"] = round(samples[0] / statistics.median(samples[1:]), 3)
            note(name, what, row)
            run.say(f"{name}: {what} {samples} {row.get('invalid', '')}")

        return ask

    def own(name: str) -> None:
        # vLLM loads the kernels of short prompts with a long past when it meets the first one.
        asked = [fleet.ask(name, "ttft", seed=55, count=1, tokens=tokens)["ms"][0] for _ in "12"]
        note(name, "own_first", {"cold": round(asked[0], 2), "hit": round(asked[1], 2)})
        run.say(f"{name}: a new engine's cold prompt and first hit in its own cache: {asked}")

    fleet.each(own)
    fleet.each(warm("new_engine"))
    fleet.each(warm("new_engine_again", reset=True))
    ours = next((host for host in started if host.daemon is not None), None)
    if ours is None or "ours" not in fleet.names:
        return
    fleet.each(lambda name: fleet.ask(name, "reset"))
    assert ours.daemon is not None
    _flush(ours)
    ours.daemon.stop()
    ours.start_daemon()
    time.sleep(2 * _SETTLE_S)  # for the engine's processes to attach again
    note("ours", "daemon_before", daemon_account(ours))
    fleet.each(warm("new_daemon_from_disk"), ["ours"])
    note("ours", "daemon_after", daemon_account(ours))
    time.sleep(_SETTLE_S)  # what was not worth waiting for comes to memory afterwards
    fleet.each(warm("new_daemon_again", reset=True), ["ours"])


def _drop_cache(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


PARTS: dict[str, Callable[[Run], None]] = {
    "vllm": part_vllm,
    "correct": part_correct,
    "storm": part_storm,
    "memory": part_memory,
    "parallel": part_parallel,
}


def main() -> int:
    """Run the parts that were asked for; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    parser.add_argument("--disk", type=Path, required=True, help="directory for disk tiers")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--mode", action="append", help="only these engines")
    parser.add_argument("--after", type=Path, help="measure nothing before this file is there")
    parser.add_argument("--waves", type=int, default=3, help="of vllm: 1 leaves out the others")
    parser.add_argument(
        "--all-at-once",
        dest="apart",
        action="store_false",
        help="all engines side by side; four fit into 139 GiB",
    )
    parser.add_argument("--no-restart", action="store_true")
    parser.add_argument("--capacity", default="14GiB", help="of our disk tier")
    parser.add_argument("--prompt", type=int, default=1544, help="tokens of correct's prompts")
    parser.add_argument("--answer-s", type=float, default=120, help="an engine's longest answer")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20, help="of the cost part; 0: none")
    parser.add_argument("--storm", type=int, default=200, help="requests of the storm")
    parser.add_argument("--storms", action="append", help="only these of storm's")
    parser.add_argument("--pool-gib", type=float, default=24)
    parser.add_argument("--peer-pool-gib", type=float, help="default: as ours")
    parser.add_argument("--gpu-pool-gib", type=float, default=12)
    parser.add_argument("--kv-gb", type=float, default=11)
    parser.add_argument("--no-invariant", action="store_true", help="vLLM's ordinary kernels")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs; starts take longer")
    parser.add_argument(
        "--shape", type=json.loads, default={}, help="changes to the models' shapes"
    )
    parser.add_argument("--large", type=json.loads, default={}, help="engine of vllm")
    parser.add_argument("--extra", type=json.loads, default={}, help="our connector's settings")
    parser.add_argument("--small", type=json.loads, default={}, help="engine of correct and memory")
    parser.add_argument("--model", default="", help="model directory of correct; default: random")
    arguments = parser.parse_args()
    failed = 0
    with interruptible(), tempfile.TemporaryDirectory(prefix="kvc-") as scratch:
        run = Run(arguments, Path(scratch))
        for name in arguments.part or [part for part in PARTS if part != "parallel"]:
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
