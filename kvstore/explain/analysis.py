"""The walk down the prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.explain.culprits import KNOWN, Culprit, other_text
from kvstore.explain.entry import Candidate, Edit, Entry
from kvstore.explain.prompts import Prompt
from kvstore.explain.report import Finding, Group, Kind, Report, Variant
from kvstore.explain.tokens import CHARS_PER_TOKEN
from kvstore.explain.tree import common_prefix, tree_size

__all__ = ["analyse"]

_CONTEXT: Final = 40
_VARIANT: Final = 60
_VARIANTS: Final = 3
_PREFIX: Final = 80
# A prefix shorter than this makes no group: it is how sentences begin.
_GROUP_CHARS: Final = 64
# Things taken out of the way at one place, at most.
_ROUNDS: Final = 32


def analyse(prompts: Sequence[Prompt], chars_per_token: float = CHARS_PER_TOKEN) -> Report:
    """Say where prompts part, and what would be won if they did not.

    Args:
        prompts: to be looked at.
        chars_per_token: turns characters into tokens.
    """
    walk = _Walk()
    entries = walk.distinct(prompts)
    before = tree_size(entry.text for entry in entries)
    walk.run(entries, KNOWN)
    # Last, and from the root again: any text explains what something better known does, too.
    walk.run(entries, [other_text])
    after = tree_size(entry.text for entry in entries)
    return Report(
        prompts=len(prompts),
        chars=sum(len(prompt.text) for prompt in prompts),
        chars_per_token=chars_per_token,
        computed_chars=before,
        computed_chars_after=min(before, after),
        findings=tuple(sorted(_merged(walk.findings), key=lambda f: -f.chars_won)),
        groups=tuple(sorted(walk.groups, key=lambda g: -g.prompts * max(1, g.shared_chars))),
    )


class _Walk:
    """One analysis.

    Attributes:
        findings: what varies, in the order it was met.
        groups: prompts with a prefix in common.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.groups: list[Group] = []

    def distinct(self, prompts: Sequence[Prompt]) -> list[Entry]:
        """Return the prompts that are no prefix of another one: those cost nothing."""
        entries: list[Entry] = []
        ends: list[Edit] = []
        longer: Entry | None = None
        for prompt in sorted(prompts, key=lambda p: p.text, reverse=True):
            if longer is not None and longer.text.startswith(prompt.text):
                longer.weight += 1
                rest = longer.text[len(prompt.text) :]
                if rest and rest.isspace():
                    ends.append(Edit(longer, len(prompt.text), len(longer.text), ""))
                continue
            longer = Entry(prompt, prompt.text, len(prompt.text))
            entries.append(longer)
        if ends:
            self.findings.append(
                _finding(Candidate(Kind.WHITESPACE, ends, [], 0), ends[0].start, 0)
            )
        return entries[::-1]

    def run(self, entries: Sequence[Entry], culprits: Sequence[Culprit]) -> None:
        """Walk from the root, looking for some culprits; the first walk tells the groups."""
        grouped = bool(self.groups)
        stack: list[tuple[list[Entry], int, bool]] = [(list(entries), 0, grouped)]
        while stack:
            here, known, grouped = stack.pop()
            if len(here) < 2:
                continue
            at, grouped = self._clear(here, known, grouped, culprits)
            branches: dict[str, list[Entry]] = {}
            for entry in here:
                branches.setdefault(entry.text[at : at + 1], []).append(entry)
            if len(branches) > 1:
                stack += [(branch, at, grouped) for branch in branches.values()]

    def _clear(
        self, entries: list[Entry], known: int, grouped: bool, culprits: Sequence[Culprit]
    ) -> tuple[int, bool]:
        """Take out of the way what varies before text that does not.

        Returns:
            Where the prompts part for good, and whether they are in a group by now.
        """
        for _ in range(_ROUNDS):
            texts = [entry.text for entry in entries]
            first, last = min(texts), max(texts)
            at = common_prefix(first, last, known)
            if first == last:
                return at, grouped
            found = self._find(entries, texts, at, culprits)
            if not grouped and (found is not None or at >= _GROUP_CHARS):
                kind = Kind.CONTENT if found is None else found[0].kind
                self.groups.append(_group(entries, at, kind))
                grouped = True
            if found is None:
                return at, grouped
            candidate, won = found
            self.findings.append(_finding(candidate, at, won))
            for edit in candidate.edits:
                edit.entry.apply(edit)
                known = min(known, edit.start)
        return at, grouped

    @staticmethod
    def _find(
        entries: Sequence[Entry], texts: Sequence[str], at: int, culprits: Sequence[Culprit]
    ) -> tuple[Candidate, int] | None:
        """Return the first culprit that makes the tree smaller, and by how much."""
        size = None
        for look in culprits:
            candidate = look(entries, at)
            if candidate is None:
                continue
            if size is None:
                size = tree_size(texts)
            edits = {edit.entry: edit for edit in candidate.edits}
            after = tree_size(
                entry.edited(edits[entry]) if entry in edits else entry.text for entry in entries
            )
            if size - after >= candidate.least:
                return candidate, size - after
        return None


def _cut(text: str) -> str:
    return text if len(text) <= _VARIANT else f"{text[: _VARIANT - 1]}…"


def _finding(candidate: Candidate, at: int, won: int) -> Finding:
    shown: dict[str, Edit] = {}
    for edit in (*candidate.edits[:1], *candidate.seen[:1], *candidate.edits):
        if len(shown) < _VARIANTS:
            shown.setdefault(edit.value, edit)
    edit = candidate.edits[0]
    entry, prompt = edit.entry, edit.entry.prompt
    start = entry.original(edit.start)
    end = start + edit.end - edit.start
    return Finding(
        kind=candidate.kind,
        prompts=sum(e.entry.weight for e in candidate.edits),
        line=prompt.line,
        start=prompt.place(start),
        end=end,
        diverges=prompt.place(max(start, min(end, entry.original(at)))),
        before=prompt.text[max(0, start - _CONTEXT) : start],
        after=prompt.text[end : end + _CONTEXT],
        variants=tuple(Variant(e.entry.prompt.line, _cut(e.value)) for e in shown.values()),
        chars_won=won,
    )


def _group(entries: Sequence[Entry], at: int, kind: Kind) -> Group:
    shown: dict[str, Entry] = {}
    for entry in entries:
        if len(shown) < _VARIANTS:
            shown.setdefault(entry.text[at : at + 1], entry)
    first = entries[0]
    place = first.original(at)
    return Group(
        prompts=sum(entry.weight for entry in entries),
        shared_chars=at,
        prefix=first.prompt.text[: min(at, _PREFIX)],
        kind=kind,
        diverges=first.prompt.place(place),
        before=first.prompt.text[max(0, place - _CONTEXT) : place],
        variants=tuple(
            Variant(e.prompt.line, _cut(e.text[at : at + _CONTEXT])) for e in shown.values()
        ),
    )


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Put together what is the same thing in several branches."""
    kept: dict[tuple[Kind, str, str], Finding] = {}
    for finding in sorted(findings, key=lambda f: -f.chars_won):
        key = (finding.kind, finding.start.field, finding.before)
        have = kept.get(key)
        if have is None:
            kept[key] = finding
            continue
        kept[key] = Finding(
            kind=have.kind,
            prompts=have.prompts + finding.prompts,
            line=have.line,
            start=have.start,
            end=have.end,
            diverges=have.diverges,
            before=have.before,
            after=have.after,
            variants=have.variants,
            chars_won=have.chars_won + finding.chars_won,
        )
    return list(kept.values())
