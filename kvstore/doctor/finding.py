"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level", "error", "ok", "warning"]


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # works; slower, or less safe, than it could
    ERROR = "error"  # does not work, or not as configured


@dataclass(frozen=True, slots=True)
class Finding:
    """One subject's state.

    Attributes:
        subject: what was looked at, a few words.
        level: how bad it is.
        text: what was seen; one line.
        advice: what to do; one line, empty when there is nothing to do.
    """

    subject: str
    level: Level
    text: str
    advice: str = ""


def ok(subject: str, text: str, advice: str = "") -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(subject, Level.OK, text, advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of something that works, but not well."""
    return Finding(subject, Level.WARNING, text, advice)


def error(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of something that does not work as configured."""
    return Finding(subject, Level.ERROR, text, advice)
