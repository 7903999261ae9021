"""What a storm of aborts and preemptions does to tokens and to bytes, and whose doing it is.

Four engines under batch-invariant kernels are given the same requests: *none* without a connector,
also in another order of arrivals; *watch*, whose connector neither loads nor stores but compares the
bytes of every block after every step (`checked`); *ours*; and *checked*, which is ours and watched.
What watch finds is the engine's own doing; what only checked finds is ours. Requests whose tokens
differ are asked for once more, alone, which says which answer is the usual one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from fleet import Fleet, Result, Run, daemon_account, hosts
from modes import SMALL, Host, Mode, random_model

from kvstore.cli.child import ChildError

_SETTLE_S = 3.0
_MOST_ALONE = 24
_ACCOUNT = (
    "steps",
    "comparisons",
    "distinct",
    "differing",
    "roots",
    "versions",
    "loaded",
    "foreign",
    "copies",
)
_COUNTS = ("aborted", "cached", "external_prefix_cache_hits", "num_preemptions")


def compared(one: Result, other: Result) -> Result:
    """Compare the requests that two storms finished, and say where tokens begin to differ."""
    both = [index for index in one["tokens"] if index in other["tokens"]]
    pairs = {index: (one["tokens"][index], other["tokens"][index]) for index in both}
    whole = {index: pair for index, pair in pairs.items() if len(pair[0]) == len(pair[1])}
    different = [
        {
            "request": index,
            "first_token": next(at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b),
            "cached": [answer["cached_by_request"].get(index) for answer in (one, other)],
        }
        for index, pair in whole.items()
        if pair[0] != pair[1]
    ]
    return {
        "compared": len(whole),
        "equal": len(whole) - len(different),
        "different": different,
    }


def usual(run: Run, count: int) -> Result:
    """Return what a storm of so many requests consists of."""
    return {
        "seed": 11,
        "count": count,
        "bases": 12,
        "longest": 2 * run.arguments.prompt,
        "max_tokens": 24,
        "abort": 0.25,
    }


def _storms(run: Run) -> dict[str, Result]:
    """Return the storms: as ever, decoded for long, with nothing decoded, preempted often."""
    common = usual(run, run.arguments.storm)
    return {
        "usual": common,
        "long": {**common, "count": common["count"] // 2, "max_tokens": 100},
        "first_token": {**common, "max_tokens": 1},
        "preempted": {**common, "preempt": 0.04},
    }


def part_storm(run: Run) -> None:
    """Run the storms, one after the other; the engines at once."""
    arguments = run.arguments
    model = Path(arguments.model) if arguments.model else run.scratch / "small"
    if not arguments.model:
        random_model(model, {**SMALL, **arguments.shape})
    engine = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 400_000_000,
        "enforce_eager": not arguments.graphs,
        **arguments.small,
    }
    disk = ["--disk-capacity", arguments.capacity, "--disk"]
    modes = [
        Mode("none", "none"),
        Mode("watch", "ours", extra={"load": False, "store": False}, checked=True),
        Mode("ours", "ours", [*disk, str(arguments.disk / "s1")], arguments.extra),
        Mode("checked", "ours", [*disk, str(arguments.disk / "s2")], arguments.extra, checked=True),
    ]
    with hosts(run, modes) as started, Fleet(run, model, engine) as fleet:
        fleet.environment = {} if arguments.no_invariant else {"VLLM_BATCH_INVARIANT": "1"}
        fleet.start(started)
        for name, problem in fleet.failed.items():
            run.put("failed", f"storm/{name}", problem)
        for name, storm in _storms(run).items():
            if name not in (arguments.storms or [name]):
                continue
            with run.step(f"storm/{name}"):
                run.put("storm", name, _storm(run, fleet, started, storm))
        found = {
            host.mode.name: daemon_account(host) for host in started if host.daemon is not None
        }
        run.put("storm", "daemons", found)


def _storm(run: Run, fleet: Fleet, started: Sequence[Host], storm: Result) -> Result:
    before = time.monotonic()
    names = fleet.names

    def ask(name: str) -> list[tuple[str, Result]]:
        answers: list[tuple[str, Result]] = []
        try:
            for label, pace in ((name, 1), ("none, another order", 2)):
                if pace == 1 or name == "none":
                    fleet.ask(name, "reset")
                    answers.append((label, fleet.ask(name, "storm", pace=pace, **storm)))
        except ChildError as error:
            fleet.drop(name, str(error))
        return answers

    with ThreadPoolExecutor(len(names)) as pool:
        answers = dict(pair for pairs in pool.map(ask, names) for pair in pairs)
    found: Result = {
        "runs": {name: {key: one.get(key) for key in _COUNTS} for name, one in answers.items()},
        "pairs": {
            f"{one} / {other}": compared(answers[one], answers[other])
            for one, other in combinations(answers, 2)
        },
    }
    which = sorted(
        {int(row["request"]) for pair in found["pairs"].values() for row in pair["different"]}
    )[:_MOST_ALONE]
    if which and "none" in fleet.names:
        keys = ("seed", "count", "bases", "longest", "max_tokens")
        alone = fleet.ask("none", "alone", which=which, **{key: storm[key] for key in keys})
        found["unlike_alone"] = {
            name: [
                i for i, tokens in alone["tokens"].items() if one["tokens"].get(i, tokens) != tokens
            ]
            for name, one in answers.items()
        }
    time.sleep(_SETTLE_S)
    found["accounts"] = {
        host.mode.name: json.loads(host.account.read_text())
        for host in started
        if host.mode.checked and host.account.exists()
    }
    found["leases"] = {
        host.mode.name: sum(c["leases"] for c in daemon_account(host)["clients"])
        for host in started
        if host.daemon is not None
    }
    found["seconds"] = round(time.monotonic() - before, 1)
    _say(run.say, found)
    return found


def _say(say: Callable[[str], None], found: Result) -> None:
    for name, one in found["runs"].items():
        say(f"  {name}: {one}")
    for name, pair in found["pairs"].items():
        say(f"  {name}: {pair['equal']} of {pair['compared']} equal")
    say(f"  unlike alone: {found.get('unlike_alone')}")
    for name, account in found["accounts"].items():
        shown: dict[str, Any] = {key: account[key] for key in _ACCOUNT}
        say(f"  {name}: {shown}")
        if account["problem"]:
            say(f"  {name}: {account['problem']}")
    say(f"  leases {found['leases']}, {found['seconds']} s")
