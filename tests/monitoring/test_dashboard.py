"""Dashboard and alerts ask for metrics that exist, and what is provisioned fits together."""

from __future__ import annotations

import ast
import json
import re
import urllib.request
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore

ROOT: Final = Path(__file__).parents[2]
MONITORING: Final = ROOT / "monitoring"
ALERTS: Final = (MONITORING / "alerts.yml").read_text()
DASHBOARD: Final = MONITORING / "grafana" / "dashboards" / "kvstore.json"
# Where counts are counted and names of calls are given.
_SOURCES: Final = ("kvstore/engine", "kvstore/server", "prefetch", "tiers", "index")
_METRIC: Final = re.compile(r"\bkvstore_\w+")
_LABEL: Final = re.compile(r"(?:by \(|\{\{)(\w+)")
# One rule: its name, and everything up to the next one.
_RULE: Final = re.compile(
    r"^      - alert: (\w+)\n(.*?)(?=^      - alert|\Z)", re.MULTILINE | re.DOTALL
)
_EXPRESSION: Final = re.compile(
    r"^        expr: (?:\|\n((?:          .*\n)+)|(.+)\n)", re.MULTILINE
)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [*panels, *(v["query"]["query"] for v in dashboard()["templating"]["list"])]


def rules() -> dict[str, tuple[str, str]]:
    """Alerts' expressions and texts by name. Read as text: no parser of theirs comes with tests."""
    found = {}
    for name, text in _RULE.findall(ALERTS):
        expression = _EXPRESSION.search(text)
        assert expression is not None, name
        found[name] = (expression[1] or expression[2], text)
    return found


def named() -> set[str]:
    asked = [*expressions(), *(expression for expression, _ in rules().values())]
    return {name for expression in asked for name in _METRIC.findall(expression)}


def _written() -> tuple[set[str], list[re.Pattern[str]]]:
    """Strings that the sources hold; of f-strings, patterns whose fields are tiers' names."""
    plain: set[str] = set()
    patterns: list[re.Pattern[str]] = []
    for directory in _SOURCES:
        for path in (ROOT / directory).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    plain.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [
                        re.escape(str(part.value))
                        if isinstance(part, ast.Constant)
                        else "(gpu|host|disk)"
                        for part in node.values
                    ]
                    # Not one that is all field: it would be a pattern of everything.
                    if len(parts) > 1:
                        patterns.append(re.compile("".join(parts)))
    return plain, patterns


@pytest.fixture
def scraped(start_daemon: Any, tmp_path: Path) -> set[str]:
    """Names that a daemon shows that stores, finds, misses and writes to disk."""
    options = ("--metrics", "127.0.0.1:0", "--disk", str(tmp_path / "disk"))
    daemon = start_daemon(*options, "--disk-capacity", "64MiB", "--disk-budget", "1GiB")
    spec = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(65536,))
    keys = kvstore.chain_keys(list(range(64)), 16)
    with kvstore.Client(daemon.address) as client:
        space = client.open_space(spec)
        assert space.put(keys, np.ones((4, 65536), np.uint8)) == 4
        assert space.lookup(keys).blocks == 4
        assert space.get(keys, np.empty((4, 65536), np.uint8)) == 4
        other = kvstore.chain_keys(list(range(1000, 1064)), 16)
        assert space.get(other, np.empty((4, 65536), np.uint8)) == 0
        assert client.flush(60).done
    port = re.search(r"status page and metrics: port (\d+)", daemon.log.read_text())
    assert port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_every_metric_exists(scraped: set[str]) -> None:
    """Shown by a daemon; or a count of what has not happened there, which its source names."""
    plain, patterns = _written()
    missing = []
    for metric in sorted(named() - scraped):
        counted = metric.removeprefix("kvstore_").removesuffix("_total")
        if metric in plain or (metric.endswith("_total") and counted in plain):
            continue
        if metric.endswith("_total") and any(p.fullmatch(counted) for p in patterns):
            continue
        missing.append(metric)
    assert missing == []
    # The net is not so wide that everything is in it.
    made_up = "evicted_blocks_moon"
    assert made_up not in plain
    assert not any(pattern.fullmatch(made_up) for pattern in patterns)
    # Nearly all of it was really seen.
    assert len(named() & scraped) > 0.7 * len(named())


