"""Five directories, one import package, and a wheel that holds all of it and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("connectors", "index", "prefetch", "proto", "tiers")


def test_checkout_without_symlinks() -> None:
    """The five links are there, relative, and there are no others."""
    package = ROOT / "kvstore"
    links = {p.name: str(p.readlink()) for p in package.rglob("*") if p.is_symlink()}
    assert links == {name: f"../{name}" for name in LINKED}, (
        "kvstore/{connectors,index,prefetch,proto,tiers} must be symbolic links. A checkout made "
        "with git's core.symlinks=false has small text files in their place, and nothing can be "
        "imported: run `git config core.symlinks true && git checkout -- kvstore`."
    )


def test_no_python_package_beside_kvstore() -> None:
    """A literal top-level `proto` or `tiers` would overwrite other people's packages."""
    configuration = (ROOT / "pyproject.toml").read_text()
    assert 'only-include = ["kvstore"]' in configuration
    for name in LINKED:
        assert f'{name}.msg = "import kvstore.{name}"' in configuration


def _source_files() -> set[str]:
    """Return what a wheel must hold, as paths below the root, through the links."""
    found = set()
    for top in ("", *LINKED):
        directory = ROOT / (top or "kvstore")
        prefix = Path("kvstore") / top
        for path in directory.rglob("*"):
            inside = path.relative_to(directory)
            through_link = not top and inside.parts[0] in LINKED
            if path.is_file() and "__pycache__" not in inside.parts and not through_link:
                found.add(str(prefix / inside))
    return found


def _build(out: Path, *options: str) -> zipfile.ZipFile:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(out),
            *options,
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


def _contents(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_wheel_lost_a_directory(tmp_path: Path) -> None:
    """Straight from the tree and by way of the sdist: every file, once, and no others."""
    with _build(tmp_path / "tree", "--wheel") as from_tree:
        assert _contents(from_tree) == _source_files()
        assert len(from_tree.namelist()) == len(set(from_tree.namelist()))
        metadata = next(n for n in from_tree.namelist() if n.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0" in from_tree.read(metadata).decode()
    with _build(tmp_path / "sdist") as from_sdist:
        assert _contents(from_sdist) == _source_files()


@pytest.mark.slow
def test_wheel_runs_without_the_checkout(tmp_path: Path) -> None:
    """Every module but the engines' connectors imports from the wheel alone."""
    with _build(tmp_path, "--wheel") as wheel:
        wheel.extractall(tmp_path / "site")
    modules = sorted(
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        for name in _source_files()
        if name.endswith(".py") and "/connectors/vllm" not in name and "__main__" not in name
    )
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *modules],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    entry = subprocess.run(
        [sys.executable, "-P", "-m", "kvstore", "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert entry.stdout == "kvstore 0.1.0\n"
