"""A file system of 64 MiB of a test's own, to be filled to the last byte.

XFS, what the disk tier is made for, from an image that lies beside this file: making one takes a
program that few machines have, mounting one takes only the kernel. It was made with xfsprogs 6.1:

    truncate -s 64M image && mkfs.xfs --unsupported image && xz -9e image

Where that cannot be mounted it is ext4, else a tmpfs, and the test says so.
"""

from __future__ import annotations

import lzma
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["SIZE_BYTES", "small_file_system"]

SIZE_BYTES = 64 << 20
_IMAGE = Path(__file__).with_name("xfs_64mib.img.xz")


def _run(*command: str | Path) -> str:
    """Return why a command failed; empty when it did not."""
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"


def _mount(kind: str, image: Path, at: Path) -> str:
    """Make and mount one kind; return why that failed."""
    if kind == "tmpfs":
        return _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=700", "none", at)
    if kind == "xfs":
        image.write_bytes(lzma.decompress(_IMAGE.read_bytes()))
    else:
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        # No journal to speak of, nothing set aside for root, who runs this.
        why = _run("mkfs.ext4", "-q", "-F", "-m", "0", image)
        if why:
            return why
    return _run("mount", "-t", kind, "-o", "loop", image, at)


@contextmanager
def small_file_system(directory: Path) -> Iterator[tuple[Path, str]]:
    """Mount one below `directory`; yield where, and what kind it is."""
    at = directory / "small"
    at.mkdir()
    whys = []
    for kind in ("xfs", "ext4", "tmpfs"):
        why = _mount(kind, directory / "small.img", at)
        if not why:
            break
        whys.append(f"{kind}: {why}")
    else:
        pytest.skip(f"nothing can be mounted here: {'; '.join(whys)}")
    if whys:
        print(f"on {kind}, for want of better: {'; '.join(whys)}")
    try:
        yield at, kind
    finally:
        # Lazily, should a process that the test failed to end still have it open.
        _run("umount", at) and _run("umount", "-l", at)
