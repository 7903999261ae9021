"""The oracle in random mode for some time, as the soak runs it.

    oracle_run.py SECONDS SEED

Prints one JSON object: examples run, steps taken. Exits with 1 at the first failure, whose steps
are on stderr.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from oracle_machine import OracleMachine

_EXAMPLES_AT_ONCE = 1
_STEPS = 50


def main() -> int:
    """Run batches of examples until the time is over."""
    seconds, number = float(sys.argv[1]), int(sys.argv[2])
    examples = steps = 0

    class Counted(OracleMachine):
        def teardown(self) -> None:
            nonlocal examples, steps
            examples += bool(self.players)
            steps += len(self.trace)
            super().teardown()

    end = time.monotonic() + seconds
    code = 0
    batch = 0
    while not code and time.monotonic() < end:
        # Without shrinking: what depends on timing does not fail again.
        chosen = settings(
            max_examples=_EXAMPLES_AT_ONCE,
            stateful_step_count=_STEPS,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(seed(number + batch)(Counted), settings=chosen)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the verdict
            print(f"seed {number + batch}: {type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        batch += 1
    print(json.dumps({"examples": examples, "steps": steps, "failed": bool(code)}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
