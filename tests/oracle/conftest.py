"""Makes the oracle's parts importable, also for the processes that it forks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
