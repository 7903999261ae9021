"""The state directory and the disk tier's directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.doctor.directory import Directory
from kvstore.doctor.finding import Finding, error, ok, warning
from kvstore.mounts import NETWORK, VOLATILE, Mount
from kvstore.units import MIB, PAGE_BYTES, format_bytes

__all__ = [
    "check_direct_io",
    "check_disk_file_system",
    "check_disk_mount",
    "check_disk_space",
    "check_state_file_system",
    "segments_bytes",
]

# The index takes some hundred bytes a block; epochs and pins far less.
_STATE_LOW_BYTES: Final = 256 * MIB
_STATE_FULL_BYTES: Final = 16 * MIB
_DISK_SHARE: Final = 0.8

_OTHER_FILE_SYSTEMS: Final = {
    "btrfs": "copies on write, so that preallocated segments are not written in place",
    "zfs": "copies on write, so that preallocated segments are not written in place",
    "bcachefs": "copies on write, so that preallocated segments are not written in place",
    "ext4": "works; direct writes into one file can wait for each other",
    "overlay": "is a container's own layer: slow, and gone with the container",
}
_SLOW_OPTIONS: Final = {
    "sync": "makes every write wait for the device",
    "dirsync": "makes every new name wait for the device",
    "strictatime": "writes a time stamp for every read",
    "data=journal": "turns direct I/O off and writes everything twice",
}
_UNSAFE_OPTIONS: Final = frozenset(("nobarrier", "barrier=0"))


def segments_bytes(directory: Path) -> int:
    """Return what segments take on disk in a directory; 0 when it is not there.

    Raises:
        OSError: it cannot be read.
    """
    return sum(file.stat().st_blocks * 512 for file in directory.glob("seg-*.kvs"))


def check_state_file_system(seen: Directory) -> Iterator[Finding]:
    """Judge where the index, epochs and pins lie."""
    subject = "state file system"
    kind = seen.mount.kind if seen.mount is not None else "unknown"
    text = f"{kind}, {format_bytes(seen.free_bytes)} free"
    if kind in NETWORK:
        yield error(
            subject,
            f"{kind}: a network file system, which the daemon refuses: the index needs dependable "
            "locks and mappings",
            "give --state a directory on a local disk",
        )
    elif seen.mount is not None and "ro" in seen.mount.options:
        yield error(
            subject,
            f"{kind}, mounted read-only",
            f"mount -o remount,rw {seen.mount.point}; see the kernel's log for why it is read-only",
        )
    elif seen.free_bytes < _STATE_FULL_BYTES:
        yield error(subject, text, "free some space: the index cannot grow")
    elif kind in VOLATILE:
        yield warning(
            subject,
            f"{text}: gone when the machine starts again, and what is on disk is lost with it",
            "give --state a directory on a disk",
        )
    elif kind == "overlay":
        yield warning(
            subject,
            f"{text}: gone with the container, and what is on disk is lost with it",
            "mount a volume at the state directory",
        )
    elif seen.free_bytes < _STATE_LOW_BYTES:
        yield warning(subject, text, "free some space, so that the index can grow")
    else:
        yield ok(subject, text)


def check_disk_file_system(seen: Directory) -> Iterator[Finding]:
    """Judge the file system of the segments."""
    subject = "disk file system"
    kind = seen.mount.kind if seen.mount is not None else "unknown"
    text = f"{kind} at {seen.mount.point} ({seen.mount.source})" if seen.mount else kind
    if kind in NETWORK:
        yield warning(
            subject,
            f"{text}: a network file system; slow, and its locks do not keep two machines from "
            "using one directory",
            "give --disk a directory on a local NVMe device",
        )
    elif kind in VOLATILE:
        yield warning(
            subject,
            f"{text}: takes memory, and is gone when the machine starts again",
            "give --disk a directory on a local NVMe device",
        )
    elif kind == "xfs":
        yield ok(subject, text)
    else:
        yield warning(
            subject,
            f"{text}: {_OTHER_FILE_SYSTEMS.get(kind, 'is not tried out')}",
            "for full speed, put the directory on XFS (mkfs.xfs)",
        )


def check_disk_mount(mount: Mount) -> Iterator[Finding]:
    """Judge the mount options of the disk tier's file system."""
    subject = "disk mount"
    options = mount.options
    point = mount.point
    if "ro" in options:
        yield error(
            subject,
            "read-only: nothing can be stored",
            f"mount -o remount,rw {point}; see the kernel's log for why it is read-only",
        )
    elif unsafe := sorted(options & _UNSAFE_OPTIONS):
        yield warning(
            subject,
            f"{unsafe[0]}: a power failure can undo what was synced",
            f"mount {point} without it",
        )
    elif slow := sorted(options & _SLOW_OPTIONS.keys()):
        yield warning(
            subject, f"{slow[0]} {_SLOW_OPTIONS[slow[0]]}", f"mount {point} without {slow[0]}"
        )
    else:
        yield ok(subject, ",".join(sorted(options)))


def check_direct_io(alignment_bytes: int | None) -> Iterator[Finding]:
    """Judge what probing said.

    Args:
        alignment_bytes: smallest unit of direct I/O; None: O_DIRECT is refused.
    """
    subject = "disk direct I/O"
    if alignment_bytes is None:
        yield warning(
            subject,
            "refused: everything goes through the page cache, which takes memory from the engines "
            "and time",
            "put the directory on a file system with O_DIRECT, such as XFS",
        )
    elif alignment_bytes > PAGE_BYTES:
        yield error(
            subject,
            f"works in units of {format_bytes(alignment_bytes)}; slots are aligned to "
            f"{format_bytes(PAGE_BYTES)}",
            "use a device or file system with blocks of at most 4 KiB",
        )
    else:
        yield ok(subject, f"works in units of {format_bytes(alignment_bytes)}")


def check_disk_space(
    seen: Directory, capacity_bytes: int | None, segments: int
) -> Iterator[Finding]:
    """Judge whether the capacity fits.

    Args:
        seen: the disk tier's directory.
        capacity_bytes: configured; None: a share of what is free.
        segments: bytes that segments take already.
    """
    subject = "disk space"
    free, total = format_bytes(seen.free_bytes), format_bytes(seen.total_bytes)
    room = seen.free_bytes + segments
    if capacity_bytes is None:
        capacity_bytes = int(room * _DISK_SHARE)
        if capacity_bytes < 16 * MIB:
            yield error(
                subject, f"{free} free, {format_bytes(segments)} in segments", "free some space"
            )
            return
    capacity = format_bytes(capacity_bytes)
    if capacity_bytes > seen.total_bytes:
        yield error(
            subject,
            f"capacity {capacity}, but the whole file system has {total}: the daemon refuses this",
            "lower --disk-capacity",
        )
    elif capacity_bytes > room:
        yield warning(
            subject,
            f"capacity {capacity}, but {free} free beside {format_bytes(segments)} of segments: "
            "the tier fills up earlier",
            "lower --disk-capacity, or free some space",
        )
    else:
        yield ok(subject, f"capacity {capacity}: {format_bytes(segments)} in segments, {free} free")
