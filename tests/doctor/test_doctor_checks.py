"""Every check, with what it may see: the good outcome and each bad one."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cgroup import MemoryLimit
from kvstore.doctor.clock import check_clock
from kvstore.doctor.directory import Directory, check_access
from kvstore.doctor.finding import Finding, Level
from kvstore.doctor.gpu import Gpus, check_gpus
from kvstore.doctor.kernel import check_kernel
from kvstore.doctor.limits import check_locked_memory, check_open_files, check_processors
from kvstore.doctor.memory import (
    check_available,
    check_cgroup,
    check_huge_pages,
    check_reserved_pages,
    check_shared_memory,
)
from kvstore.doctor.pools import Pool, check_leftovers, taken_bytes
from kvstore.doctor.software import FLOORS, check_libraries, check_python
from kvstore.doctor.storage import (
    check_direct_io,
    check_disk_file_system,
    check_disk_mount,
    check_disk_space,
    check_state_file_system,
)
from kvstore.mounts import Mount
from kvstore.units import GIB, KIB, MIB

OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR
USER = 1000
STATE = Path("/srv/state")
SHARED = Path("/dev/shm")


def mount(kind: str = "xfs", *options: str) -> Mount:
    return Mount("/srv", kind, "/dev/nvme0n1", frozenset(options or ("rw", "relatime")))


GOOD = Directory(STATE, STATE, True, USER, 0o700, True, mount(), 100 * GIB, 50 * GIB)
GOOD_SHARED = Directory(
    SHARED, SHARED, True, 0, 0o1777, True, mount("tmpfs", "rw", "huge=advise"), 64 * GIB, 32 * GIB
)


def only(findings: Iterable[Finding]) -> Finding:
    """Return the one finding, which is one line of text and one of advice."""
    (found,) = findings
    assert found.text
    assert "\n" not in found.text + found.advice
    assert found.advice or found.level is OK
    return found


def says(findings: Iterable[Finding], level: Level, *words: str) -> None:
    found = only(findings)
    assert found.level is level, found
    for word in words:
        assert word in found.text + " " + found.advice, found


@pytest.mark.parametrize(
    ("seen", "user", "level", "words"),
    [
        (GOOD, USER, OK, "owner 1000, mode 700"),
        (replace(GOOD, is_directory=False), USER, ERROR, "is not a directory"),
        (replace(GOOD, there=Path("/srv")), USER, OK, "not there yet"),
        (replace(GOOD, there=Path("/srv"), writable=False), USER, ERROR, "install -d -m 700"),
        (GOOD, 1001, ERROR, "belongs to user 1000, not to user 1001"),
        (GOOD, 0, WARNING, "belongs to user 1000"),
        (replace(GOOD, writable=False, mode=0o500), USER, ERROR, "not writable"),
        (replace(GOOD, mode=0o770), USER, ERROR, "written by other users (mode 770)"),
        (replace(GOOD, mode=0o755), USER, WARNING, "chmod 700 /srv/state"),
    ],
)
def test_directory_of_somebody_else(seen: Directory, user: int, level: Level, words: str) -> None:
    says(check_access("state directory", seen, user), level, words)


@pytest.mark.parametrize(
    ("seen", "level", "words"),
    [
        (GOOD, OK, "xfs, 50 GiB free"),
        (replace(GOOD, mount=None), OK, "unknown"),
        (replace(GOOD, mount=mount("nfs4")), ERROR, "refuses"),
        (replace(GOOD, mount=mount("ext4", "ro")), ERROR, "remount,rw /srv"),
        (replace(GOOD, free_bytes=4 * MIB), ERROR, "4 MiB free"),
        (replace(GOOD, free_bytes=200 * MIB), WARNING, "200 MiB free"),
        (replace(GOOD, mount=mount("tmpfs")), WARNING, "gone when the machine starts again"),
        (replace(GOOD, mount=mount("overlay")), WARNING, "volume"),
    ],
)
def test_index_where_it_cannot_live(seen: Directory, level: Level, words: str) -> None:
    says(check_state_file_system(seen), level, words)


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [
        ("xfs", OK, "xfs at /srv (/dev/nvme0n1)"),
        ("ext4", WARNING, "XFS"),
        ("btrfs", WARNING, "copies on write"),
        ("nfs4", WARNING, "two machines"),
        ("tmpfs", WARNING, "takes memory"),
        ("overlay", WARNING, "gone with the container"),
        ("exfat", WARNING, "not tried out"),
    ],
)
def test_disk_on_another_file_system(kind: str, level: Level, words: str) -> None:
    says(check_disk_file_system(replace(GOOD, mount=mount(kind))), level, words)


@pytest.mark.parametrize(
    ("options", "level", "words"),
    [
        (("rw", "noatime"), OK, "noatime,rw"),
        (("ro", "noatime"), ERROR, "read-only"),
        (("rw", "nobarrier"), WARNING, "power failure"),
        (("rw", "data=journal"), WARNING, "without data=journal"),
        (("rw", "sync"), WARNING, "every write wait"),
    ],
)
def test_mount_options_that_cost(options: tuple[str, ...], level: Level, words: str) -> None:
    says(check_disk_mount(mount("ext4", *options)), level, words)


@pytest.mark.parametrize(
    ("alignment", "level", "words"),
    [
        (512, OK, "512 B"),
        (4 * KIB, OK, "4 KiB"),
        (16 * KIB, ERROR, "units of 16 KiB"),
        (None, WARNING, "page cache"),
    ],
)
def test_direct_io_is_refused(alignment: int | None, level: Level, words: str) -> None:
    says(check_direct_io(alignment), level, words)


@pytest.mark.parametrize(
    ("capacity", "segments", "level", "words"),
    [
        (40 * GIB, 0, OK, "capacity 40 GiB"),
        (None, 0, OK, "capacity 40 GiB"),
        (60 * GIB, 20 * GIB, OK, "20 GiB in segments"),
        (60 * GIB, 0, WARNING, "fills up earlier"),
        (101 * GIB, 99 * GIB, ERROR, "whole file system has 100 GiB"),
    ],
)
def test_capacity_that_is_not_there(
    capacity: int | None, segments: int, level: Level, words: str
) -> None:
    says(check_disk_space(GOOD, capacity, segments), level, words)


def test_full_disk_without_a_capacity() -> None:
    says(check_disk_space(replace(GOOD, free_bytes=MIB), None, 0), ERROR, "1 MiB free")


@pytest.mark.parametrize(
    ("seen", "pool", "taken", "swap", "level", "words"),
    [
        (GOOD_SHARED, 16 * GIB, 0, 0, OK, "32 GiB free of 64 GiB"),
        (replace(GOOD_SHARED, there=Path("/dev")), GIB, 0, 0, ERROR, "mount -t tmpfs"),
        (replace(GOOD_SHARED, mount=mount("ext4")), GIB, 0, 0, ERROR, "not tmpfs"),
        (replace(GOOD_SHARED, writable=False), GIB, 0, 0, ERROR, "chmod 1777"),
        (replace(GOOD_SHARED, total_bytes=64 * MIB), GIB, 0, 0, ERROR, "--shm-size"),
        (GOOD_SHARED, 48 * GIB, 0, 0, ERROR, "48 GiB more"),
        (GOOD_SHARED, 48 * GIB, 20 * GIB, 0, OK, "pool of 48 GiB"),
        (GOOD_SHARED, 16 * GIB, 0, GIB, WARNING, "noswap"),
        (replace(GOOD_SHARED, mount=mount("tmpfs", "noswap")), GIB, 0, GIB, OK, "free"),
    ],
)
def test_pool_larger_than_shared_memory(
    seen: Directory, pool: int, taken: int, swap: int, level: Level, words: str
) -> None:
    says(check_shared_memory(seen, pool, taken, swap), level, words)


@pytest.mark.parametrize(
    ("options", "switch", "level", "words"),
    [
        (("rw", "huge=advise"), "never", OK, "huge=advise"),
        (("rw",), "force", OK, "force"),
        (("rw",), "advise", WARNING, "remount,huge=advise /dev/shm"),
        (("rw", "huge=always"), "deny", WARNING, "denied"),
        (("rw", "huge=always"), "", WARNING, "none for shared memory"),
    ],
)
def test_small_pages(options: tuple[str, ...], switch: str, level: Level, words: str) -> None:
    seen = replace(GOOD_SHARED, mount=mount("tmpfs", *options))
    says(check_huge_pages(seen, switch), level, words)


@pytest.mark.parametrize(
    ("total", "free", "level", "words"),
    [
        (0, 0, OK, "none"),
        (1024, 10, OK, "2 GiB"),
        (1024, 1024, WARNING, "2 GiB lie idle"),
    ],
)
def test_memory_set_aside_for_nobody(total: int, free: int, level: Level, words: str) -> None:
    meminfo = {
        "MemTotal": 16 * GIB,
        "Hugepagesize": 2 * MIB,
        "HugePages_Total": total,
        "HugePages_Free": free,
    }
    says(check_reserved_pages(meminfo), level, words)


@pytest.mark.parametrize(
    ("available", "pool", "taken", "level", "words"),
    [
        (16 * GIB, 8 * GIB, 0, OK, "wants 8 GiB more"),
        (2 * GIB, 8 * GIB, 8 * GIB, OK, "has its size"),
        (16 * GIB, 32 * GIB, 20 * GIB, OK, "wants 12 GiB more"),
        (16 * GIB, 32 * GIB, 0, ERROR, "lower --host-pool"),
        (9 * GIB, 8 * GIB + MIB, 0, WARNING, "little is left"),
    ],
)
def test_pool_larger_than_memory(
    available: int, pool: int, taken: int, level: Level, words: str
) -> None:
    says(check_available(available, 64 * GIB, pool, taken), level, words)


@pytest.mark.parametrize(
    ("limit", "pool", "taken", "level", "words"),
    [
        (None, GIB, 0, OK, "no limit"),
        (MemoryLimit(32 * GIB, 16 * GIB), 8 * GIB, 0, OK, "left of a limit of 32 GiB"),
        (MemoryLimit(32 * GIB, 4 * GIB), 8 * GIB, 0, ERROR, "8 GiB more"),
        (MemoryLimit(32 * GIB, 4 * GIB), 8 * GIB, 6 * GIB, OK, "4 GiB left"),
        (MemoryLimit(32 * GIB, 4 * GIB), 4 * GIB, 0, WARNING, "killed"),
    ],
)
def test_pool_larger_than_the_container(
    limit: MemoryLimit | None, pool: int, taken: int, level: Level, words: str
) -> None:
    says(check_cgroup(limit, pool, taken), level, words)


@pytest.mark.parametrize(
    ("limit", "gpu", "privileged", "level", "words"),
    [
        (resource.RLIM_INFINITY, True, False, OK, "no limit"),
        (8 * MIB, True, True, OK, "root"),
        (2 * GIB, True, False, OK, "2 GiB"),
        (8 * MIB, False, False, OK, "nothing is pinned"),
        (8 * MIB, True, False, WARNING, "LimitMEMLOCK=infinity"),
    ],
)
def test_pool_that_cannot_be_pinned(
    limit: int, gpu: bool, privileged: bool, level: Level, words: str
) -> None:
    says(check_locked_memory(limit, GIB, gpu=gpu, privileged=privileged), level, words)


@pytest.mark.parametrize(
    ("soft", "hard", "level", "words"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, OK, "no limit"),
        (65_536, 65_536, OK, "65,536"),
        (512, 4096, WARNING, "up to 4096"),
        (64, resource.RLIM_INFINITY, ERROR, "up to unlimited"),
    ],
)
def test_too_few_open_files(soft: int, hard: int, level: Level, words: str) -> None:
    says(check_open_files(soft, hard), level, words)


@pytest.mark.parametrize(
    ("usable", "quota", "threads", "level", "words"),
    [
        (16, None, 4, OK, "16 usable; 4 I/O threads"),
        (2, None, 64, WARNING, "--io-threads 8"),
        (64, 1.5, 32, WARNING, "allows 1.5"),
        (64, 0.5, 1, WARNING, "stalls"),
    ],
)
def test_more_threads_than_processors(
    usable: int, quota: float | None, threads: int, level: Level, words: str
) -> None:
    says(check_processors(usable, quota, threads), level, words)


def test_old_kernel() -> None:
    says(check_kernel("6.8.0", populates=True, locks=True), OK, "6.8.0")
    says(check_kernel("5.4.0", populates=False, locks=True), WARNING, "5.14")
    says(check_kernel("6.8.0", populates=True, locks=False), ERROR, "OFD")


def test_old_python() -> None:
    says(check_python("CPython", (3, 12, 1), 64), OK, "CPython 3.12.1")
    says(check_python("CPython", (3, 10, 9), 64), ERROR, "3.11")
    says(check_python("CPython", (3, 12, 1), 32), ERROR, "64-bit")
    says(check_python("PyPy", (3, 11, 0), 64), WARNING, "PyPy")


def test_old_library() -> None:
    says(check_libraries(FLOORS), OK, f"lmdb {FLOORS['lmdb']}")
    says(check_libraries({**FLOORS, "psutil": "10.0", "rich": "13.7.0rc1"}), OK, "numpy")
    says(
        check_libraries({**FLOORS, "grpcio": "1.9.9"}),
        ERROR,
        "grpcio 1.9.9 (needs 1.71.2)",
        "pip install 'grpcio>=1.71.2'",
    )
    without = {name: version for name, version in FLOORS.items() if name != "lmdb"}
    says(check_libraries(without), ERROR, "lmdb is missing", "pip install 'lmdb>=1.6'")


def test_gpu_that_nobody_reaches() -> None:
    says(check_gpus(Gpus()), OK, "no NVIDIA driver, no GPU")
    says(check_gpus(Gpus(devices=2)), WARNING, "no NVIDIA driver is loaded")
    says(check_gpus(Gpus(count=2, driver="570.1")), WARNING, "--gpus all")
    says(
        check_gpus(Gpus(1, 1, "570.1", cuda="12.8", kvikio="26.4")),
        OK,
        "1 GPU, driver 570.1, CUDA 12.8, no cupy, kvikio 26.4, no GPUDirect Storage driver",
        "needs CuPy",
    )
    whole = Gpus(2, 2, "570.1", "12.8", "14.0", "26.4", "2.24")
    says(check_gpus(whole), OK, "2 GPUs", "cupy 14.0", "nvidia-fs 2.24")


OWN = "kvstore-1000-aaaaaaaaaaaa-"
OTHER = "kvstore-1000-bbbbbbbbbbbb-"


def pool(name: str, size: int, *, used: bool = False, age: float = 60.0, owner: int = USER) -> Pool:
    return Pool(SHARED / f"{name}{'0' * 12}", owner, size, age, used)


def test_dead_pools_are_told_from_living_ones() -> None:
    living = [
        pool(OWN, GIB, used=True),
        pool(OTHER, GIB, used=True),
        pool(OTHER, GIB, age=1.0),  # being made
        pool(OWN, GIB),  # removed at the next start
        pool("kvstore-1001-cccccccccccc-", GIB, owner=1001),  # nobody but root can tell
    ]
    says(check_leftovers(living, OWN, USER), OK, "none")
    assert taken_bytes(living, OWN) == 2 * GIB
    dead = [*living, pool(OTHER, GIB), pool("kvstore-1000-dddddddddddd-", 3 * GIB)]
    says(
        check_leftovers(dead, OWN, USER),
        WARNING,
        "2 of other state directories take 4 GiB",
        "rm -r /dev/shm/kvstore-1000-dddddddddddd-000000000000 and 1 more",
    )
    says(check_leftovers(living, OWN, 0), WARNING, "1 of other", "kvstore-1001-cccccccccccc-")


@pytest.mark.parametrize(
    ("now", "newest", "source", "level", "words"),
    [
        (1.8e9, 1.8e9 - 5, "tsc", OK, "2027-01-15 08:00:00 UTC, synchronised, tsc"),
        (1.8e9, 0.0, "", OK, "synchronised"),
        (0.0, 0.0, "tsc", WARNING, "1970-01-01"),
        (1.8e9, 1.8e9 + 3600, "tsc", WARNING, "the clock went back"),
        (1.8e9, 0.0, "hpet", WARNING, "hpet"),
    ],
)
def test_clock_that_went_back(
    now: float, newest: float, source: str, level: Level, words: str
) -> None:
    says(check_clock(now, newest, source, True), level, words)
