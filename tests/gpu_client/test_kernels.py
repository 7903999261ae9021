"""The copy kernel under Triton's interpreter, in a process of its own: it is chosen at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WORKER = HERE / "kernel_worker.py"


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "triton")),
    reason="torch or triton is not installed",
)
def test_every_layout_comes_out_and_back_byte_for_byte() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [sys.executable, str(WORKER), "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 8


@pytest.mark.gpu
def test_every_layout_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, str(WORKER), "cuda"], env=environment, timeout=240, check=True)
