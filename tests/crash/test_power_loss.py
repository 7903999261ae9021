"""The fake device itself: what it keeps for sure, and what it may lose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from power_loss import SECTOR_BYTES, PowerLoss

SEEDS = range(60)


def disk_after(root: Path, work: Callable[[PowerLoss], None], seed: int) -> dict[str, bytes]:
    """Do something on a device of its own, and return what it holds when the power has gone."""
    root.mkdir()
    power = PowerLoss([root], str(seed), 0, lambda _: None)
    work(power)
    power._lose("end")
    return {path.name: path.read_bytes() for path in root.iterdir()}


def write(power: PowerLoss, path: Path, data: bytes) -> int:
    """Write a file as the store does, through the layer; return its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    power._wrote(fd, 0, data)
    os.pwrite(fd, data, 0)
    return fd


def sync(power: PowerLoss, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    power._synced(fd)
    os.close(fd)


def test_what_was_synced_stays_and_what_was_written_since_is_torn(tmp_path: Path) -> None:
    old, new = b"o" * 4 * SECTOR_BYTES, b"n" * 4 * SECTOR_BYTES
    seen: set[bytes] = set()
    for seed in SEEDS:
        root = tmp_path / str(seed)

        def work(power: PowerLoss, root: Path = root) -> None:
            os.close(write(power, root / "f", old))
            sync(power, root / "f")
            sync(power, root)
            os.close(write(power, root / "f", new))

        data = disk_after(root, work, seed)["f"]
        sectors = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
        assert len(sectors) == 4
        assert set(sectors) <= {old[:SECTOR_BYTES], new[:SECTOR_BYTES]}
        seen.add(b"".join(sector[:1] for sector in sectors))
    # All, nothing, and others in between: also out of order.
    assert {b"oooo", b"nnnn"} < seen
    assert any(one.startswith(b"on") for one in seen)


@pytest.mark.parametrize("synced", [True, False])
def test_a_name_is_sure_only_when_its_directory_was_synced(tmp_path: Path, synced: bool) -> None:
    found: set[tuple[str, ...]] = set()
    for seed in SEEDS:
        root = tmp_path / str(seed)

        def work(power: PowerLoss, root: Path = root) -> None:
            os.close(write(power, root / "f.tmp", b"x" * 100))
            sync(power, root / "f.tmp")
            power._keep(os.fspath(root / "f.tmp"))
            (root / "f.tmp").rename(root / "f")
            if synced:
                sync(power, root)

        left = disk_after(root, work, seed)
        assert set(left.values()) <= {b"x" * 100}
        found.add(tuple(sorted(left)))
    assert found == ({("f",)} if synced else {("f",), ()})


def test_a_file_that_was_not_synced_may_be_empty_under_its_name(tmp_path: Path) -> None:
    found: set[int] = set()
    for seed in SEEDS:
        root = tmp_path / str(seed)

        def work(power: PowerLoss, root: Path = root) -> None:
            os.close(write(power, root / "f", b"x" * 100))
            sync(power, root)

        found.add(len(disk_after(root, work, seed)["f"]))
    assert found == {0, 100}
