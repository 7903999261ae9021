"""Sizes and durations as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.units import format_seconds, format_uptime, parse_seconds

_WORDS = {"µs": "us", "min": "m"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.000056, "56 µs"),
        (0.0034, "3.4 ms"),
        (0.9999, "1 s"),
        (1.25, "1.25 s"),
        (59.94, "59.9 s"),
        (59.98, "1 min"),
        (90, "1.5 min"),
        (3599, "1 h"),
        (5400, "1.5 h"),
        (86_390, "1 d"),
        (36 * 3600, "1.5 d"),
        (365 * 86400, "365 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 3e9))
def test_a_duration_is_short_and_means_what_it_was_made_from(seconds: float) -> None:
    text = format_seconds(seconds)
    number, unit = text.split()
    assert len(text) <= 8
    assert "e" not in number
    assert parse_seconds(f"{number}{_WORDS.get(unit, unit)}") == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3725, "1 h 2 min"),
        (86400 * 400 + 3600, "400 d 1 h"),
    ],
)
def test_uptimes(seconds: float, text: str) -> None:
    assert format_uptime(seconds) == text
