"""The measuring scripts, as far as they need no GPU: what counts as warm, and the verdict."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def test_a_warm_round_counts_only_when_the_tokens_came_from_outside(scripts: Any) -> None:
    compare = scripts("compare")
    good = {"ms": [5.0, 4.0, 9.0], "cached": [990, 1000, 1000]}
    row = compare.warm_row(good, 1000)
    assert "invalid" not in row
    assert (row["p50"], row["min"], row["max"], row["samples"]) == (5.0, 4.0, 9.0, [5.0, 4.0, 9.0])
    cold = compare.warm_row({**good, "cached": [990, 0, 1000]}, 1000)
    assert cold["invalid"] == "only 1990 of 2850 tokens were found"


def test_every_mode_has_a_transfer_configuration(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = scripts("modes")
    monkeypatch.setattr(modes, "Child", lambda *_: None)
    names = {}
    for connector in ("none", "native", "native_fs", "lmcache", "lmcache_disk", "pegaflow"):
        host = modes.Host(
            modes.Mode(connector, connector, files=tmp_path / "files"), tmp_path, 2 << 30
        )
        transfer = host.transfer()
        names[connector] = None if transfer is None else transfer["kv_connector"]
        assert host.environment()["PYTHONHASHSEED"] == "0"
        host.close()
        assert not host.directory.exists()
    assert names == {
        "none": None,
        "native": "OffloadingConnector",
        "native_fs": "OffloadingConnector",
        "lmcache": "LMCacheConnectorV1",
        "lmcache_disk": "LMCacheConnectorV1",
        "pegaflow": "PegaKVConnector",
    }


def _result(warm: float, **more: Any) -> dict[str, Any]:
    def row(p50: float, own: float) -> dict[str, Any]:
        return {
            "warm_0": {"p50": p50},
            "warm_1": {"p50": 1.0, "invalid": "not reset"},
            "warm_2": {"p50": p50},
            "together_0": {"p50": 4 * p50},
            "own_hit": {"p50": own},
        }

    ttft = {"ours": row(warm, 40.0), "ours_pool": row(43.0, 40.0), "pegaflow": row(60.0, 41.0)}
    # It comes from host memory, whatever there is on the GPU afterwards.
    ttft["ours_pool"]["warm_0"] = {"p50": 90.0}
    return {"parts": {"ttft": ttft, **more}}


def test_the_verdict_uses_valid_rounds_alone(scripts: Any) -> None:
    verdict = scripts("verdict")
    rows = {what: (figure, within) for what, figure, _, within in verdict.rows(_result(54.0))}
    assert rows["warm TTFT, p50, over PegaFlow's"] == (0.9, True)
    assert rows["warm TTFT beyond its own GPU hit, ms"] == (14.0, True)
    assert rows["the same from the GPU pool, ms"] == (3.0, True)
    assert rows["cold TTFT, p50, cache on over off"] == (None, None)
    late = {what: within for what, _, _, within in verdict.rows(_result(66.0))}
    assert late["warm TTFT, p50, over PegaFlow's"] is False
    assert late["eight at once, total, over PegaFlow's"] is False


def test_the_verdict_knows_wrong_tokens_and_leaks(scripts: Any) -> None:
    verdict = scripts("verdict")
    correct = {
        "ours": {
            "tokens_loaded_equal_own_hit": True,
            "tokens_from_disk_equal_own_hit": False,
            "storm": {"compared": 9, "equal": 8},
            "leases_after_storm": 0,
        }
    }
    memory = {"ours_pool": {"after_daemon_mib": 500}}
    within = {
        what: verdict_
        for what, _, _, verdict_ in verdict.rows(_result(50.0, correct=correct, memory=memory))
    }
    assert within["tokens equal to a hit in the engine's cache"] is True
    assert within["the same from disk"] is False
    assert within["tokens of the storm right"] is False
    assert within["no lease left after the storm"] is True
    assert within["GPU memory zero after the end"] is False


def test_the_verdict_knows_bytes_that_a_storm_found_wrong(scripts: Any) -> None:
    verdict = scripts("verdict")

    def within(**account: Any) -> list[bool | None]:
        accounts = {"watch": {"copies": {}, "foreign": 0}, "checked": {"copies": {}, **account}}
        storm = {"usual": {"accounts": accounts}, "daemons": {}}
        rows = {what: one for what, _, _, one in verdict.rows(_result(50.0, storm=storm))}
        return [
            rows["every copy of the storms right"],
            rows["what was loaded in the storms was computed for its key"],
        ]

    assert within(copies={"store": 4, "examples": []}, foreign=0) == [True, True]
    assert within(copies={"store": 4, "store wrong": 1}, foreign=2) == [False, False]


def test_a_whole_comparison_with_stand_in_engines(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part writes what the verdict reads; daemons are real, engines are not."""
    compare, modes, correct = scripts("compare"), scripts("modes"), scripts("correct")
    monkeypatch.setattr(modes, "ENGINE", Path(__file__).with_name("fake_engine.py"))
    storm = scripts("storm")
    for module in (compare, correct, storm):
        monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    for module in (correct, storm):
        monkeypatch.setattr(module, "random_model", modes.write_config)
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        scratch = Path(name)
        out = scratch / "result.json"
        arguments = [
            *("--out", str(out), "--disk", str(scratch / "disk"), "--count", "3"),
            *("--part", "vllm", "--part", "correct", "--part", "storm"),
            *("--mode", "none", "--mode", "ours"),
            *("--turns", "2", "--tokens", "1000", "--pool-gib", "0.1", "--capacity", "64MiB"),
        ]
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        assert compare.main() == 0, capsys.readouterr()
        result = json.loads(out.read_text())
    parts = result["parts"]
    assert "failed" not in parts
    assert parts["ttft"]["ours"]["warm_0"]["p50"] == 5.0
    assert parts["ttft"]["none"]["warm_0"]["invalid"] == "only 0 of 2850 tokens were found"
    assert parts["ttft"]["ours"]["own_hit"]["p50"] == 4.0
    assert parts["cost"]["ours"]["itl_mean_ratio"] == 1.1
    # The stand-in of a new engine knows nothing: the row says so.
    assert "invalid" in parts["restart"]["ours"]["new_engine"]
    usual = parts["storm"]["usual"]
    # The stand-in answers every storm alike; one request more than none is finished by nobody.
    assert usual["pairs"]["none / ours"] == {"compared": 2, "equal": 2, "different": []}
    assert set(usual["runs"]) == {"none", "none, another order", "watch", "ours", "checked"}
    assert usual["leases"] == {"watch": 0, "ours": 0, "checked": 0}
    rows = {what: within for what, _, _, within in scripts("verdict").rows(result)}
    assert rows["warm TTFT beyond its own GPU hit, ms"] is True
    assert rows["inter-token latency, cache on over off"] is False
    assert rows["tokens equal to a hit in the engine's cache"] is True
    assert rows["tokens of the storm right"] is True
    assert rows["warm TTFT, p50, over PegaFlow's"] is None
