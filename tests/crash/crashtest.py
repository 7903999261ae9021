"""Kill the store again and again, at named points and at random, and look at what is left.

Usage: crashtest.py [--kills N] [--power-losses N] [--damages N] [--each-point] [--seed SEED]

Exit code 0: no wrong byte, no acknowledged block lost, no leak. Otherwise 1, with the seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

# Threads of a numerical library would not survive a fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]

from crash_damage import DAMAGES
from crash_mutants import MUTANTS
from crash_points import POINTS
from crash_run import KINDS, Findings, Line

SEED = 20_260
# The how manyth time a point is passed, after each was tried the first time.
HITS = (1, 2, 3, 5)
TRIES = 8
# Where a wrong order shows that does not need a loss of power.
SHOWN_AT = {
    "slots-before-deletes": "flush.synced",
    "acknowledged-before-commit": "flush.committed",
    "epoch-in-memory": "epoch.durable",
}
# What there is to damage; see `crash_damage.kind_of`.
FILES = (
    "data.mdb",
    "lock.mdb",
    "seal",
    "epochs",
    "disk-budget",
    "host-index",
    "lock",
    "store-id",
    "seg-*",
    "slab-*",
    "control",
)


def crash(kills: int, seed: int, findings: Findings) -> None:
    """Kill so many lives: half at named points, each in turn, half at any time."""
    with Line(seed, findings) as line:
        order = list(POINTS)
        line.random.shuffle(order)
        points = itertools.cycle(order)
        begun = findings.kills.total()
        while (done := findings.kills.total() - begun) < kills:
            if done % 2 and done < kills - 1:
                line.kill_at(
                    next(points), 1 if done < 3 * len(POINTS) else line.random.choice(HITS)
                )
            else:
                line.kill_any_time()
            if line.worn:
                line.close()
                line.renew()
        line.close()


def lose_power(times: int, seed: int, findings: Findings) -> None:
    """Let the power go so often."""
    with Line(seed, findings) as line:
        for _ in range(times):
            line.lose_power()
            if line.worn:
                line.close()
                line.renew()
        line.close()


def damage(times: int, seed: int, findings: Findings) -> None:
    """Damage a file of the stopped store so often, each kind in turn."""
    with Line(seed, findings) as line:
        choices = [(how, kind) for how in DAMAGES for kind in FILES]
        line.random.shuffle(choices)
        for how, kind in itertools.islice(itertools.cycle(choices), times):
            if line.stop_and_damage(how, kind):
                findings.damages[f"{kind} {how}"] += 1
            if line.worn:
                line.close()
                line.renew()


def break_on_purpose(mutant: str, lives: int, seed: int, findings: Findings) -> None:
    """Let so many lives do one thing in a wrong order, until it is noticed."""
    with Line(seed, findings, [MUTANTS[mutant]]) as line:
        point = SHOWN_AT.get(mutant)
        while line.lives < lives and not findings.problems:
            if point is None:
                line.lose_power()
            line.kill_at(point or "flush.committed", line.random.choice(HITS))


def crash_everywhere(seed: int, findings: Findings) -> None:
    """Kill one life at each named point."""
    with Line(seed, findings) as line:
        for point in POINTS:
            # What is evicted or moved, and what is not, is partly chance.
            for _ in range(TRIES):
                if line.kill_at(point):
                    break
        line.close()


def report(findings: Findings, seed: int, seconds: float) -> int:
    """Print what happened; return the exit code."""
    width = max(map(len, (*POINTS, *findings.kills)))
    for where in (*POINTS, *sorted(set(findings.kills) - POINTS.keys())):
        between = POINTS[where].between if where in POINTS else ""
        print(f"  {where:<{width}} {findings.kills[where]:>5}  {between}".rstrip())
    for kind, problems in findings.problems.items():
        for problem in problems:
            print(f"{KINDS.get(kind, kind)}: {problem}")
    counts = ", ".join(f"{len(findings.problems.get(k, ()))} {text}" for k, text in KINDS.items())
    others = sum(len(p) for kind, p in findings.problems.items() if kind not in KINDS)
    print(
        f"{findings.kills.total()} kills in {seconds:.0f} s; {findings.checks} starts compared "
        f"{findings.served} blocks, {findings.acknowledged} of them acknowledged"
    )
    print(f"{counts}{f', {others} other failures' if others else ''}")
    if findings.damages:
        print(f"{findings.damages.total()} damages: {', '.join(sorted(findings.damages))}")
    for what, line in findings.refusals.items():
        print(f"refused to start: {what}: {line}")
    for path in findings.kept:
        print(f"left as it was: {path}")
    if findings.problems:
        print(f"seed {seed}: the same options with --seed {seed} (make crashtest SEED={seed})")
    return 1 if findings.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="at named points and at any time")
    parser.add_argument("--power-losses", type=int, default=0, help="what is not synced may go")
    parser.add_argument("--damages", type=int, default=0, help="of files, while it is stopped")
    parser.add_argument("--mutant", choices=MUTANTS, help="break one step on purpose")
    parser.add_argument("--each-point", action="store_true", help="one kill at each named point")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    # Unwind, so that memory and directories are given back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {options.seed}", flush=True)
    findings = Findings()
    begun = time.monotonic()
    try:
        run(options, findings)
    except KeyboardInterrupt:
        findings.add("failed", "interrupted")
    if options.json is not None:
        problems = findings.problems
        options.json.write_text(json.dumps({"kills": findings.kills, "problems": problems}))
    return report(findings, options.seed, time.monotonic() - begun)


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Do what the options say."""
    if options.mutant:
        break_on_purpose(options.mutant, options.kills, options.seed, findings)
        return
    if options.each_point:
        crash_everywhere(options.seed, findings)
    if options.kills:
        crash(options.kills, options.seed, findings)
    if options.power_losses:
        lose_power(options.power_losses, options.seed, findings)
    if options.damages:
        damage(options.damages, options.seed, findings)


if __name__ == "__main__":
    sys.exit(main())