def test_labels_exist() -> None:
    used = {label for expression in expressions() for label in _LABEL.findall(expression)}
    legends = {
        label
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        for label in _LABEL.findall(target["legendFormat"])
    }
    assert used | legends == {"tier", "reason", "call", "operation"}


def test_every_alert_is_explained_and_tried() -> None:
    """A page of its own words for each, and a story that sets it off."""
    found = rules()
    assert len(found) == ALERTS.count("- alert:") > 10
    guide = (ROOT / "docs" / "operations.md").read_text()
    tried = (MONITORING / "alerts_test.yml").read_text()
    for name, (expression, text) in found.items():
        assert expression.count("(") == expression.count(")"), name
        assert re.search(r"^          severity: (critical|warning|info)$", text, re.MULTILINE), name
        assert re.search(r'^          summary: ".+"$', text, re.MULTILINE), name
        assert f"\n### {name}\n" in guide, name
        # Once as a story of its own, once where all is well.
        assert tried.count(f"alertname: {name}\n") == 2, name
    assert re.findall(r"^### (Kvstore\w+)$", guide, re.MULTILINE) == list(found)
    assert "rule_files:\n  - alerts.yml\n" in (MONITORING / "prometheus.yml").read_text()


def test_panels_are_in_order() -> None:
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
    # One daemon or several: every series is one that the viewer chose.
    for panel in panels:
        for target in panel["targets"]:
            metrics = _METRIC.findall(target["expr"])
            assert target["expr"].count('{instance=~"$instance"') == len(metrics)


def test_what_grafana_makes_of_what_is_left_out() -> None:
    """Numbers without thresholds are red from 80 on; one with both ends given has no curve."""
    for panel in dashboard()["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] in ("stat", "bargauge"):
            assert defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
        if panel["type"] == "stat" and panel["options"]["graphMode"] != "none":
            assert not {"min", "max"} <= defaults.keys(), panel["title"]
        # An override of a series that has another name by now changes nothing, and says nothing.
        legends = {target["legendFormat"] for target in panel["targets"]}
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] == "byName"
            assert override["matcher"]["options"] in legends, panel["title"]


def test_what_is_provisioned_fits_together() -> None:
    """The files are read as text: no parser of theirs comes with the tests."""
    compose = (MONITORING / "docker-compose.yml").read_text()
    prometheus = (MONITORING / "prometheus.yml").read_text()
    source = (MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text()
    provider = (MONITORING / "grafana/provisioning/dashboards/kvstore.yml").read_text()
    uid = re.search(r"uid: (\S+)", source)
    assert uid is not None
    uids = {
        asked["datasource"]["uid"]
        for panel in dashboard()["panels"]
        for asked in (panel, *panel["targets"])
    }
    assert uids == {uid[1]}
    mounted = dict(re.findall(r"- (\./\S+?):(/\S+?):ro", compose))
    for here in mounted:
        assert (MONITORING / here).exists(), here
    path = re.search(r"path: (\S+)", provider)
    assert path is not None
    assert path[1] == mounted["./grafana/dashboards"]
    assert f"{path[1]}/{DASHBOARD.name}" in compose
    assert "url: http://127.0.0.1:9090" in source
    assert "--web.listen-address=127.0.0.1:9090" in compose
    # The address that the instructions name is the one that is scraped.
    for text in (prometheus, compose, (MONITORING / "README.md").read_text()):
        assert "127.0.0.1:9405" in text
    # Images are pinned.
    images = re.findall(r"image: (\S+)", compose)
    assert len(images) == 2
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)
