"""What an analysis says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvstore.explain.prompts import Place

__all__ = ["Finding", "Group", "Kind", "Report", "Variant"]


class Kind(StrEnum):
    """What makes prompts part."""

    TIMESTAMP = "timestamp"
    UUID = "uuid"
    USER_ID = "user_id"
    RANDOM_ID = "random_id"
    NUMBER = "number"
    JSON_KEYS = "json_keys"
    JSON_ITEMS = "json_items"
    WHITESPACE = "whitespace"
    TEXT = "text"
    CONTENT = "content"


ADVICE: Final = {
    Kind.TIMESTAMP: "put the time behind what does not change, or round it to the day",
    Kind.UUID: "leave it out, or put it behind what does not change",
    Kind.USER_ID: "put it behind what is the same for all users",
    Kind.RANDOM_ID: "leave it out, or put it behind what does not change",
    Kind.NUMBER: "put it behind what does not change",
    Kind.JSON_KEYS: "write JSON with sorted keys",
    Kind.JSON_ITEMS: "write the list (tools, documents) in one order, such as by name",
    Kind.WHITESPACE: "strip it, or make all prompts from one template",
    Kind.TEXT: "put what varies behind what follows it",
    Kind.CONTENT: "nothing to move: what follows differs, too",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What one prompt has where others have something else.

    Attributes:
        line: of the prompt in the file.
        text: what it has there.
    """

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that varies, before text that does not.

    Attributes:
        kind: what it looks like.
        prompts: how many prompts have it there.
        line: the prompt that `start`, `end` and `diverges` are about: the first variant's.
        start: where what varies begins.
        end: where it ends, in characters from the beginning.
        diverges: the first character that differs.
        before: text before it.
        after: text behind it.
        variants: what some prompts have there.
        chars_won: characters that need not be computed without it.
    """

    kind: Kind
    prompts: int
    line: int
    start: Place
    end: int
    diverges: Place
    before: str
    after: str
    variants: tuple[Variant, ...]
    chars_won: int

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts with a prefix in common.

    Attributes:
        prompts: how many.
        shared_chars: length of the prefix.
        prefix: how it begins.
        kind: what ends it.
        diverges: where it ends.
        before: text before that.
        variants: how some of them go on.
    """

    prompts: int
    shared_chars: int
    prefix: str
    kind: Kind
    diverges: Place
    before: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer.

    Attributes:
        prompts: how many were read.
        chars: their length.
        chars_per_token: what turns characters into tokens.
        computed_chars: what a perfect prefix cache computes of them now.
        computed_chars_after: what it would compute with all findings out of the way.
        findings: most won first.
        groups: largest first.
    """

    prompts: int
    chars: int
    chars_per_token: float
    computed_chars: int
    computed_chars_after: int
    findings: tuple[Finding, ...]
    groups: tuple[Group, ...]

    def tokens(self, chars: int) -> int:
        """Return how many tokens so many characters are."""
        return round(chars / self.chars_per_token)

    def reused_percent(self, computed_chars: int) -> float:
        """Return the part of the prompts that is not computed."""
        return 100 * (1 - computed_chars / self.chars) if self.chars else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as documented in docs/explain.md."""
        return {
            "prompts": self.prompts,
            "chars": self.chars,
            "tokens": self.tokens(self.chars),
            "chars_per_token": self.chars_per_token,
            "reused_percent": self.reused_percent(self.computed_chars),
            "reused_percent_after": self.reused_percent(self.computed_chars_after),
            "computed_tokens": self.tokens(self.computed_chars),
            "computed_tokens_after": self.tokens(self.computed_chars_after),
            "findings": [
                {
                    "kind": f.kind.value,
                    "prompts": f.prompts,
                    "tokens_won": self.tokens(f.chars_won),
                    "chars_won": f.chars_won,
                    "line": f.line,
                    "start": f.start.offset,
                    "end": f.end,
                    "field": f.start.field,
                    "field_start": f.start.field_offset,
                    "diverges": f.diverges.offset,
                    "before": f.before,
                    "after": f.after,
                    "variants": [{"line": v.line, "text": v.text} for v in f.variants],
                    "advice": f.advice,
                }
                for f in self.findings
            ],
            "groups": [
                {
                    "prompts": g.prompts,
                    "shared_tokens": self.tokens(g.shared_chars),
                    "shared_chars": g.shared_chars,
                    "prefix": g.prefix,
                    "ends_by": g.kind.value,
                    "field": g.diverges.field,
                    "field_offset": g.diverges.field_offset,
                    "before": g.before,
                    "variants": [{"line": v.line, "text": v.text} for v in g.variants],
                }
                for g in self.groups
            ],
        }
