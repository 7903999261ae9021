"""The oracle: a real daemon beside a plain dict, under everything that can happen to it.

`KVSTORE_TEST_EXAMPLES=N` runs N random examples instead of CI's few fixed ones;
`KVSTORE_TEST_SEED` repeats a run. The seed is printed.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, seed, settings
from oracle_machine import OracleMachine

EXAMPLES = int(os.environ.get("KVSTORE_TEST_EXAMPLES", "0"))
STEPS = int(os.environ.get("KVSTORE_TEST_STEPS", "30"))


TestOracle = OracleMachine.TestCase
TestOracle.settings = settings(
    max_examples=EXAMPLES or 10,
    stateful_step_count=STEPS,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
pytestmark = [pytest.mark.slow, *([pytest.mark.timeout(0)] if EXAMPLES else [])]
if EXAMPLES:
    SEED = int(os.environ.get("KVSTORE_TEST_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"KVSTORE_TEST_SEED={SEED}")
    seed(SEED)(OracleMachine)
