"""Checks and measures the GPU pool, on a machine with a GPU.

    python tests/tiers_gpu/measure_gpu_pool.py [--json FILE] [PART ...]

Parts: copies, processes. Each prints lines; a failed check ends with exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_figures import FAILED, FIGURES, Memory, best, check, gpu_used, say, settles

from kvstore.cudart import cudart
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Transfer
from kvstore.tiers.cuda_device import cuda_devices
from kvstore.tiers.gpu import GpuTier

MIB = 1 << 20
GIB = 1 << 30


async def slots_of(
    gpu: GpuTier, memory: Memory, slot: int, total: int, up: float, down: float
) -> None:
    shape = BlockShape(slot, 1)
    count = total // slot
    gpu.want(shape, count)
    slots = gpu.allocate(shape, count)
    assert len(slots) == count
    places = list(range(count))
    random.Random(1).shuffle(places)

    one = [
        Transfer(s, (memory.mapping.view(p * slot, slot),), (slot,))
        for s, p in zip(slots, places, strict=True)
    ]
    per = max(1, 64 * MIB // slot)
    batches = [one[at : at + per] for at in range(0, count, per)]

    async def run(move: Any, parts: Sequence[Sequence[Transfer]]) -> None:
        todo = iter(parts)

        async def worker() -> None:
            for part in todo:
                assert set(await move(part)) == {Outcome.OK}

        await asyncio.gather(worker(), worker())

    write = await best(4, lambda: run(gpu.write, batches))
    read = await best(4, lambda: run(gpu.read, batches))
    rate = total / write / 1e9
    say(f"tier write (host to gpu), {slot >> 10} KiB slots", rate, "GB/s")
    say("  of raw", rate / up)
    rate = total / read / 1e9
    say(f"tier read (gpu to host), {slot >> 10} KiB slots", rate, "GB/s")
    say("  of raw", rate / down)
    half = len(batches) // 2
    both = await best(
        4,
        lambda: asyncio.gather(run(gpu.write, batches[:half]), run(gpu.read, batches[half:])),
    )
    say(f"both at once, {slot >> 10} KiB slots", total / both / 1e9, "GB/s")
    gpu.free(slots)
    for group in [g.group for g in gpu.groups()]:
        gpu.remove(group)


async def copies() -> None:
    gpu = GpuTier(Path(tempfile.mkdtemp(dir="/dev/shm")), cuda_devices(["0"]), 6 * GIB)
    await gpu.open()
    total = 2 * GIB
    memory = Memory(2 * total, gpu)
    say("pin, s per GiB", memory.pin_seconds * GIB / (2 * total))
    runtime = cudart()
    runtime.set_device(0)
    stream = runtime.stream_create()
    address = gpu.devices[0].address

    def raw(to_device: bool) -> float:
        begun = time.perf_counter()
        pair = (address, memory.mapping.address)
        runtime.memcpy_async(pair[not to_device], pair[to_device], total, stream)
        runtime.stream_synchronize(stream)
        return total / (time.perf_counter() - begun) / 1e9

    up = max(raw(True) for _ in range(5))
    down = max(raw(False) for _ in range(5))
    say("raw pinned copy, host to gpu", up, "GB/s")
    say("raw pinned copy, gpu to host", down, "GB/s")
    for slot in (256 << 10, 2 * MIB, 16 * MIB):
        await slots_of(gpu, memory, slot, total, up, down)
    memory.close()
    await gpu.close()


IMPORTER = """
import sys, numpy as np
from kvstore.cudart import cudart
handle, offset, length = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
runtime = cudart(); runtime.set_device(0)
base = runtime.ipc_open(handle)
stream = runtime.stream_create()
got = np.zeros(length, np.uint8)
def look():
    got[:] = 0
    runtime.memcpy_async(got.ctypes.data, base + offset, length, stream)
    runtime.stream_synchronize(stream)
    print(got.tobytes().hex()[:64], int(got.astype(np.uint64).sum()), flush=True)
look()
for line in sys.stdin:
    try:
        look()
    except Exception as error:
        print('error', error, flush=True)
