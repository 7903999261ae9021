"""A prompt under analysis: what is left of it once what varied is out of the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.explain.prompts import Prompt
from kvstore.explain.report import Kind

__all__ = ["Candidate", "Edit", "Entry"]


@dataclass(eq=False, slots=True)
class Entry:
    """One prompt.

    Attributes:
        prompt: as it was given.
        text: with edits applied.
        body: length of the part of `text` that is not something moved to its end.
        weight: prompts that it stands for.
        shifts: (place in `text`, characters of the prompt that are missing before it).
    """

    prompt: Prompt
    text: str
    body: int
    weight: int = 1
    shifts: list[tuple[int, int]] = field(default_factory=list)

    def original(self, at: int) -> int:
        """Return the place in the prompt of a place in `text`."""
        moved = at + sum(missing for place, missing in self.shifts if place <= at)
        return min(max(moved, 0), len(self.prompt.text))

    def edited(self, edit: Edit) -> str:
        """Return the text with an edit applied."""
        if edit.instead is None:
            return (
                self.text[: edit.start] + self.text[edit.end :] + self.text[edit.start : edit.end]
            )
        return self.text[: edit.start] + edit.instead + self.text[edit.end :]

    def apply(self, edit: Edit) -> None:
        """Apply an edit."""
        self.text = self.edited(edit)
        kept = len(edit.instead or "")
        missing = edit.end - edit.start - kept
        self.body -= missing
        place = edit.start + kept
        self.shifts = [(p - missing if p >= edit.end else p, m) for p, m in self.shifts]
        self.shifts.append((place, missing))


@dataclass(frozen=True, slots=True)
class Edit:
    """What takes a culprit out of one prompt's way.

    Attributes:
        entry: the prompt.
        start: where what varies begins in its text.
        end: where it ends.
        instead: what to write there; None: move it to the end.
    """

    entry: Entry
    start: int
    end: int
    instead: str | None = None

    @property
    def value(self) -> str:
        """What varies."""
        return self.entry.text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may be why prompts part.

    Attributes:
        kind: what it looks like.
        edits: what takes it out of the way, at the same place of some prompts.
        seen: the same places of the prompts that are as they should be.
        least: characters that must be won for it to count.
    """

    kind: Kind
    edits: list[Edit]
    seen: list[Edit]
    least: int
