"""How the doctor looks: the kernel's files, as they are written, and probes that really probe."""

from __future__ import annotations

import errno
import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstore.cgroup import MemoryLimit, memory_limit, processor_limit
from kvstore.doctor import Examination, Level, Setup
from kvstore.doctor import direct_io as probe
from kvstore.doctor.clock import newest_seconds
from kvstore.doctor.direct_io import direct_alignment
from kvstore.doctor.directory import look_at
from kvstore.doctor.gpu import look_at_gpus
from kvstore.doctor.kernel import can_lock_open_files, can_populate
from kvstore.doctor.memory import read_meminfo, read_shmem_enabled
from kvstore.doctor.pools import find_pools, pool_prefix
from kvstore.doctor.software import FLOORS
from kvstore.doctor.storage import segments_bytes
from kvstore.mounts import find_mount, network_filesystem, parse_mounts, read_mounts
from kvstore.units import MIB, PAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=100k,huge=advise
24 22 259:1 / /mnt/a\040b rw,noatime shared:2 master:3 - xfs /dev/nvme0n1 rw,attr2
25 22 0:40 / /mnt/a\040b ro - nfs4 server:/x rw,vers=4.2
a line of some later kernel
"""


def test_mounts_with_blanks_and_hidden_mounts() -> None:
    mounts = parse_mounts(MOUNTS)
    assert [mount.kind for mount in mounts] == ["ext4", "tmpfs", "xfs", "nfs4"]
    root, shared, xfs, nfs = mounts
    assert xfs.point == "/mnt/a b"
    assert xfs.options == {"rw", "noatime", "attr2"}
    assert shared.option("huge") == "advise"
    assert shared.option("rw") is None
    assert find_mount(mounts, Path("/mnt/a b/c")) is nfs
    assert find_mount(mounts[:3], Path("/mnt/a b")) is xfs
    assert find_mount(mounts, Path("/mnt/a bc")) is root
    assert find_mount([], Path("/")) is None


REMOTE_MOUNTS = r"""
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:30 / /srv/models rw - nfs4 server:/x rw
3 2 0:31 / /srv/models/scratch rw - tmpfs tmpfs rw
4 1 0:32 / /srv/with\040blank rw - fuse.sshfs host:/y rw
5 1 0:33 / /hidden rw - cifs share rw
6 1 8:17 / /hidden rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/srv", None),
        ("/srv/models/a/b", "nfs4"),
        ("/srv/models", "nfs4"),
        ("/srv/models2", None),
        ("/srv/models/scratch/a", None),
        ("/srv/with blank/a", "fuse.sshfs"),
        ("/hidden/a", None),
    ],
)
def test_the_innermost_mount_decides_whether_a_directory_is_remote(
    directory: str, kind: str | None
) -> None:
    assert network_filesystem(Path(directory), parse_mounts(REMOTE_MOUNTS)) == kind


def test_floors_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(line.split(">=") for line in project["dependencies"]) == FLOORS


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    mounts = read_mounts()
    missing = look_at(tmp_path / "a" / "b", mounts)
    assert not missing.exists
    assert missing.there == tmp_path
    tmp_path.chmod(0o750)
    seen = look_at(tmp_path, mounts)
    assert (seen.exists, seen.owner, seen.mode, seen.writable) == (
        True,
        os.geteuid(),
        0o750,
        True,
    )
    assert 0 < seen.free_bytes < seen.total_bytes
    assert seen.mount is not None
    file = tmp_path / "file"
    file.touch()
    assert not look_at(file / "below", mounts).is_directory


def test_direct_io_is_tried_out_and_leaves_nothing(tmp_path: Path) -> None:
    alignment = direct_alignment(tmp_path)
    assert alignment is None or alignment in (512, 1024, 2048, 4096)
    assert list(tmp_path.iterdir()) == []