"""

DAEMON = """
import asyncio, sys, tempfile
from pathlib import Path
import numpy as np
from kvstore.space import BlockShape
from kvstore.tiers.base import Transfer
from kvstore.tiers.cuda_device import cuda_devices
from kvstore.tiers.gpu import GpuTier
async def main():
    gpu = GpuTier(Path(tempfile.mkdtemp(dir='/dev/shm')), cuda_devices(['0']), 4 << 30)
    await gpu.open()
    shape = BlockShape(1 << 20, 1)
    gpu.want(shape, 40)
    slots = gpu.allocate(shape, 40)
    data = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
    await gpu.write([Transfer(slots[33], (memoryview(data),), (1 << 20,))])
    group = next(g for g in gpu.groups() if g.group == slots[33].group)
    slab = group.slabs[0]
    offset = slab.offset + slots[33].index * slab.slot_bytes
    print(slab.handle.hex(), offset, 1 << 20, data.tobytes().hex()[:64],
          int(data.astype(np.uint64).sum()), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await gpu.close()
asyncio.run(main())
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str], seconds: float = 60) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline().strip() if ready else "nothing"


def processes() -> None:
    before = gpu_used()
    say("device memory in use before", before, "MiB")

    def pool() -> tuple[subprocess.Popen[str], list[str]]:
        daemon = child(DAEMON)
        return daemon, line_of(daemon).split()

    def again(process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return line_of(process)

    # An importer is killed, then the pool is closed in order.
    daemon, said = pool()
    importer = child(IMPORTER, *said[:3])
    check(f"an importer reads at offset {said[1]}", right=line_of(importer).split() == said[3:])
    say("in use with the pool and an importer", gpu_used(), "MiB")
    importer.kill()
    importer.wait()
    check("the pool is still there after kill -9 of an importer", right=gpu_used() - before >= 4096)
    assert daemon.stdin is not None
    daemon.stdin.write("\n")
    daemon.stdin.flush()
    daemon.wait()
    check("an orderly end gives the memory back", right=settles(lambda: gpu_used() <= before + 16))
    # The owner is killed while somebody reads.
    daemon, said = pool()
    importer = child(IMPORTER, *said[:3])
    check("another importer reads", right=line_of(importer).split() == said[3:])
    daemon.kill()
    daemon.wait()
    time.sleep(1)
    answer = again(importer)
    same = answer.split() == said[3:]
    say("after kill -9 of the owner, an importer reads", "the same bytes" if same else answer)
    say("in use after kill -9 of the owner", gpu_used(), "MiB")
    late = child(IMPORTER, *said[:3])
    say("opening the handle after that", line_of(late) or f"exit {late.wait()}")
    late.kill()
    late.wait()
    importer.kill()
    importer.wait()
    check(
        "nothing is left after the importer's end", right=settles(lambda: gpu_used() <= before + 16)
    )
    # A daemon, refused and in order.
    state = tempfile.mkdtemp()
    command = [sys.executable, "-m", "kvstore", "serve", "--state", state, "--host-pool", "256MiB"]
    command += ["--listen", f"unix://{state}/s"]
    refused = subprocess.run(
        [*command, "--gpu-pool", "500GiB"], capture_output=True, text=True, check=False
    )
    print("   ", refused.stderr.strip().splitlines()[-1])
    check("too large a pool is refused in one line", right=refused.returncode != 0)
    refused = subprocess.run(
        [*command, "--gpu-pool", "1GiB", "--gpu-devices", "7"],
        capture_output=True,
        text=True,
        check=False,
    )
    print("   ", refused.stderr.strip().splitlines()[-1])
    begun = time.perf_counter()
    daemon = subprocess.Popen(
        [*command, "--gpu-pool", "30%"], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )
    print("   ", line_of(daemon))
    say("start of a daemon with --gpu-pool 30%", time.perf_counter() - begun, "s")
    say("in use", gpu_used(), "MiB")
    for tool in ("stats", "doctor"):
        shown = subprocess.run(
            [sys.executable, "-m", "kvstore", tool],
            check=False,
            env={**os.environ, "KVSTORE_ADDRESS": f"unix://{state}/s"},
            capture_output=True,
            text=True,
        )
        print("\n".join(x for x in shown.stdout.splitlines() if "gpu" in x.lower()))
    daemon.send_signal(signal.SIGTERM)
    daemon.wait()
    check("SIGTERM gives the memory back", right=settles(lambda: gpu_used() <= before + 16))
    daemon = subprocess.Popen([*command, "--gpu-pool", "30%"], stdout=subprocess.PIPE, text=True)
    line_of(daemon)
    daemon.kill()
    daemon.wait()
    check("kill -9 gives the memory back", right=settles(lambda: gpu_used() <= before + 16))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["copies", "processes"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "processes" in options.parts:
        processes()
    if "copies" in options.parts:
        asyncio.run(copies())
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "figures": FIGURES}, indent=1))
    print("failed:", FAILED or "nothing")
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
