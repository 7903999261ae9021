"""Plain reads of files into device memory with kvikio: the baseline of what kvstore reads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.gpu_machine import Machine
from kvstore.cli.child import ChildError
from kvstore.units import MIB

__all__ = ["KvikioFiles"]

# The fastest of 1, 4, 8 and 16 threads with tasks of 1, 4 and 16 MiB on the machine that the
# published figures were made on.
_THREADS: Final = 16
_TASK_BYTES: Final = 4 * MIB


class KvikioFiles:
    """Reads whole files, past the page cache where kvikio can.

    Attributes:
        description: what it is, with the mode that is in use.
    """

    def __init__(self, kvikio: Any, machine: Machine) -> None:
        """Wrap the module."""
        self._kvikio = kvikio
        self._machine = machine
        self._target: Any = None
        kvikio.defaults.set({"num_threads": _THREADS, "task_size": _TASK_BYTES})
        self._direct = _direct_reads(kvikio)
        self.description = (
            f"kvikio {'GDS' if _gds(kvikio) else 'compat'} reads"
            f"{', direct' if self._direct else ', cache dropped'}"
        )

    @classmethod
    def open(cls, machine: Machine) -> KvikioFiles:
        """Load kvikio.

        Raises:
            ChildError: it is not there.
        """
        try:
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            raise ChildError(f"kvikio cannot be measured: {error}") from error
        return cls(kvikio, machine)

    def read_seconds(self, files: Sequence[tuple[Path, int]]) -> float:
        """Read the first bytes of each file into device memory, and return how long it took."""
        size = sum(length for _, length in files)
        if self._target is None or self._target.numel() < size:
            self._target = self._machine.cache(size)
        opened = [self._kvikio.CuFile(str(path), "r") for path, _ in files]
        try:
            for path, _ in files:
                _drop_cache(path)
            self._machine.synchronize()
            begin = time.perf_counter()
            at, reads = 0, []
            for file, (_, length) in zip(opened, files, strict=True):
                reads.append(file.pread(self._target[at : at + length], size=length))
                at += length
            done = sum(read.get() for read in reads)
            seconds = time.perf_counter() - begin
        finally:
            for file in opened:
                file.close()
        if done != size:
            raise ChildError(f"kvikio read {done} of {size} bytes")
        return seconds

    def close(self) -> None:
        """Give the memory back."""
        self._target = None


def _direct_reads(kvikio: Any) -> bool:
    """Ask for reads past the page cache; return whether this kvikio can."""
    try:
        kvikio.defaults.set({"auto_direct_io_read": True})
    except (ValueError, KeyError, AttributeError):
        return False
    return True


def _gds(kvikio: Any) -> bool:
    # Without the kernel module cuFile itself falls back, whatever kvikio prefers.
    module = Path("/proc/driver/nvidia-fs").exists()
    return module and not kvikio.defaults.is_compat_mode_preferred()


def _drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
