"""Control groups' limits, as both versions and containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cgroup import memory_limit
from kvstore.errors import ConfigError
from kvstore.tiers import pool_limits
from kvstore.tiers.pool_limits import Room, check_capacity, memory_room
from kvstore.units import GIB, MIB


def _write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def _room(tmp_path: Path, root: Path) -> int:
    limit = memory_limit(tmp_path / "cgroup", root)
    assert limit is not None
    return limit.room_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_version_2_takes_the_tightest_of_the_enclosing_groups(root: Path, tmp_path: Path) -> None:
    _write(tmp_path, cgroup="0::/a/b\n")
    stat = f"anon 5\ninactive_file {1 * MIB}\nactive_file 77\n"
    _write(root / "a", memory__max=f"{8 * MIB}\n", memory__current=f"{5 * MIB}\n")
    _write(root / "a", memory__stat=stat)
    _write(root / "a/b", memory__max="max\n", memory__current=f"{3 * MIB}\n")
    assert _room(tmp_path, root) == 4 * MIB
    _write(root / "a/b", memory__max=f"{2 * MIB}\n")
    assert _room(tmp_path, root) == 0  # over its limit is not below zero


def test_version_1_finds_the_memory_controller(root: Path, tmp_path: Path) -> None:
    _write(tmp_path, cgroup="9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    unlimited = f"{(1 << 63) - 4096}\n"
    top = root / "memory"
    _write(top, memory__limit_in_bytes=unlimited, memory__usage_in_bytes="1\n")
    assert memory_limit(tmp_path / "cgroup", root) is None
    # In a container the group is mounted at the top, whatever path the kernel names.
    _write(top, memory__limit_in_bytes=f"{3 * GIB}", memory__usage_in_bytes=f"{2 * GIB}")
    _write(top, memory__stat=f"cache 9\ntotal_inactive_file {MIB}\ninactive_file 5\n")
    assert _room(tmp_path, root) == GIB + MIB


def test_no_control_groups_are_no_limit(root: Path, tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "absent", root) is None
    _write(tmp_path, cgroup="0::/\n")
    assert memory_limit(tmp_path / "cgroup", root) is None


def test_the_refusal_is_one_line_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_limits, "memory_room", lambda _: Room(8 * GIB, 6 * GIB, 4 * GIB))
    check_capacity(tmp_path, 4 * GIB)
    check_capacity(tmp_path, 5 * GIB, already_bytes=GIB)
    with pytest.raises(ConfigError) as caught:
        check_capacity(tmp_path, 5 * GIB)
    assert str(caught.value) == (
        f"host pool of 5 GiB in {tmp_path} is not possible: 8 GiB free in its file system, "
        "6 GiB of memory available, 4 GiB left by the control group's limit"
    )


def test_this_machine_has_some_room() -> None:
    room = memory_room(Path("/dev/shm"))
    assert room.memory_bytes is not None
    assert 0 < room.bytes <= room.memory_bytes
