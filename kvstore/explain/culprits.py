"""What varies where prompts part: each function looks for one sort of thing."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.explain.entry import Candidate, Edit, Entry
from kvstore.explain.report import Kind

__all__ = ["KNOWN", "Culprit", "other_text"]

Culprit = Callable[[Sequence[Entry], int], Candidate | None]

# Characters that must be won: what could be a coincidence must win more.
_LEAST: Final = 16
_LEAST_UNSURE: Final = 64
_SAMPLE: Final = 24
# How far before and behind the place where prompts part a value may reach.
_REACH: Final = 80

_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY: Final = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
_TIME: Final = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_ZONE: Final = r"(?: ?(?:Z|UTC|GMT)\b| ?[+-]\d{2}:?\d{2}\b)?"
_CLOCK: Final = rf"(?:(?:,? (?:at )?|T){_TIME}{_ZONE})?"

_UUID: Final = r"\b[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}\b"
_TIMESTAMP: Final = (
    rf"\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}{_CLOCK}"
    rf"|\b\d{{1,2}}[./-]\d{{1,2}}[./-]\d{{4}}{_CLOCK}"
    rf"|(?:\b(?:{_DAY}),? )?(?:the )?\b(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?|"
    rf"\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}),? \d{{4}}{_CLOCK}"
    rf"|\b(?:{_DAY})(?:,? {_TIME}{_ZONE})?|\b{_TIME}{_ZONE}"
    r"|(?<![\d.])1[5-9]\d{8}(?:\d{3}|\.\d+)?(?![\d])"
)
# The value after a name that says what it is; a name without "id" must be followed by a digit.
_BETWEEN: Final = r"""[ \t:=#"'(\[]"""
_USER: Final = (
    r"(?i)\b(?:user|customer|account|client|member|session|conversation|chat|thread|request"
    r"|trace|tenant|org|organization|employee|patient|order|ticket)"
    rf"(?:[ _-]?(?:id|name|number|no)\b{_BETWEEN}{{0,4}}([\w.@+-]+\w)"
    rf"|{_BETWEEN}{{1,4}}((?=[\w.@+-]*\d)[\w.@+-]+\w)|[_-]((?=[\w-]*\d)[\w-]+))"
    rf"|\b(?:uid|sid)\b{_BETWEEN}{{0,4}}([\w.@+-]+\w)|([\w.+-]+@[\w-]+\.[\w.-]+\w)"
)
_RANDOM: Final = r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}\b|\b\d{8,}\b"
_NUMBER: Final = r"\b\d+(?:[.,]\d+)*\b"
_PATTERNS: Final[tuple[tuple[Kind, str, int], ...]] = (
    (Kind.UUID, _UUID, _LEAST),
    (Kind.TIMESTAMP, _TIMESTAMP, _LEAST),
    (Kind.USER_ID, _USER, _LEAST),
    (Kind.RANDOM_ID, _RANDOM, _LEAST),
    (Kind.NUMBER, _NUMBER, _LEAST_UNSURE),
)


