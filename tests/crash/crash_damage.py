"""What can happen to a file while nobody uses it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["DAMAGES", "damage", "files_of", "kind_of"]

# Sizes and positions at which formats have their fields.
_EDGES: Final = (0, 1, 8, 40, 56, 512, 4088, 4096, 8192)
_HEAD_BYTES: Final = 8192


def _position(size: int, lots: random.Random) -> int:
    """Return an offset: half of them near the beginning, where headers are."""
    end = min(size, _HEAD_BYTES) if lots.random() < 0.5 else size
    return lots.randrange(end) if end else 0


def _flip(path: Path, lots: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return _garbage(path, lots)
    at, bits = _position(len(data), lots), lots.randrange(1, 256)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ bits]))
    return f"byte {at} flipped by {bits:#x}"


def _cut(path: Path, lots: random.Random) -> str:
    size = path.stat().st_size
    length = min(size, lots.choice([lots.choice(_EDGES), _position(size, lots), max(0, size - 1)]))
    os.truncate(path, length)
    return f"cut from {size} to {length}"


def _grow(path: Path, lots: random.Random) -> str:
    more = lots.choice([1, 56, 4096, 100_000])
    with path.open("ab") as file:
        file.write(lots.randbytes(more))
    return f"{more} bytes of garbage at its end"


def _garbage(path: Path, lots: random.Random) -> str:
    size = lots.choice([path.stat().st_size, 1, 40, 4096, 20_000])
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(lots.randbytes(size))
    return f"{size} bytes of garbage"


def _delete(path: Path, _: random.Random) -> str:
    path.unlink()
    return "deleted"


def _directory(path: Path, lots: random.Random) -> str:
    path.unlink()
    path.mkdir()
    if lots.random() < 0.3:
        (path / "inside").write_bytes(b"x")
        return "a directory with something in it"
    return "a directory"


def _link(path: Path, _: random.Random) -> str:
    path.unlink()
    path.symlink_to("/nowhere/at/all")
    return "a dangling link"


def _swap(path: Path, lots: random.Random) -> str:
    """Exchange two pages: of a segment, two slots."""
    data = bytearray(path.read_bytes())
    pages = len(data) // 4096
    if pages < 3:
        return _flip(path, lots)
    one, two = (page * 4096 for page in lots.sample(range(pages), 2))
    data[one : one + 4096], data[two : two + 4096] = data[two : two + 4096], data[one : one + 4096]
    with path.open("r+b") as file:
        file.write(data)
    return f"pages {one // 4096} and {two // 4096} exchanged"


DAMAGES: Final[dict[str, Callable[[Path, random.Random], str]]] = {
    "flip": _flip,
    "cut": _cut,
    "grow": _grow,
    "garbage": _garbage,
    "delete": _delete,
    "directory": _directory,
    "link": _link,
    "swap": _swap,
}


def kind_of(path: Path) -> str:
    """Return what sort of file it is: segments and slabs have numbers in their names."""
    for kind in ("seg-", "slab-"):
        if path.name.startswith(kind):
            return kind + "*"
    return path.name


def files_of(*roots: Path) -> dict[str, list[Path]]:
    """Return the regular files below some directories, by kind."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink() and ".damaged-" not in os.fspath(path):
                found.setdefault(kind_of(path), []).append(path)
    return found


def damage(lots: random.Random, how: str, path: Path) -> str:
    """Damage one file; return what was done to it."""
    return f"{path.name}: {DAMAGES[how](path, lots)}"
