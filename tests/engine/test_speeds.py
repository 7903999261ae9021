"""What is remembered about speeds: by size, for as long as its record is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.engine.speeds import Speeds, _check
from kvstore.rates import Rates

SPACE, STORE = bytes(range(32)), bytes(16)


def test_the_nearest_class_answers_and_of_two_the_larger() -> None:
    rates = Rates()
    assert rates.rate(1000) == 0.0
    rates.note(1 << 6, 10.0)
    rates.note(1 << 10, 1000.0)
    assert rates.rate(1 << 8) == 1000.0
    assert rates.rate(1 << 7) == rates.rate(0) == 10.0
    assert rates.rate(1 << 14) == 1000.0
    assert rates.rate(1 << 14, within=3) == 0.0
    rates.note(1 << 10, 2000.0)
    assert 1000.0 < rates.rate(1 << 10) < 2000.0
    with pytest.raises(ValueError, match="no rate"):
        Rates({6: -1.0})


def saved(path: Path) -> bytes:
    speeds = Speeds(path)
    speeds.computed(SPACE, 1000, 500.0)
    speeds.read_from(STORE, 2e9, 1e-3)
    line = speeds.line()
    assert line is not None
    speeds.write(line)
    assert speeds.line() is None
    return line


def test_speeds_outlive_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "speeds"
    saved(path)
    speeds = Speeds(path)
    assert speeds.prefill(SPACE, 1000) == 500.0
    assert speeds.prefill(bytes(32), 1000) == 0.0
    assert speeds.disk(STORE) == (2e9, 1e-3)
    assert speeds.disk(bytes([1] * 16)) is None


def test_whatever_is_wrong_with_the_record_it_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "speeds"
    line = saved(path)
    damaged = [line[:at] + bytes([line[at] ^ 4]) + line[at + 1 :] for at in range(len(line))]
    for data in [
        *damaged,
        b"",
        b"[]",
        b"{}",
        b"7",
        line[:-1],
        b"\xff",
        line.replace(b"1", b"2", 1),
    ]:
        path.write_bytes(data)
        speeds = Speeds(path)
        assert (speeds.prefill(SPACE, 1000), speeds.disk(STORE)) in (
            (0.0, None),
            (500.0, (2e9, 1e-3)),
        )
    path.unlink()
    path.mkdir()
    assert Speeds(path).disk(STORE) is None


def test_spaces_reported_last_are_remembered(tmp_path: Path) -> None:
    speeds = Speeds(tmp_path / "speeds")
    for number in range(1001):
        speeds.computed(number.to_bytes(32, "big"), 1000, 7.0)
        speeds.computed(bytes(32), 1000, 7.0)
    assert speeds.prefill((1).to_bytes(32, "big"), 1000) == 0.0
    assert (
        speeds.prefill(bytes(32), 1000) == speeds.prefill((1000).to_bytes(32, "big"), 1000) == 7.0
    )


@pytest.mark.parametrize("kind", ["fifo", "endless", "huge", "nested", "big numbers", "directory"])
def test_whatever_is_there_instead_a_start_goes_on(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "speeds"
    for odd in (path, path.with_name("speeds.new")):
        match kind:
            case "fifo":
                os.mkfifo(odd)
            case "endless":
                odd.symlink_to("/dev/zero")
            case "huge":
                with odd.open("wb") as file:
                    file.truncate(1 << 30)
            case "nested":
                odd.write_bytes(b"[" * 1_000_000)
            case "big numbers":
                line = {"version": 1, "prefill": {bytes(32).hex(): {"3": 10**400}}, "disk": {}}
                odd.write_text(json.dumps(line | {"check": _check(line)}))
            case "directory":
                odd.mkdir()
    speeds = Speeds(path)
    assert speeds.prefill(bytes(32), 8) == 0.0
    if kind == "directory":
        speeds.read_from(STORE, 2e9, 1e-3)
        line_to_write = speeds.line()
        assert line_to_write is not None
        with pytest.raises(OSError, match="speeds"):
            speeds.write(line_to_write)
    else:
        saved(path)
        assert path.is_file()
        assert not path.is_symlink()
        assert Speeds(path).disk(STORE) == (2e9, 1e-3)
