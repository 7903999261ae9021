"""What varies is found, where it is, and what it costs: planted, then looked for."""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.explain import Finding, Kind, Report, analyse, read_prompts
from kvstore.explain.tree import common_prefix, tree_size

HEAD = "You are a careful assistant of the Example company. Cite the documents you were given. "
RULES = "Be polite. Use metric units. Name the document of each claim, and never make up facts. "
WORDS = ["how", "what", "pumps", "valves", "boiler", "heat", "water", "steam", "fix", "mount"]


def question(rng: random.Random) -> str:
    return "Question: " + " ".join(rng.choice(WORDS) for _ in range(20))


def of(tmp_path: Path, lines: list[Any]) -> Report:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return analyse(read_prompts(path))


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def moment(rng: random.Random) -> str:
    return (
        f"2026-11-{rng.randint(10, 29)}T{rng.randint(10, 23)}:{rng.randint(10, 59)}:"
        f"{rng.randint(10, 59)}Z"
    )


VALUES: dict[str, tuple[Kind, Callable[[random.Random], str]]] = {
    "iso": (Kind.TIMESTAMP, moment),
    "clock": (Kind.TIMESTAMP, lambda r: f"{r.randint(10, 23)}:{r.randint(10, 59)}"),
    "words": (
        Kind.TIMESTAMP,
        lambda r: f"Monday, November {r.randint(10, 29)}, 2026 at 9:{r.randint(10, 59)} AM",
    ),
    "unix": (Kind.TIMESTAMP, lambda r: str(r.randint(1_700_000_000, 1_799_999_999))),
    "uuid": (Kind.UUID, lambda r: str(uuid.UUID(int=r.getrandbits(128)))),
    "user": (Kind.USER_ID, lambda r: f"{r.randint(10_000, 99_999)}"),
    "mail": (Kind.USER_ID, lambda r: f"{r.choice('abcdefgh')}{r.randint(10, 99)}@example.org"),
    "nonce": (Kind.RANDOM_ID, lambda r: "".join(r.choice("0123456789abcdef") for _ in range(20))),
}
BEFORE = {"user": "The user id: ", "mail": "Talk to "}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("first", [True, False])
def test_a_planted_value_is_found_where_it_is(tmp_path: Path, name: str, first: bool) -> None:
    kind, value = VALUES[name]
    rng = random.Random(name)
    lead = BEFORE.get(name, "At hand: ")
    lead = BEFORE.get(name, "") if first else HEAD + lead
    values = [value(rng) for _ in range(40)]
    lines = [{"prompt": f"{lead}{v} and {RULES}{question(rng)}"} for v in values]
    report = of(tmp_path, lines)
    finding = only(report)
    assert finding.kind is kind
    assert finding.prompts == 40
    mine = lines[finding.line - 1]["prompt"]
    assert (finding.start.offset, finding.start.field) == (len(lead), "prompt")
    assert mine[finding.start.offset : finding.end] == values[finding.line - 1]
    assert finding.variants[0].text == values[finding.line - 1]
    assert finding.before == lead[-40:]
    assert mine[finding.end :].startswith(finding.after)
    shared = common_prefix(min(line["prompt"] for line in lines), max(v["prompt"] for v in lines))
    assert finding.diverges.offset == shared
    # All that follows is shared once it is at the end.
    moved = [f"{lead} and {RULES}{p.partition(RULES)[2]}{v}" for v, p in _pairs(values, lines)]
    assert finding.chars_won == tree_size(p for _, p in _pairs(values, lines)) - tree_size(moved)
    assert finding.chars_won > 35 * len(RULES)
    assert report.computed_chars - report.computed_chars_after == finding.chars_won


def _pairs(values: list[str], lines: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(v, line["prompt"]) for v, line in zip(values, lines, strict=True)]


def test_several_things_in_one_prompt_are_all_found(tmp_path: Path) -> None:
    rng = random.Random(1)
    lines = []
    for _ in range(60):
        stamp, token = moment(rng), uuid.UUID(int=rng.getrandbits(128))
        space = " " if rng.random() < 0.4 else ""
        text = f"Now: {stamp}. {HEAD}Trace {token}. {RULES}{space}\n{RULES}{question(rng)}"
        lines.append({"prompt": text})
    report = of(tmp_path, lines)
    found = {finding.kind: finding for finding in report.findings}
    assert set(found) == {Kind.TIMESTAMP, Kind.UUID, Kind.WHITESPACE}
    for finding in report.findings:
        text = lines[finding.line - 1]["prompt"]
        assert text[finding.start.offset : finding.end] == finding.variants[0].text
        assert text[: finding.start.offset].endswith(finding.before)
    assert found[Kind.TIMESTAMP].start.offset == len("Now: ")
    assert found[Kind.UUID].start.offset == len(f"Now: {moment(rng)}. {HEAD}Trace ")
    # White space at a seam: the whole run of it varies, from the same place on.
    at = found[Kind.WHITESPACE].start.offset
    assert at == lines[0]["prompt"].index(RULES) + len(RULES.rstrip())
    assert report.reused_percent(report.computed_chars_after) > 60


