"""The soak's verdicts on series that are known to be good or bad, and a few seconds of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import soak
from soak_load import COUNTS, content, keys_of, open_counts, total
from soak_report import verdicts, write_report
from soak_sampler import Sample

from kvstore.index.ghosts import GhostList

ROOT = Path(__file__).resolve().parents[2]


def sample(second: int) -> Sample:
    """Return a second of a daemon that is well: it warmed up, and does not grow."""
    warm = min(1.0, (second + 1) / 20)
    return Sample(
        seconds=second + 1.0,
        rss_mib=40 + 20 * warm + second % 3,
        shared_mib=256 * warm,
        pss_mib=80 * warm,
        descriptors=int(30 + 10 * warm) + second % 2,
        threads=22,
        leases=second % 7,
        grants=second % 3,
        stuck_slots=4 * (second % 11 == 0),
        host_mib=250 * warm,
        disk_mib=1000 * warm,
        put_mib_s=60.0 + second % 5,
        got_mib_s=80.0 - second % 4,
        health_ms=20.0 + second % 9,
    )


GOOD = [sample(second) for second in range(90)]


def bad(samples: list[Sample]) -> list[str]:
    """Return what is wrong with them."""
    return [verdict.what for verdict in verdicts(samples) if not verdict.good]


def test_what_warms_up_and_stays_is_good() -> None:
    assert bad(GOOD) == []


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("rss_mib", 0.5),
        ("shared_mib", 1.2),
        ("descriptors", 0.5),
        ("threads", 0.2),
        ("leases", 1.0),
        ("grants", 1.0),
        ("stuck_slots", 6.0),
    ],
)
def test_what_grows_second_by_second_is_not(name: str, growth: float) -> None:
    leaking = [
        replace(s, **{name: getattr(s, name) + type(getattr(s, name))(growth * i)})
        for i, s in enumerate(GOOD)
    ]
    assert bad(leaking) == [f"{name.removesuffix('_mib')} flat after warm-up"]


def test_what_gets_slower_or_answers_late_is_not() -> None:
    slower = [replace(s, put_mib_s=s.put_mib_s * 0.99**i) for i, s in enumerate(GOOD)]
    slower = [replace(s, got_mib_s=s.got_mib_s * 0.97**i) for i, s in enumerate(slower)]
    assert bad(slower) == ["throughput flat after warm-up"]
    assert bad([replace(s, put_mib_s=0.0, got_mib_s=0.0) for s in GOOD]) == [
        "throughput flat after warm-up"
    ]
    late = [*GOOD[:-1], replace(GOOD[-1], health_ms=1500.0)]
    assert bad(late) == ["health always answered within a second"]


def test_the_report_is_one_page_with_a_picture(tmp_path: Path) -> None:
    judged = verdicts([*GOOD[:-1], replace(GOOD[-1], health_ms=1500.0)])
    page = write_report(tmp_path, "make soak", GOOD, judged, [("time", "90 s")]).read_text()
    assert "Verdict: **NOT good**" in page
    assert "| health always answered within a second | **NO** |" in page
    assert "![what the daemon took and held, second by second](soak.png)" in page
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "samples.csv").read_text().splitlines()
    assert len(lines) == 1 + len(GOOD)
    assert lines[0].split(",") == Sample.names()


def test_counts_of_processes_add_up_in_a_file(tmp_path: Path) -> None:
    here = open_counts(tmp_path / "counts", 2)
    there = open_counts(tmp_path / "counts", 2)
    here[0][COUNTS.index("puts")] += 3
    there[1][COUNTS.index("puts")] += 4
    assert total(here)["puts"] == total(there)["puts"] == 7


def test_as_many_keys_as_the_daemon_remembers_are_evicted_first() -> None:
    default = inspect.signature(GhostList).parameters["capacity"].default
    assert default == soak.REMEMBERED_KEYS


def test_blocks_of_different_keys_differ_in_every_page() -> None:
    one, other = (content(key, 64 << 10) for key in keys_of(0, 1)[:2])
    pages = (one != other).reshape(-1, 4096)
    assert pages.any(axis=1).all()


def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    """Too short to judge growth or speed on any machine: the rest must hold."""
    command = [sys.executable, str(ROOT / "tests" / "soak" / "soak.py"), "--minutes", "0.1"]
    command += ["--out", str(tmp_path), "--processes", "2", "--no-oracle", "--cold"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    page = (tmp_path / "report.md").read_text()
    for claim in (
        "nothing is held once all clients are dead",
        "0 wrong bytes",
        "no client met an unexpected error",
        "stopped in order, no error in its log",
    ):
        assert f"| {claim} | yes |" in page, ended.stdout + ended.stderr
    assert ended.returncode == ("**NO**" in page)
    assert len((tmp_path / "samples.csv").read_text().splitlines()) > 3
    assert not list(tmp_path.glob("soak-*")), "scratch is left behind"
