"""One examination: every check, in the order in which its findings are shown."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import psutil

from kvstore.cgroup import memory_limit, processor_limit
from kvstore.doctor.clock import check_clock, is_synchronised, newest_seconds, read_clock_source
from kvstore.doctor.direct_io import direct_alignment
from kvstore.doctor.directory import Directory, check_access, look_at
from kvstore.doctor.finding import Finding, ok, warning
from kvstore.doctor.gpu import Gpus, check_gpus, look_at_gpus
from kvstore.doctor.kernel import can_lock_open_files, can_populate, check_kernel
from kvstore.doctor.limits import check_locked_memory, check_open_files, check_processors
from kvstore.doctor.memory import (
    check_available,
    check_cgroup,
    check_huge_pages,
    check_reserved_pages,
    check_shared_memory,
    read_meminfo,
    read_shmem_enabled,
)
from kvstore.doctor.pools import (
    SHARED_MEMORY,
    Pool,
    check_leftovers,
    find_pools,
    pool_prefix,
    taken_bytes,
)
from kvstore.doctor.setup import Setup
from kvstore.doctor.software import check_libraries, check_python, read_versions, this_python
from kvstore.doctor.storage import (
    check_direct_io,
    check_disk_file_system,
    check_disk_mount,
    check_disk_space,
    check_state_file_system,
    segments_bytes,
)
from kvstore.mounts import Mount, read_mounts

__all__ = ["Examination"]


class Examination:
    """Looks at the machine once. Changes nothing; one file without a name probes the disk.

    A file system that hangs hangs `run`. Findings so far may be read from any thread meanwhile.

    Attributes:
        setup: what is examined.
        found: findings so far.
        at: subject that is being looked at; empty before and after.
    """

    def __init__(self, setup: Setup) -> None:
        """Prepare; nothing is looked at before `run`."""
        self.setup = setup
        self.found: list[Finding] = []
        self.at = ""
        self._user = os.geteuid()

    def run(self) -> list[Finding]:
        """Make every check and return `found`. About 50 ms; blocks.

        A check that cannot look says so as a finding of its own.
        """
        for subject, check in self._checks():
            self.at = subject
            try:
                self.found.extend(check())
            except (OSError, ValueError) as failure:
                reason = getattr(failure, "strerror", None) or str(failure)
                self.found.append(
                    warning(
                        subject,
                        f"could not be looked at: {reason}",
                        "run this as the daemon's user, or as root",
                    )
                )
        self.at = ""
        return self.found

    def _checks(self) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
        yield "state directory", lambda: check_access("state directory", self._state, self._user)
        yield "state file system", lambda: check_state_file_system(self._state)
        yield "disk directory", self._disk_directory
        if self.setup.disk is not None:
            yield "disk file system", lambda: check_disk_file_system(self._disk)
            yield "disk mount", self._disk_mount
            yield "disk direct I/O", self._direct_io
            yield "disk space", self._disk_space
        yield "shared memory", self._shared_memory
        yield "huge pages", lambda: check_huge_pages(self._shared, read_shmem_enabled())
        yield "reserved huge pages", lambda: check_reserved_pages(read_meminfo())
        yield "memory", self._memory
        yield "memory cgroup", self._cgroup
        yield "locked memory", self._locked_memory
        yield "open files", lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
        yield "processors", self._processors
        yield "kernel", self._kernel
        yield "python", lambda: check_python(*this_python())
        yield "libraries", lambda: check_libraries(read_versions())
        yield "gpu", lambda: check_gpus(self._gpus)
        yield "leftover pools", lambda: check_leftovers(self._pools, self._prefix, self._user)
        yield "clock", self._clock

    # Looked at once, by whichever check comes first: a failure is met again by the others.

    @cached_property
    def _mounts(self) -> list[Mount]:
        return read_mounts()

    @cached_property
    def _state(self) -> Directory:
        return look_at(self.setup.state, self._mounts)

    @cached_property
    def _disk(self) -> Directory:
        assert self.setup.disk is not None
        return look_at(self.setup.disk, self._mounts)

    @cached_property
    def _shared(self) -> Directory:
        return look_at(SHARED_MEMORY, self._mounts)

    @cached_property
    def _pools(self) -> list[Pool]:
        return find_pools()

    @cached_property
    def _gpus(self) -> Gpus:
        return look_at_gpus()

    @property
    def _prefix(self) -> str:
        return pool_prefix(self.setup.state, self._user)

    @property
    def _taken(self) -> int:
        return taken_bytes(self._pools, self._prefix)

    def _disk_directory(self) -> Iterable[Finding]:
        if self.setup.disk is not None:
            return check_access("disk directory", self._disk, self._user)
        text = "no disk tier: blocks are gone after a crash or a reboot"
        return [ok("disk directory", text, "--disk DIR keeps them")]

    def _disk_mount(self) -> Iterable[Finding]:
        mount = self._disk.mount
        return [] if mount is None else check_disk_mount(mount)

    def _direct_io(self) -> Iterable[Finding]:
        # Not yet made: the directory above it is on the same file system, as far as anybody knows.
        return check_direct_io(direct_alignment(self._disk.there))

    def _disk_space(self) -> Iterable[Finding]:
        segments = segments_bytes(self._disk.path)
        return check_disk_space(self._disk, self.setup.disk_capacity_bytes, segments)

    def _shared_memory(self) -> Iterable[Finding]:
        swap = psutil.swap_memory().total
        return check_shared_memory(self._shared, self.setup.host_pool_bytes, self._taken, swap)

    def _memory(self) -> Iterable[Finding]:
        memory = psutil.virtual_memory()
        pool = self.setup.host_pool_bytes
        return check_available(memory.available, memory.total, pool, self._taken)

    def _cgroup(self) -> Iterable[Finding]:
        return check_cgroup(memory_limit(), self.setup.host_pool_bytes, self._taken)

    def _locked_memory(self) -> Iterable[Finding]:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return check_locked_memory(
            soft,
            self.setup.host_pool_bytes,
            gpu=self._gpus.devices > 0,
            privileged=self._user == 0,
        )

    def _processors(self) -> Iterable[Finding]:
        usable = len(os.sched_getaffinity(0))
        return check_processors(usable, processor_limit(), self.setup.io_threads)

    def _kernel(self) -> Iterable[Finding]:
        populates, locks = can_populate(), can_lock_open_files()
        return check_kernel(platform.release(), populates=populates, locks=locks)

    def _clock(self) -> Iterable[Finding]:
        newest = newest_seconds(self.setup.state)
        return check_clock(time.time(), newest, read_clock_source(), is_synchronised())
