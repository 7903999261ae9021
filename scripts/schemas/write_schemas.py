"""Writes docs/schemas/*.json and the table of docs/json.md: `make schemas`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from schema_documents import documents

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "schemas"
PAGE: Final = ROOT / "docs" / "json.md"
_BEGIN: Final = "<!-- schemas: begin -->"
_END: Final = "<!-- schemas: end -->"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# What a file's name does not say: which command prints it.
COMMANDS: Final = {
    "explain-request": "explain",
    "explain-prompts": "explain",
    "quota-set": "quota set",
    "quota-clear": "quota clear",
    "ttl-set": "ttl set",
    "ttl-clear": "ttl clear",
    "bench-gpu": "bench gpu",
    "bench-prefetch": "bench prefetch",
}


def files() -> dict[str, str]:
    """Return what each schema's file holds, by its name."""
    return {
        f"{name}.json": json.dumps(
            {"$schema": _DIALECT, "title": f"kvstore {COMMANDS.get(name, name)} --json", **schema},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
        for name, schema in documents().items()
    }


def page(text: str) -> str:
    """Return the page with its table written anew."""
    rows = ["| command | schema | what |", "|---|---|---|"]
    for name, schema in sorted(documents().items()):
        command = COMMANDS.get(name, name)
        what = schema.get("description", "").replace("|", "\\|")
        rows.append(f"| `{command}` | [{name}.json](schemas/{name}.json) | {what} |")
    before, rest = text.split(_BEGIN)
    return "\n".join([before + _BEGIN, *rows, _END + rest.split(_END)[1]])


def main() -> None:
    """Write everything; schemas of what there is no more go."""
    FOLDER.mkdir(exist_ok=True)
    written = files()
    for old in FOLDER.glob("*.json"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
