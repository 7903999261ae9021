"""Kernel features that kvstore uses: found out by using them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvstore.doctor.finding import Finding, error, ok, warning
from kvstore.locks import is_locked, lock_byte
from kvstore.memory import Mapping
from kvstore.units import PAGE_BYTES

__all__ = ["can_lock_open_files", "can_populate", "check_kernel"]


def can_populate() -> bool:
    """Tell whether the kernel knows MADV_POPULATE_WRITE.

    Raises:
        OSError: no memory.
    """
    descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        mapping = Mapping(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)
    try:
        return mapping.populate(reserved=False)
    finally:
        mapping.close()


def can_lock_open_files() -> bool:
    """Tell whether locks belong to open files: one open file sees the other's lock."""
    holder = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    asker = -1
    try:
        asker = os.open(f"/proc/self/fd/{holder}", os.O_RDWR | os.O_CLOEXEC)
        return lock_byte(holder, 1) and is_locked(asker, 1) and not is_locked(asker, 2)
    except OSError:
        return False
    finally:
        os.close(holder)
        if asker >= 0:
            os.close(asker)


def check_kernel(release: str, *, populates: bool, locks: bool) -> Iterator[Finding]:
    """Judge the kernel.

    Args:
        release: as `uname -r` says.
        populates: whether it knows MADV_POPULATE_WRITE.
        locks: whether it has OFD locks.
    """
    subject = "kernel"
    if not locks:
        yield error(
            subject,
            f"Linux {release} has no OFD locks here: nobody can tell a dead client from a stopped "
            "one",
            "use Linux 5.14 or later, and a sandbox that allows fcntl(F_OFD_SETLK)",
        )
    elif not populates:
        yield warning(
            subject,
            f"Linux {release} has no MADV_POPULATE_WRITE: memory is made page by page",
            "use Linux 5.14 or later",
        )
    else:
        yield ok(subject, f"Linux {release}: OFD locks, MADV_POPULATE_WRITE")