class _Refusing:
    """The system's calls, on a file system that has neither nameless files nor small units."""

    def __init__(self, unit: int, *, direct: bool = True, broken: bool = False) -> None:
        self.unit = unit
        self.direct = direct
        self.broken = broken

    def open(self, path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        return os.open(path, flags & ~os.O_DIRECT, *rest)

    def pwritev(self, descriptor: int, parts: list[memoryview], offset: int) -> int:
        if len(parts[0]) % self.unit or offset % self.unit:
            raise OSError(errno.EINVAL, "unit")
        return os.pwritev(descriptor, [bytes(len(parts[0]))] if self.broken else parts, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize("unit", [512, PAGE_BYTES, 4 * PAGE_BYTES])
def test_direct_io_in_large_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    monkeypatch.setattr(probe, "os", _Refusing(unit))
    assert direct_alignment(tmp_path) == unit
    assert list(tmp_path.iterdir()) == []


def test_direct_io_that_is_refused_or_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "os", _Refusing(512, direct=False))
    assert direct_alignment(tmp_path) is None
    monkeypatch.setattr(probe, "os", _Refusing(512, broken=True))
    with pytest.raises(OSError, match="not what was written"):
        direct_alignment(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_segments_are_counted_by_what_they_take(tmp_path: Path) -> None:
    assert segments_bytes(tmp_path / "missing") == 0
    (tmp_path / "seg-000001.kvs").write_bytes(bytes(MIB))
    os.truncate(tmp_path / "seg-000001.kvs", 64 * MIB)
    (tmp_path / "other").write_bytes(bytes(MIB))
    assert MIB <= segments_bytes(tmp_path) < 2 * MIB


def test_memory_limit_of_an_outer_group(tmp_path: Path) -> None:
    """Version 2: the inner group has more room than the one around it."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for directory, limit, used in ((inner, "max", 5), (inner.parent, "100", 70)):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
    (inner.parent / "memory.stat").write_text("anon 3\ninactive_file 20\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    group = tmp_path / "self"
    group.write_text("0::/outer/inner\n")
    assert memory_limit(group, tmp_path) == MemoryLimit(100, 50)
    assert processor_limit(group, tmp_path) == 1.5
    group.write_text("0::/\n")
    assert memory_limit(group, tmp_path) is None
    assert processor_limit(group, tmp_path) is None
    assert memory_limit(tmp_path / "missing", tmp_path) is None


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("10")
    (group / "memory.limit_in_bytes").write_text("100\n")
    (group / "memory.usage_in_bytes").write_text("120\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    itself = tmp_path / "self"
    itself.write_text("9:name=systemd:/\n4:memory:/job\n1:cpu:/\n0::/\n")
    assert memory_limit(itself, tmp_path) == MemoryLimit(100, 0)
    assert processor_limit(itself, tmp_path) == 0.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    itself.write_text("4:memory:/\n1:cpu:/\n")
    assert memory_limit(itself, tmp_path) is None
    assert processor_limit(itself, tmp_path) is None


def test_kernel_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("always within_size advise [never] deny force\n")
    assert read_shmem_enabled(file) == "never"
    assert read_shmem_enabled(tmp_path / "missing") == ""
    file.write_text("MemTotal:       16 kB\nHugePages_Total:       3\nodd line\n")
    assert read_meminfo(file) == {"MemTotal": 16384, "HugePages_Total": 3}
    assert read_meminfo()["MemTotal"] > MIB


def test_this_kernel_does_what_the_suite_needs() -> None:
    assert can_lock_open_files()
    assert can_populate() in (True, False)


def test_newest_file(tmp_path: Path) -> None:
    assert newest_seconds(tmp_path / "missing") == 0.0
    assert newest_seconds(tmp_path) == 0.0
    for name, when in (("a", 5.0), ("b", 7.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    assert newest_seconds(tmp_path) == 7.0


def _gpu_files(root: Path) -> tuple[Path, Path, Path]:
    driver, storage, devices = (root / name for name in ("nvidia", "nvidia-fs", "dev"))
    devices.mkdir()
    return driver, storage, devices


def test_machine_without_gpu(tmp_path: Path) -> None:
    seen = look_at_gpus(*_gpu_files(tmp_path))
    assert (seen.count, seen.devices, seen.driver, seen.cuda, seen.storage) == (0, 0, "", "", "")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build  (x)",
    ],
)
def test_machine_with_two_gpus(tmp_path: Path, line: str) -> None:
    driver, storage, devices = _gpu_files(tmp_path)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (driver / "gpus" / name).mkdir(parents=True)
    (driver / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
    storage.mkdir()
    (storage / "version").write_text("version: 2.17\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (devices / name).touch()
    seen = look_at_gpus(driver, storage, devices)
    assert (seen.count, seen.devices, seen.driver, seen.storage) == (2, 2, "535.183.01", "2.17")


def test_pool_is_used_as_long_as_a_process_has_it_open(tmp_path: Path) -> None:
    processes, root = tmp_path / "proc", tmp_path / "shm"
    name = "kvstore-1000-0123456789ab-0123456789ab"
    dead = f"{name[:-1]}c"
    for pool in (name, dead):
        (root / pool).mkdir(parents=True)
        (root / pool / "slab-1-0").write_bytes(bytes(MIB))
    (root / "kvstore-of-mine").mkdir()
    (root / f"{name[:-1]}d").symlink_to(root / name)
    (processes / "77" / "fd").mkdir(parents=True)
    (processes / "77" / "fd" / "3").symlink_to(root / name / "control")
    (processes / "78").mkdir()  # another user's
    (processes / "meminfo").touch()
    pools = find_pools(root, processes)
    assert [(pool.path.name, pool.used) for pool in pools] == [(name, True), (dead, False)]
    assert all(MIB <= pool.taken_bytes < 2 * MIB for pool in pools)


def test_prefix_follows_links_as_the_daemon_does(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert pool_prefix(tmp_path / "link", 7) == pool_prefix(tmp_path / "real", 7)
    assert pool_prefix(tmp_path / "real", 7) != pool_prefix(tmp_path, 7)


def test_check_that_cannot_look_is_a_finding_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.doctor import examination

    def refuse(_: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(examination, "direct_alignment", refuse)
    done = Examination(Setup(tmp_path / "state", 16 * MIB, tmp_path))
    found = {finding.subject: finding for finding in done.run()}
    assert found["disk direct I/O"].level is Level.WARNING
    assert found["disk direct I/O"].text == "could not be looked at: Input/output error"
    assert found["clock"].text
    assert done.at == ""


def test_findings_are_read_while_a_check_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.doctor import examination

    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_: Path) -> int:
        hangs.set()
        goes_on.wait()
        return 512

    monkeypatch.setattr(examination, "direct_alignment", hang)
    done = Examination(Setup(tmp_path / "state", 16 * MIB, tmp_path))
    thread = threading.Thread(target=done.run)
    thread.start()
    try:
        assert hangs.wait(10)
        assert done.at == "disk direct I/O"
        assert done.found[-1].subject == "disk mount"
    finally:
        goes_on.set()
        thread.join()
    assert done.found[-1].subject == "clock"
