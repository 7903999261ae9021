"""What an idle I/O engine must not keep: memory of the transfers that it has done."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.tiers.io_engine import IoFile, IoRequest
from kvstore.tiers.posix_engine import PosixEngine


def test_an_idle_thread_keeps_no_buffer(tmp_path: Path, until: Callable[..., None]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    found = path.stat()
    memory = bytearray(b"x" * 4096)

    async def write() -> None:
        engine = PosixEngine(2)
        await engine.open()
        file = IoFile(os.fspath(path), found.st_dev, found.st_ino)
        request = IoRequest(file, 0, (memoryview(memory),))
        assert await engine.write([request]) == [0]
        del request
        until(unused, 60.0)
        await engine.close()

    def unused() -> bool:
        try:
            memory.append(0)  # refused while anybody has a view
        except BufferError:
            return False
        return True

    asyncio.run(write())
    assert path.read_bytes() == b"x" * 4096
