"""`kvstore explain` on a running daemon: why a run of blocks ends where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.blocks import chosen_keys, prompt_keys, read_tokens
from kvstore.cli.connect import connect, find_space
from kvstore.cli.output import print_json
from kvstore.cli.plain import plain
from kvstore.errors import StaleEpoch
from kvstore.keys import HASH_ALGORITHMS
from kvstore.space import SpaceSpec
from kvstore.vllm_keys import has_vllm_keys

if TYPE_CHECKING:
    from kvstore.client import Client, Space

__all__ = ["explain_run"]

# What keys depend on beside the tokens.
_KEY_FIELDS: Final = {"block_tokens", "hash_algorithm", "root_seed", "key_bytes"}
# Spaces with other keys that a prompt is looked for in.
_MOST_SPACES: Final = 50


def explain_run(
    space: str | None,
    keys: str | None,
    tokens: Path | None,
    request: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Print how far a run goes, and why it ends there.

    Args:
        space: id or its start; None with a request.
        keys: hexadecimal, between commas or spaces.
        tokens: file of token ids.
        request: id of a recent request; the only one given of these three.
        address: of the daemon.
        as_json: print JSON.
    """
    with connect(address) as client:
        if request is not None:
            document = plain(client.explain_request(request))
        else:
            opened = find_space(client, space or "")
            if tokens is not None:
                document = _explain_prompt(client, opened, read_tokens(tokens))
            else:
                listed = (keys or "").replace(",", " ").split()
                chain = chosen_keys(listed, None, False, opened.spec)
                assert chain is not None
                document = plain(opened.explain(chain))
    if as_json:
        print_json(document)
    else:
        print("\n".join(document["lines"]))


def _explain_prompt(client: Client, space: Space, tokens: list[int]) -> dict[str, Any]:
    size = space.spec.block_tokens
    keys, tail = prompt_keys(tokens, space.spec), len(tokens) % size
    if keys:
        document = plain(space.explain(keys))
    else:
        # The daemon knows no prompt: what fills no block is nothing to it.
        document = {
            "blocks": 0,
            "miss": {"reason": "none", "tier": "unspecified", "unix_ms": 0},
            "lines": [],
            "others": [],
            "asked": 0,
            "space": {"id": space.id.hex(), "epoch": space.epoch},
            "key": "",
        }
    if document["blocks"] < len(keys):
        _look_elsewhere(client, space, tokens, document)
    if tail:
        whole = "the last " if keys else ""
        document["lines"].append(
            f"shorter than a block: {whole}{tail:,} tokens fill no block of {size:,}; "
            "they are computed in any case"
        )
    return {**document, "tokens": len(tokens), "tail_tokens": tail}


def _knows_keys(spec: SpaceSpec) -> bool:
    return spec.hash_algorithm in HASH_ALGORITHMS or has_vllm_keys(spec)


def _look_elsewhere(
    client: Client, space: Space, tokens: list[int], document: dict[str, Any]
) -> None:
    """Look for a prompt in spaces that have other keys for it; add what is found."""
    infos = [
        (info, spec)
        for info in client.spaces()
        if info.blocks
        and _knows_keys(spec := SpaceSpec(**plain(info.spec)))
        and any(d.field in _KEY_FIELDS for d in space.spec.differences(spec))
    ]
    infos.sort(key=lambda it: len(space.spec.differences(it[1])))
    for info, spec in infos[:_MOST_SPACES]:
        keys = prompt_keys(tokens, spec)
        if not keys:
            continue
        try:
            blocks = client.open_space(spec).explain(keys).blocks
        except StaleEpoch:
            continue
        if not blocks:
            continue
        different = space.spec.differences(spec)
        what = "; ".join(f"{d.field} is {d.here!r} here, {d.there!r} there" for d in different)
        name = info.space.id.hex()
        document["lines"].append(
            f"other space {name[:12]} holds {blocks * spec.block_tokens:,} of these tokens: {what}"
        )
        entry = {
            "space": plain(info.space),
            "blocks": blocks,
            "differences": [
                {"field": d.field, "here": d.here, "there": d.there} for d in different
            ],
        }
        others = [other for other in document["others"] if other["space"]["id"] != name]
        document["others"] = [*others, entry]
