"""Memory for the host pool: shared memory, huge pages, what is available, the control group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kvstore.cgroup import MemoryLimit
from kvstore.doctor.directory import Directory
from kvstore.doctor.finding import Finding, error, ok, warning
from kvstore.units import GIB, KIB, format_bytes

__all__ = [
    "check_available",
    "check_cgroup",
    "check_huge_pages",
    "check_reserved_pages",
    "check_shared_memory",
    "read_meminfo",
    "read_shmem_enabled",
]

# What daemon and engines need beside the pool, at the least.
_SPARE_BYTES: Final = 1 * GIB
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MEMINFO: Final = Path("/proc/meminfo")


def read_meminfo(path: Path = _MEMINFO) -> dict[str, int]:
    """Return the lines of ``/proc/meminfo``: bytes, or plain counts where it has no unit.

    Raises:
        OSError: there is no such file.
    """
    values = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words:
            values[name] = int(words[0]) * (KIB if len(words) > 1 else 1)
    return values


def read_shmem_enabled(path: Path = _SHMEM_ENABLED) -> str:
    """Return the chosen word of ``shmem_enabled``; empty on kernels without huge pages."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def check_shared_memory(
    seen: Directory, pool_bytes: int, taken_bytes: int, swap_bytes: int
) -> Iterator[Finding]:
    """Judge the file system of the pool.

    Args:
        seen: ``/dev/shm``.
        pool_bytes: size of the pool.
        taken_bytes: of those, what this daemon's pool has taken already.
        swap_bytes: swap space of the machine.
    """
    subject = "shared memory"
    pool, free = format_bytes(pool_bytes), format_bytes(seen.free_bytes)
    total = format_bytes(seen.total_bytes)
    larger = f"mount -o remount,size=SIZE {seen.path}; in a container, --shm-size"
    if not seen.exists or not seen.is_directory:
        yield error(subject, f"{seen.path} is not there", f"mount -t tmpfs tmpfs {seen.path}")
    elif seen.mount is None or seen.mount.kind not in ("tmpfs", "hugetlbfs"):
        kind = "unknown" if seen.mount is None else seen.mount.kind
        yield error(
            subject,
            f"{seen.path} is {kind}, not tmpfs: the pool would be written to a disk",
            f"mount -t tmpfs tmpfs {seen.path}",
        )
    elif not seen.writable:
        yield error(subject, f"{seen.path} is not writable", f"chmod 1777 {seen.path}")
    elif pool_bytes > seen.total_bytes:
        yield error(
            subject,
            f"{seen.path} has {total}, the pool wants {pool}",
            f"{larger}; or lower --host-pool",
        )
    elif pool_bytes - taken_bytes > seen.free_bytes:
        yield error(
            subject,
            f"{free} free of {total} in {seen.path}, the pool wants "
            f"{format_bytes(pool_bytes - taken_bytes)} more",
            f"remove what others left there, or {larger}; or lower --host-pool",
        )
    elif swap_bytes and "noswap" not in seen.mount.options:
        yield warning(
            subject,
            f"{free} free of {total}; with {format_bytes(swap_bytes)} of swap, the pool can be "
            "swapped out",
            f"mount -o remount,noswap {seen.path} (Linux 6.4), or swapoff -a",
        )
    else:
        yield ok(subject, f"{free} free of {total} in {seen.path}, for a pool of {pool}")


def check_huge_pages(seen: Directory, shmem_enabled: str) -> Iterator[Finding]:
    """Judge whether the pool gets huge pages.

    Mounts have an option of their own; the kernel's switch counts for them only where it says
    ``deny`` or ``force``.

    Args:
        seen: ``/dev/shm``.
        shmem_enabled: the kernel's switch; empty: the kernel has no huge pages for shared memory.
    """
    subject = "huge pages"
    option = (seen.mount.option("huge") if seen.mount is not None else None) or "never"
    text = f"huge={option}, shmem_enabled {shmem_enabled}"
    if not shmem_enabled:
        yield warning(
            subject,
            "this kernel has none for shared memory: making and pinning the pool takes longer",
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        )
    elif shmem_enabled == "deny":
        yield warning(
            subject,
            f"{text}: denied to all shared memory",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    elif shmem_enabled == "force" or option != "never":
        yield ok(subject, text)
    else:
        yield warning(
            subject,
            f"{text}: the pool gets small pages, which take longer to make and to pin",
            f"mount -o remount,huge=advise {seen.path}, before the daemon starts",
        )


def check_reserved_pages(meminfo: Mapping[str, int]) -> Iterator[Finding]:
    """Judge huge pages that were set aside: the pool lies in tmpfs and cannot use them."""
    subject = "reserved huge pages"
    page = meminfo.get("Hugepagesize", 0)
    total, free = (meminfo.get(f"HugePages_{name}", 0) * page for name in ("Total", "Free"))
    if free > meminfo.get("MemTotal", 0) // 20:
        yield warning(
            subject,
            f"{format_bytes(total)}, of which {format_bytes(free)} lie idle; the pool cannot use "
            "them",
            "sysctl vm.nr_hugepages=0, unless something else needs them",
        )
    else:
        yield ok(subject, format_bytes(total) if total else "none, and none needed")


def check_available(
    available_bytes: int, total_bytes: int, pool_bytes: int, taken_bytes: int
) -> Iterator[Finding]:
    """Judge the machine's memory against what the pool still wants."""
    subject = "memory"
    more = pool_bytes - taken_bytes
    text = f"{format_bytes(available_bytes)} available of {format_bytes(total_bytes)}"
    wanted = f"the pool wants {format_bytes(more)} more"
    if more > available_bytes:
        yield error(subject, f"{text}, {wanted}", "lower --host-pool, or stop something else")
    elif more + _SPARE_BYTES > available_bytes:
        yield warning(subject, f"{text}, {wanted}: little is left for engines", "lower --host-pool")
    else:
        yield ok(subject, f"{text}, {wanted}" if more > 0 else f"{text}, the pool has its size")


def check_cgroup(limit: MemoryLimit | None, pool_bytes: int, taken_bytes: int) -> Iterator[Finding]:
    """Judge the control group's memory limit; shared memory counts against it."""
    subject = "memory cgroup"
    if limit is None:
        yield ok(subject, "no limit")
        return
    more = pool_bytes - taken_bytes
    text = f"{format_bytes(limit.room_bytes)} left of a limit of {format_bytes(limit.limit_bytes)}"
    advice = "raise the container's or unit's memory limit, or lower --host-pool"
    if more > limit.room_bytes:
        yield error(subject, f"{text}, the pool wants {format_bytes(more)} more", advice)
    elif more + _SPARE_BYTES > limit.room_bytes:
        yield warning(
            subject,
            f"{text}, the pool wants {format_bytes(more)} more: what comes close to the limit is "
            "killed",
            advice,
        )
    else:
        yield ok(subject, text)
