"""Whether vLLM with kvstore is right: tokens, leaks, aborts, preemptions, memory afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fleet import Fleet, Result, Run, daemon_account, hosts, mode_of
from modes import SMALL, Mode, gpu_used_mib, random_model
from storm import compared, usual

from kvstore.cli.plain import plain
from kvstore.client import Client
from kvstore.space import SpaceSpec

# Stores and commits that are under way are given so long.
_SETTLE_S = 2.0


def part_correct(run: Run) -> None:
    """Tokens, leaks, preemption and aborts, on a small model whose weights matter."""
    arguments = run.arguments
    model = Path(arguments.model) if arguments.model else run.scratch / "small"
    if not arguments.model:
        random_model(model, {**SMALL, **arguments.shape})
    engine = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 400_000_000,  # 24,000 tokens: the storm needs many times as much
        "enforce_eager": not arguments.graphs,
        **arguments.small,
    }
    modes = [Mode("none", "none"), mode_of(run, "ours")]
    found: Result = {}

    def note(what: str, value: Any) -> None:
        found[what] = value
        run.put("correct", "ours", found)

    with hosts(run, modes) as started, Fleet(run, model, engine) as fleet:
        # With kernels whose results do not depend on the batch, where vLLM has them, every token
        # can be compared; without them late ones may differ by rounding, cache or no cache.
        fleet.environment = {} if arguments.no_invariant else {"VLLM_BATCH_INVARIANT": "1"}
        fleet.start(started)
        invariant = len(fleet.names) == len(started) and not arguments.no_invariant
        if len(fleet.names) < len(started):
            fleet.stop()
            fleet.environment = {}
            fleet.start(started)
        note("batch_invariant", invariant)
        ours = next(host for host in started if host.daemon is not None)
        assert ours.daemon is not None
        prompts = {"seed": 5, "count": 4, "tokens": arguments.prompt, "max_tokens": 32}
        tails = fleet.ask("none", "tails", seed=5, tokens=arguments.prompt, tail=100)
        note("tokens_depend_on_prefix", tails["tokens"][0] != tails["tokens"][1])
        cold = fleet.ask("ours", "ttft", **prompts)
        reference = fleet.ask("none", "ttft", **prompts)
        own = fleet.ask("none", "ttft", **prompts)
        time.sleep(_SETTLE_S)
        fleet.ask("ours", "reset")
        loaded = fleet.ask("ours", "ttft", **prompts)
        with Client(ours.daemon.address) as client:
            client.flush(60.0)
            for info in client.spaces():
                space = client.open_space(SpaceSpec(**plain(info.spec)))
                note("evicted", str(space.evict(tier="host")))
        fleet.ask("ours", "reset")
        from_disk = fleet.ask("ours", "ttft", **prompts)
        note(
            "found", {"loaded": loaded["cached"], "own": own["cached"], "disk": from_disk["cached"]}
        )
        note("tokens_loaded_equal_own_hit", loaded["tokens"] == own["tokens"])
        note("tokens_from_disk_equal_own_hit", from_disk["tokens"] == own["tokens"])
        note("tokens_cold_equal", cold["tokens"] == reference["tokens"])
        note("own_hit_equal_cold", own["tokens"] == reference["tokens"])
        run.say(f"correct: {found}")
        storm = usual(run, arguments.storm)
        for name in fleet.names:
            fleet.ask(name, "reset")
        calm = fleet.ask("none", "storm", pace=1, **storm)
        wild = fleet.ask("ours", "storm", pace=1, **storm)
        fleet.ask("none", "reset")
        # What another order of arrivals does to the tokens of an engine without a connector.
        control = fleet.ask("none", "storm", pace=2, **storm)
        counts = ("aborted", "cached", "external_prefix_cache_hits", "num_preemptions")
        note(
            "storm",
            {
                "requests": arguments.storm,
                **compared(calm, wild),
                "control": compared(calm, control),
                **{
                    f"{name}_{key}": answer.get(key)
                    for name, answer in (("none", calm), ("ours", wild), ("control", control))
                    for key in counts
                },
            },
        )
        time.sleep(3 * _SETTLE_S)
        after = daemon_account(ours)
        note("daemon_after_storm", after)
        note("leases_after_storm", sum(c["leases"] for c in after["clients"]))
        run.say(f"correct: storm {found['storm']}, leases {found['leases_after_storm']}")
        fleet.stop(violently=True)
        time.sleep(2 * _SETTLE_S)
        note("clients_after_kill", daemon_account(ours)["clients"])


def part_memory(run: Run) -> None:
    """GPU memory that is left when everything has ended, one way and another."""
    before = gpu_used_mib()
    model = run.scratch / "small"
    if not (model / "model.safetensors").exists():
        random_model(model, SMALL)
    engine = {"max_model_len": 4096, "enforce_eager": True, **run.arguments.small}
    found: Result = {"before_mib": before}
    with hosts(run, [mode_of(run, "ours_pool")]) as started:
        found["daemon_mib"] = gpu_used_mib() - before
        with Fleet(run, model, engine) as fleet:
            fleet.start(started)
            fleet.ask("ours_pool", "ttft", seed=5, count=4, tokens=run.arguments.prompt)
            fleet.ask("ours_pool", "reset")
            fleet.ask("ours_pool", "ttft", seed=5, count=4, tokens=run.arguments.prompt)
            found["daemon_and_engine_mib"] = gpu_used_mib() - before
            fleet.stop(violently=True)
        time.sleep(_SETTLE_S)
        found["after_kill_of_engine_mib"] = gpu_used_mib() - before
        found["daemon_lives"] = bool(daemon_account(started[0]))
    time.sleep(_SETTLE_S)
    found["after_daemon_mib"] = gpu_used_mib() - before
    run.put("memory", "ours_pool", found)
    run.say(f"memory: {found}")
