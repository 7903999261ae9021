"""The oracle in random mode for some time, as the soak runs it.

    oracle_run.py SECONDS SEED

Prints one JSON object: examples run, steps noted. Exits with 1 at the first failure, whose steps
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

_STEPS = 50
_NO_LIMIT = 1_000_000


class TimeIsUp(KeyboardInterrupt):
    """The way out of a run of Hypothesis that is not a failure."""


def main() -> int:
    """Run examples until the time is over."""
    end = time.monotonic() + float(sys.argv[1])
    number = int(sys.argv[2])
    examples = steps = 0

    class Counted(OracleMachine):
        def __init__(self) -> None:
            if time.monotonic() > end:
                raise TimeIsUp
            super().__init__()

        def teardown(self) -> None:
            nonlocal examples, steps
            examples += bool(self.players)
            steps += len(self.trace)
            super().teardown()

    # Without shrinking: what depends on timing does not fail again.
    chosen = settings(
        max_examples=_NO_LIMIT,
        stateful_step_count=_STEPS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    failed = False
    try:
        run_state_machine_as_test(seed(number)(Counted), settings=chosen)
    except TimeIsUp:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the verdict
        print(f"seed {number}: {type(error).__name__}: {error}", file=sys.stderr)
        failed = True
    print(json.dumps({"examples": examples, "steps": steps, "failed": failed}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
