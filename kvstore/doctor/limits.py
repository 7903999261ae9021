"""Limits of the process: locked memory, open files, processors."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Final

from kvstore.doctor.finding import Finding, error, ok, warning
from kvstore.units import format_bytes

__all__ = ["check_locked_memory", "check_open_files", "check_processors"]

# A quarter of them goes to segments; sockets, slabs and libraries need theirs.
_FEW_FILES: Final = 1024
_TOO_FEW_FILES: Final = 128
_THREADS_PER_PROCESSOR: Final = 4


def check_locked_memory(
    limit_bytes: int, pool_bytes: int, *, gpu: bool, privileged: bool
) -> Iterator[Finding]:
    """Judge RLIMIT_MEMLOCK.

    Args:
        limit_bytes: soft limit; `resource.RLIM_INFINITY`: none.
        pool_bytes: size of the pool, which clients with a GPU pin.
        gpu: whether there is one.
        privileged: whether the limit does not count for this user.
    """
    subject = "locked memory"
    if limit_bytes == resource.RLIM_INFINITY:
        yield ok(subject, "no limit")
        return
    text = f"limit {format_bytes(limit_bytes)}"
    if privileged:
        yield ok(subject, f"{text}, which does not count for root")
    elif limit_bytes >= pool_bytes:
        yield ok(subject, text)
    elif not gpu:
        yield ok(subject, f"{text}; without a GPU nothing is pinned")
    else:
        yield warning(
            subject,
            f"{text}, less than the pool's {format_bytes(pool_bytes)}: engines of this user may "
            "fail to pin it",
            "ulimit -l unlimited; in a unit, LimitMEMLOCK=infinity",
        )


def check_open_files(soft: int, hard: int) -> Iterator[Finding]:
    """Judge RLIMIT_NOFILE.

    Args:
        soft: limit that counts; `resource.RLIM_INFINITY`: none.
        hard: what it can be raised to.
    """
    subject = "open files"
    if soft == resource.RLIM_INFINITY:
        yield ok(subject, "no limit")
        return
    text = f"limit {soft:,}"
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    advice = f"ulimit -n 65536 (up to {most} without root); in a unit, LimitNOFILE=65536"
    if soft < _TOO_FEW_FILES:
        yield error(subject, f"{text}: too few for sockets, slabs and segments", advice)
    elif soft < _FEW_FILES:
        yield warning(
            subject,
            f"{text}: many clients, or a large disk tier, will run into it",
            advice,
        )
    else:
        yield ok(subject, text)


def check_processors(usable: int, quota: float | None, io_threads: int) -> Iterator[Finding]:
    """Judge the processors against the disk tier's threads.

    Args:
        usable: processors that this process may run on.
        quota: processors' time that the control group allows; None: no limit.
        io_threads: of the disk tier; they check digests besides waiting for the device.
    """
    subject = "processors"
    count = float(usable) if quota is None else min(float(usable), quota)
    text = f"{usable} usable"
    if quota is not None and quota < usable:
        text += f", of which the control group allows {quota:g}"
    if count < 1:
        yield warning(
            subject,
            f"{text}: the daemon stalls whenever its share is used up",
            "raise the container's or unit's processor limit",
        )
    elif io_threads > _THREADS_PER_PROCESSOR * count:
        yield warning(
            subject,
            f"{text}; {io_threads} I/O threads take turns on them",
            f"--io-threads {int(_THREADS_PER_PROCESSOR * count)} or fewer",
        )
    else:
        yield ok(subject, f"{text}; {io_threads} I/O threads")
