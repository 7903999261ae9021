"""Two GPUs: tensor parallel engines with CUDA graphs, one beside a daemon with a GPU pool on both."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from fleet import Fleet, Result, Run, daemon_account, hosts
from modes import SMALL, Mode, random_model
from storm import compared, usual

from kvstore.cli.plain import plain
from kvstore.client import Client
from kvstore.space import SpaceSpec

_SETTLE_S = 2.0
_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}


def _query(what: str, fields: str) -> list[list[str]]:
    done = subprocess.run(
        ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]


def _contexts() -> list[dict[str, str]]:
    """Return which process holds how much memory of which GPU."""
    found = []
    for uuid, pid, memory in _query("compute-apps", "gpu_uuid,pid,used_memory"):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            name = "gone"
        is_daemon = "kvstore serve" in name
        found.append(
            {"gpu": uuid[-4:], "pid": pid, "memory": memory, "is": "daemon" if is_daemon else name}
        )
    return sorted(found, key=lambda row: (row["gpu"], row["pid"]))


def _used() -> list[str]:
    return [row[0] for row in _query("gpu", "memory.used")]


def part_parallel(run: Run) -> None:
    """Tokens from host memory, from the GPU pools and after a storm; who has a context where."""
    arguments = run.arguments
    model = run.scratch / "small"
    random_model(model, {**SMALL, **arguments.shape})
    engine = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 200_000_000,
        "tensor_parallel_size": 2,
        "disable_custom_all_reduce": True,
        **_GRAPHS,
        **arguments.small,
    }
    disk = ["--disk", str(arguments.disk / "parallel"), "--disk-capacity", arguments.capacity]
    pool = ["--gpu-pool", f"{arguments.gpu_pool_gib:g}GiB"]
    modes = [Mode("none", "none"), Mode("ours", "ours", [*pool, *disk], arguments.extra)]
    found: Result = {"before": _used()}

    def note(what: str, value: object) -> None:
        found[what] = value
        run.put("parallel", "ours", found)
        run.say(f"parallel: {what} {value}")

    with hosts(run, modes) as started:
        with Fleet(run, model, engine) as fleet:
            fleet.environment = {} if arguments.no_invariant else {"VLLM_BATCH_INVARIANT": "1"}
            fleet.start(started)
            ours = next(host for host in started if host.daemon is not None)
            assert ours.daemon is not None
            note("contexts", _contexts())
            prompts = {"seed": 5, "count": 4, "tokens": arguments.prompt, "max_tokens": 32}
            cold = fleet.ask("ours", "ttft", **prompts)
            fleet.ask("none", "ttft", **prompts)
            own = fleet.ask("none", "ttft", **prompts)
            note("cold_found", cold["cached"])
            for where in ("host", "gpu"):
                time.sleep(_SETTLE_S)
                fleet.ask("ours", "reset")
                answer = fleet.ask("ours", "ttft", **prompts)
                note(f"{where}_found", answer["cached"])
                note(f"{where}_equal_own_hit", answer["tokens"] == own["tokens"])
            with Client(ours.daemon.address) as client:
                client.flush(60.0)
                for info in client.spaces():
                    space = client.open_space(SpaceSpec(**plain(info.spec)))
                    for tier in ("gpu", "host"):
                        note(f"evicted_{tier}", str(space.evict(tier=tier)))
            note("contexts_after_loads", _contexts())
            storm = usual(run, arguments.storm // 2)
            for name in fleet.names:
                fleet.ask(name, "reset")
            calm = fleet.ask("none", "storm", pace=1, **storm)
            wild = fleet.ask("ours", "storm", pace=1, **storm)
            fleet.ask("none", "reset")
            control = fleet.ask("none", "storm", pace=2, **storm)
            for what, other in (("storm", wild), ("control", control)):
                note(what, {k: v for k, v in compared(calm, other).items() if k != "different"})
            time.sleep(2 * _SETTLE_S)
            note("leases", sum(c["leases"] for c in daemon_account(ours)["clients"]))
            fleet.stop(violently=True)
        time.sleep(2 * _SETTLE_S)
        note("after_kill", {"used": _used(), "contexts": _contexts()})
    time.sleep(_SETTLE_S)
    note("after_the_daemon", _used())