def _sample(entries: Sequence[Entry]) -> Sequence[Entry]:
    return entries[:: max(1, len(entries) // _SAMPLE)][:_SAMPLE]


def _pattern(kind: Kind, text: str, least: int) -> Culprit:
    pattern = re.compile(text)

    def span(entry: Entry, at: int) -> tuple[int, int] | None:
        """Return the value that the place where prompts part is in, or at whose end it is."""
        for match in pattern.finditer(entry.text, max(0, at - _REACH), at + _REACH):
            group = match.lastindex or 0
            start, end = match.span(group)
            if start > at:
                return None
            if end >= at and end > start and end <= entry.body:
                return start, end
        return None

    def look(entries: Sequence[Entry], at: int) -> Candidate | None:
        if sum(span(entry, at) is not None for entry in _sample(entries)) < 2:
            return None
        spans = [(entry, found) for entry in entries if (found := span(entry, at)) is not None]
        # What is before the place is the same for all, so most begin at the same place.
        start = Counter(found[0] for _, found in spans).most_common(1)[0][0]
        edits = [Edit(entry, *found) for entry, found in spans if found[0] == start]
        if len({edit.value for edit in edits}) < 2:
            return None
        return Candidate(kind, edits, [], least)

    return look


_SPACE: Final = re.compile(r"\s*")


def whitespace(entries: Sequence[Entry], at: int) -> Candidate | None:
    """Look for prompts that differ in white space only, for a while."""
    start = at
    text = entries[0].text
    while start and text[start - 1].isspace():
        start -= 1
    edits = []
    for entry in entries:
        match = _SPACE.match(entry.text, start)
        edits.append(Edit(entry, start, match.end() if match else start))
    runs = Counter(edit.value for edit in edits)
    if len(runs) < 2:
        return None
    common = runs.most_common(1)[0][0]
    seen = [edit for edit in edits if edit.value == common]
    heads = {edit.entry.text[edit.end : edit.end + _LEAST] for edit in seen}
    changed = [
        Edit(edit.entry, start, edit.end, common)
        for edit in edits
        if edit.value != common and edit.entry.text[edit.end : edit.end + _LEAST] in heads
    ]
    return Candidate(Kind.WHITESPACE, changed, seen, _LEAST) if changed else None


_DECODER: Final = json.JSONDecoder()
_BRACKETS_TRIED: Final = 64
_JSON_REACH: Final = 65_536


def _decoded(text: str, at: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any, *, items: bool) -> str:
    """Return JSON that does not depend on the order of keys, or of a list's items either."""
    if items and isinstance(value, list):
        return json.dumps(sorted(_canonical(item, items=False) for item in value))
    return json.dumps(value, sort_keys=True)


def reordered(entries: Sequence[Entry], at: int) -> Candidate | None:
    """Look for JSON that says the same in another order, or with other spaces."""
    text = entries[0].text
    low = max(0, at - _JSON_REACH)
    if text.rfind('"', low, at + 1) < 0:
        return None
    start = at
    for _ in range(_BRACKETS_TRIED):
        start = max(text.rfind("{", low, start), text.rfind("[", low, start))
        if start < 0:
            return None
        found = _decoded(text, start)
        if found is None or found[1] <= at:
            continue
        for items in (False, True):
            candidate = _same_json(entries, start, items=items)
            if candidate is not None:
                return candidate
    return None


def _same_json(entries: Sequence[Entry], start: int, *, items: bool) -> Candidate | None:
    if items and entries[0].text[start] != "[":
        return None
    sample = _json_at(_sample(entries), start, items=items)
    if len(sample) < 2 or len({said for said, _ in sample}) == len(sample):
        return None
    if len(sample) == len(_sample(entries)) and len({e.value for _, e in sample}) == 1:
        return None
    by_meaning: dict[str, list[Edit]] = {}
    for said, edit in _json_at(entries, start, items=items):
        by_meaning.setdefault(said, []).append(edit)
    edits: list[Edit] = []
    seen: list[Edit] = []
    for same in by_meaning.values():
        forms = Counter(edit.value for edit in same)
        if len(forms) < 2:
            continue
        common = forms.most_common(1)[0][0]
        seen += [edit for edit in same if edit.value == common]
        changed = [edit for edit in same if edit.value != common]
        edits += [Edit(e.entry, e.start, e.end, common) for e in changed]
    if not edits:
        return None
    if items:
        return Candidate(Kind.JSON_ITEMS, edits, seen, _LEAST)
    spaces = all(_squeezed(e.value) == _squeezed(e.instead or "") for e in edits)
    return Candidate(Kind.WHITESPACE if spaces else Kind.JSON_KEYS, edits, seen, _LEAST)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _json_at(entries: Sequence[Entry], start: int, *, items: bool) -> list[tuple[str, Edit]]:
    found = []
    for entry in entries:
        decoded = _decoded(entry.text, start)
        if decoded is not None and decoded[1] <= entry.body:
            edit = Edit(entry, start, decoded[1])
            found.append((_canonical(decoded[0], items=items), edit))
    return found


_ANCHOR: Final = 48
_ANCHOR_STEP: Final = 16
_ANCHORS_TRIED: Final = 64
_TEXT_REACH: Final = 8192
_TEXT_PROMPTS: Final = 4


def other_text(entries: Sequence[Entry], at: int) -> Candidate | None:
    """Look for any text that varies before text that is the same again."""
    if len(entries) < _TEXT_PROMPTS:
        return None
    one = entries[0]
    other = next((e for e in entries if e.text[at : at + 1] != one.text[at : at + 1]), None)
    if other is None:
        return None
    anchor = _anchor(one, other, at)
    if anchor is None:
        return None
    start = at
    while start and one.text[start - 1].isalnum():
        start -= 1
    edits = []
    for entry in entries:
        end = entry.text.find(anchor, at, min(at + _TEXT_REACH, entry.body))
        if end >= 0:
            edits.append(Edit(entry, start, end))
    if len(edits) < 2 or len({edit.value for edit in edits}) < 2:
        return None
    return Candidate(Kind.TEXT, edits, [], _LEAST_UNSURE)


def _anchor(one: Entry, other: Entry, at: int) -> str | None:
    """Return the first text behind the place that both have."""
    for probe in range(at, at + _ANCHORS_TRIED * _ANCHOR_STEP, _ANCHOR_STEP):
        text = one.text[probe : min(probe + _ANCHOR, one.body)]
        if len(text) < _ANCHOR:
            return None
        there = other.text.find(text, at, min(at + _TEXT_REACH, other.body))
        if there < 0:
            continue
        here = probe
        while here > at and there > at and one.text[here - 1] == other.text[there - 1]:
            here -= 1
            there -= 1
        return one.text[here : here + _ANCHOR]
    return None


# Surest first: a UUID is a random id, and a number, too.
KNOWN: Final[tuple[Culprit, ...]] = (
    whitespace,
    reordered,
    *(_pattern(*pattern) for pattern in _PATTERNS),
)
