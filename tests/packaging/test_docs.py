"""What the documents name is there: links, headings, files, metrics, settings of the connector."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.connectors.vllm.settings import Settings
from kvstore.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
# Where documents and what they name lie; not the environments and caches beside them.
TOPS = (
    *("connectors", "docs", "index", "kvstore", "monitoring", "packaging", "prefetch", "proto"),
    *("scripts", "tests", "tiers", "README.md", "CHANGELOG.md"),
)
FILES = [
    str(path.relative_to(ROOT))
    for top in TOPS
    for path in (ROOT / top, *(ROOT / top).rglob("*"))
    if "node_modules" not in path.parts and path.is_file()
]
DOCUMENTS = sorted(name for name in FILES if name.endswith(".md"))


def _prose(document: str) -> str:
    """Return a document without its examples."""
    return re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(document: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(document)):
        if link.startswith(("http:", "https:")):
            continue
        file, _, heading = link.partition("#")
        target = ((ROOT / document).parent / file if file else ROOT / document).resolve()
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in _anchors(str(target.relative_to(ROOT))), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    for name in re.findall(r"[\w./-]+\.(?:py|mjs|sh|proto)\b", (ROOT / document).read_text()):
        if name.startswith("/"):  # of the machine
            continue
        assert (
            any(f"/{file}".endswith("/" + name.lstrip("./")) for file in FILES)
            or (ROOT / "kvstore" / name).exists()
        ), name


def test_every_setting_of_the_connector_is_explained_with_its_default() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, flags=re.MULTILINE))
    assert set(rows) == set(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        shown, default = rows[name].strip("`"), field.default
        if isinstance(default, bool):
            assert shown == str(default).lower(), name
        elif isinstance(default, str):
            assert shown == f'"{default}"', name
        else:
            number, _, unit = shown.partition(" ")
            assert float(number) * {"": 1, "MiB": MIB, "GiB": GIB}[unit] == default, name


def test_every_page_is_linked() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {name for name in DOCUMENTS if name.startswith("docs/") and name.count("/") == 1}
    for page in pages:
        linked = page in readme or any(
            Path(page).name in (ROOT / other).read_text() for other in pages - {page}
        )
        assert linked, page