TOOLS = [
    {"name": "search", "description": "finds documents in the archive", "limit": 10},
    {"name": "fetch", "description": "reads one document", "limit": 1},
    {"name": "sum", "description": "adds numbers", "limit": 100},
]


def chat(rng: random.Random, tools: list[dict[str, Any]], system: str = HEAD + RULES) -> Any:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": question(rng)}]},
    ]
    return {"messages": messages, "tools": tools}


def test_reordered_tools_and_keys_of_chats(tmp_path: Path) -> None:
    rng = random.Random(2)
    shuffled = [chat(rng, rng.sample(TOOLS, 3)) for _ in range(40)]
    finding = only(of(tmp_path, shuffled))
    assert (finding.kind, finding.start.field) == (Kind.JSON_ITEMS, "tools")
    assert finding.start.field_offset == 0
    assert finding.diverges.field_offset == len('[{"name": "')

    swapped = [dict(reversed(TOOLS[1].items()))]
    keys = [
        chat(rng, [TOOLS[0], *(swapped if n % 3 == 0 else [TOOLS[1]]), TOOLS[2]]) for n in range(30)
    ]
    finding = only(of(tmp_path, keys))
    assert (finding.kind, finding.start.field) == (Kind.JSON_KEYS, "tools")
    assert finding.prompts == 10
    assert finding.start.field_offset == len(json.dumps(TOOLS[:1])[:-1] + ", ")
    assert finding.diverges.field_offset == finding.start.field_offset + len('{"')


def test_swapped_keys_in_a_text(tmp_path: Path) -> None:
    rng = random.Random(3)
    forms = [json.dumps(TOOLS[0]), json.dumps(dict(reversed(TOOLS[0].items())))]
    lines = [{"prompt": f"{HEAD}{forms[n % 4 == 0]}\n{RULES}{question(rng)}"} for n in range(40)]
    finding = only(of(tmp_path, lines))
    assert finding.kind is Kind.JSON_KEYS
    assert finding.prompts == 10
    assert finding.start.offset == len(HEAD)
    assert lines[finding.line - 1]["prompt"][len(HEAD) : finding.end] == forms[1]
    assert {variant.text[:8] for variant in finding.variants} == {form[:8] for form in forms}


def test_a_trailing_space(tmp_path: Path) -> None:
    rng = random.Random(4)
    system = HEAD + RULES.rstrip()
    chats = [chat(rng, TOOLS, system + " " * (n % 5 == 0)) for n in range(30)]
    finding = only(of(tmp_path, chats))
    assert (finding.kind, finding.start.field) == (Kind.WHITESPACE, "messages[0].content")
    assert finding.prompts == 6
    assert finding.start.field_offset == len(system)
    # At the very end nothing is lost but a token: it is said all the same.
    ends = [{"prompt": RULES + question(rng)} for _ in range(9)]
    ends += [{"prompt": ends[4]["prompt"] + " "}]
    finding = only(of(tmp_path, ends))
    assert (finding.kind, finding.line, finding.chars_won) == (Kind.WHITESPACE, 10, 0)
    assert finding.start.offset == len(ends[4]["prompt"])


def test_any_text_before_what_is_the_same(tmp_path: Path) -> None:
    rng = random.Random(5)
    documents = [" ".join(rng.choice(WORDS) for _ in range(30)) for _ in range(20)]
    lines = [{"prompt": f"Read this. {d}.\n{HEAD}{RULES}{question(rng)}"} for d in documents]
    finding = only(of(tmp_path, lines))
    assert finding.kind is Kind.TEXT
    assert finding.start.offset == len("Read this. ")
    assert finding.chars_won > 18 * len(HEAD + RULES)


def test_what_differs_for_good_is_no_finding(tmp_path: Path) -> None:
    rng = random.Random(6)
    lines = [{"prompt": f"{head}{RULES}{question(rng)}"} for head in (HEAD, "") for _ in range(30)]
    report = of(tmp_path, lines)
    assert report.findings == ()
    assert [group.prompts for group in report.groups] == [30, 30]
    assert {group.kind for group in report.groups} == {Kind.CONTENT}
    assert report.groups[0].shared_chars == len(HEAD + RULES + "Question: ")
    one = of(tmp_path, [{"prompt": "alone"}, {"prompt": "alone"}, {"prompt": "al"}])
    assert (one.findings, one.groups) == ((), ())
    assert one.computed_chars == len("alone")


@given(st.lists(st.text("ab", max_size=8), max_size=12), st.text("ab", max_size=600))
def test_the_tree_is_as_large_as_its_nodes(texts: list[str], long: str) -> None:
    texts = [*texts, long, long + "b", "b" + long]
    assert tree_size(texts) == len({t[: n + 1] for t in texts for n in range(len(t))})
    for one, other in itertools.pairwise(texts):
        shared = common_prefix(one, other)
        assert one[:shared] == other[:shared]
        assert one[shared : shared + 1] != other[shared : shared + 1] or shared == len(one)
