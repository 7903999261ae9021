"""The page by itself: nothing from elsewhere, and what a screen reader needs.

What a browser makes of it is not tested here: no browser comes with the tests.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources
from typing import Final

import pytest

PAGE: Final = (
    resources.files("kvstore.server").joinpath("status_page.html").read_text(encoding="utf-8")
)
_VOID: Final = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes and the tags around them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self._open: list[str] = []
        self.feed(PAGE)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element of a kind."""
        return [attributes for name, attributes, _ in self.elements if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page()


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    links = [
        value
        for _, attributes, _ in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "srcset", "data")
    ]
    assert sorted(map(str, links)) == ["data:,", "metrics", "metrics", "status.json"]
    # The one address in it is a name, not a place: that of SVG.
    assert set(re.findall(r"https?://[^\"'\s]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in PAGE
    assert "url(" not in PAGE
    # The content security policy allows no inline handlers and styles, and no made-up code.
    inline = [name for _, attributes, _ in page.elements for name in attributes if name[:2] == "on"]
    assert inline == []
    assert not any("style" in attributes for _, attributes, _ in page.elements)
    assert "eval(" not in PAGE
    # What the daemon says is text, never markup.
    assert "innerHTML" not in PAGE


def test_a_screen_reader_finds_its_way(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all(
        "meta"
    )
    assert [len(page.all(tag)) for tag in ("title", "h1", "main", "header", "footer")] == [1] * 5
    ids = [a["id"] for _, a, _ in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for a in page.all("section")} <= set(ids)
    assert len(page.all("section")) == len(page.all("h2"))
    assert len(page.all("caption")) == len(page.all("table"))
    heads = [a for tag, a, around in page.elements if tag == "th" and "thead" in around]
    assert all(a.get("scope") == "col" for a in heads)
    # What scrolls sideways can be reached from the keyboard, and has a name.
    for attributes in page.all("div"):
        if attributes.get("class") == "wide":
            assert attributes["tabindex"] == "0"
            assert attributes["role"] == "region"
            assert attributes["aria-label"]
    # What changes by itself can be stopped.
    (button,) = page.all("button")
    assert button["aria-pressed"] == "false"


def test_the_script_names_elements_that_exist(page: Page) -> None:
    ids = {a["id"] for _, a, _ in page.elements if "id" in a}
    named = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    named |= set(re.findall(r'(?:chart|rows|terms)\("([\w-]+)"', PAGE))
    assert named <= ids
    assert {i for i in ids if i and not i.startswith("h-")} == named


def _luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_both_schemes() -> None:
    """Text has 4.5 : 1 on both grounds (WCAG AA); lines, which need 3, have as much."""
    schemes = [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in PAGE.split(":root")[1:3]]
    assert len(schemes) == 2
    for colours in schemes:
        for text in ("ink", "soft", "bad", "a", "b", "c", "d"):
            for ground in ("paper", "card"):
                two = sorted((_luminance(colours[text]), _luminance(colours[ground])))
                assert (two[1] + 0.05) / (two[0] + 0.05) >= 4.5, (text, ground)
