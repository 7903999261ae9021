"""Kill the store again and again, at named points and at random, and look at what is left.

Usage: crashtest.py [--kills N | --each-point] [--seed SEED]

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

from crash_points import POINTS
from crash_run import KINDS, Findings, Line

SEED = 20_260
# The how manyth time a point is passed, after each was tried the first time.
HITS = (1, 2, 3, 5)
TRIES = 8


def crash(kills: int, seed: int, findings: Findings) -> None:
    """Kill so many lives: half at named points, each in turn, half at any time."""
    with Line(seed, findings) as line:
        order = list(POINTS)
        line.random.shuffle(order)
        points = itertools.cycle(order)
        while (done := findings.kills.total()) < kills:
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
    for path in findings.kept:
        print(f"left as it was: {path}")
    if findings.problems:
        print(f"seed {seed}: make crashtest SEED={seed} N={findings.kills.total()}")
    return 1 if findings.problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--each-point", action="store_true", help="one kill at each named point")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    # Unwind, so that memory and directories are given back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"seed {options.seed}", flush=True)
    findings = Findings()
    begun = time.monotonic()
    if options.each_point:
        crash_everywhere(options.seed, findings)
    else:
        crash(options.kills, options.seed, findings)
    if options.json is not None:
        problems = findings.problems
        options.json.write_text(json.dumps({"kills": findings.kills, "problems": problems}))
    return report(findings, options.seed, time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
