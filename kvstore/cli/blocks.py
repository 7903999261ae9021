"""`kvstore pin`, `unpin`, `evict` and `prefetch`: acts on chosen blocks of one space."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore.cli.connect import AddressOption, JsonOption, connect, find_space
from kvstore.cli.output import print_json
from kvstore.errors import InvalidRequest
from kvstore.keys import HASH_ALGORITHMS, Keys, chain_keys
from kvstore.space import SpaceSpec
from kvstore.units import parse_seconds
from kvstore.vllm_keys import has_vllm_keys, vllm_keys

__all__ = ["OwnerOption", "SpaceOption", "chosen_keys", "prompt_keys", "read_tokens", "register"]

SpaceOption = Annotated[
    str,
    typer.Option(
        "--space", "-s", metavar="ID", help="The space's id, or its start (`kvstore spaces`)."
    ),
]
KeysArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY", help="Keys in hexadecimal, in chain order."),
]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="Take the keys of a prompt instead: a file of token ids between spaces or commas.",
    ),
]
OwnerOption = Annotated[
    str,
    typer.Option("--owner", metavar="NAME", help="Whose pins: the id of a session, of an agent."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Take every block of the space.")]

# Those that are too large for one are told apart later.
_TOKEN: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


def read_tokens(file: Path) -> list[int]:
    """Return the token ids in a file.

    Raises:
        InvalidRequest: it cannot be read, or holds something else.
    """
    try:
        words = file.read_text().replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest("tokens", f"cannot read {file}: {e}") from e
    wrong = next((word for word in words if not _TOKEN.fullmatch(word)), None)
    if wrong is not None:
        raise InvalidRequest("tokens", f"{file}: {wrong[:20]!r} is no token id")
    if not words:
        raise InvalidRequest("tokens", f"{file}: holds no token ids")
    return [int(word) for word in words]


def prompt_keys(tokens: list[int], spec: SpaceSpec) -> Keys:
    """Return the keys that a space has for a prompt; none when it fills no block.

    Of vLLM's spaces, those of plain text: without adapter, images or a cache salt.

    Raises:
        InvalidRequest: only the engine knows them.
    """
    if has_vllm_keys(spec):
        return vllm_keys(tokens, spec)
    if spec.hash_algorithm not in HASH_ALGORITHMS:
        raise InvalidRequest(
            "tokens", f"the space's keys are made by the engine ({spec.hash_algorithm}): give keys"
        )
    return chain_keys(tokens, spec.block_tokens, algorithm=spec.hash_algorithm)


def chosen_keys(
    listed: list[str] | None, tokens: Path | None, everything: bool, spec: SpaceSpec
) -> Keys | None:
    """Return the keys that a command line names; None for every block of the space.

    Raises:
        InvalidRequest: it names none, names them in two ways, or one is no key of the space.
    """
    if sum((bool(listed), tokens is not None, everything)) != 1:
        raise InvalidRequest("keys", "give keys, or --tokens FILE, or --all")
    if everything:
        return None
    if tokens is not None:
        prompt = read_tokens(tokens)
        keys = prompt_keys(prompt, spec)
        if not keys:
            raise InvalidRequest(
                "tokens", f"{len(prompt)} tokens fill no block of {spec.block_tokens} tokens"
            )
        return keys
    raw = []
    for key in listed or ():
        try:
            raw.append(bytes.fromhex(key))
        except ValueError as e:
            text = f"{key[:80]!r} is not hexadecimal, two digits a byte"
            raise InvalidRequest("keys", text) from e
    return Keys.of(raw, spec.key_bytes)


def _only(owner: str, keys: list[str] | None, tokens: Path | None) -> bool:
    """Return whether an owner alone says what is meant: all its pins of the space."""
    return bool(owner) and not keys and tokens is None


def _report(as_json: bool, line: str, **values: Any) -> None:
    if as_json:
        print_json(values)
    else:
        print(line)


def pin(
    space: SpaceOption,
    keys: KeysArgument = None,
    tokens: TokensOption = None,
    ttl: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="Unpin by itself after this long."),
    ] = None,
    owner: OwnerOption = "",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a chain of blocks from being evicted.

    Pins with an owner need --for; pinning again moves their end.
    """
    if owner and ttl is None:
        raise InvalidRequest("owner", "its pins need --for DURATION: the owner may be gone")
    with connect(address) as client:
        opened = find_space(client, space)
        chain = chosen_keys(keys, tokens, False, opened.spec)
        assert chain is not None
        ttl_s = None if ttl is None else parse_seconds(ttl)
        pinned = opened.pin(chain, ttl_s=ttl_s, owner=owner)
    _report(
        as_json,
        f"{pinned} of {len(chain)} blocks are pinned now",
        pinned_blocks=pinned,
        keys=len(chain),
    )


def unpin(
    space: Annotated[
        str | None,
        typer.Option("--space", "-s", metavar="ID", help="The space's id, or its start."),
    ] = None,
    keys: KeysArgument = None,
    tokens: TokensOption = None,
    everything: AllOption = False,
    owner: OwnerOption = "",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let blocks be evicted again.

    With --owner and no space: all pins of that owner, in every space. Without --owner: whoever's
    pins they are.
    """
    with connect(address) as client:
        if space is None:
            if not owner or keys or tokens is not None or everything:
                raise InvalidRequest("space", "give --space, or --owner alone")
            unpinned = client.unpin_owner(owner)
        else:
            opened = find_space(client, space)
            chosen = chosen_keys(
                keys, tokens, everything or _only(owner, keys, tokens), opened.spec
            )
            unpinned = opened.unpin(chosen, owner)
    _report(as_json, f"unpinned {unpinned} blocks", unpinned_blocks=unpinned)


def evict(
    space: SpaceOption,
    keys: KeysArgument = None,
    tokens: TokensOption = None,
    everything: AllOption = False,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier", metavar="TIER", help="Only from gpu, host or disk; every tier without it."
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop blocks now."""
    with connect(address) as client:
        opened = find_space(client, space)
        result = opened.evict(chosen_keys(keys, tokens, everything, opened.spec), tier)
    kept = f"; {result.skipped:,} stay (in use, pinned, or above a block that stays)"
    _report(
        as_json,
        f"removed {result.copies:,} copies{kept if result.skipped else ''}",
        copies=result.copies,
        skipped=result.skipped,
    )


def prefetch(
    space: SpaceOption,
    keys: KeysArgument = None,
    tokens: TokensOption = None,
    tier: Annotated[
        str, typer.Option("--tier", metavar="TIER", help="Where to: host, or gpu for the GPU pool.")
    ] = "host",
    deadline: Annotated[
        str,
        typer.Option(
            "--deadline",
            metavar="DURATION",
            help="What has not begun to move by then is dropped.",
        ),
    ] = "30s",
    priority: Annotated[
        int,
        typer.Option(
            "--priority",
            metavar="N",
            min=-(1 << 31),
            max=(1 << 31) - 1,
            help="Higher goes first. Engines' requests have 0: less lets them pass.",
        ),
    ] = 0,
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait",
            metavar="DURATION",
            help="How long this command waits for them; 0s: it only asks. "
            "Default: until the deadline.",
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a chain of blocks from disk to memory before it is used.

    To host memory, or on to the GPU. A hint, for routers and agents that know what comes next: nothing is held for it, and what has
    arrived may be evicted again.
    """
    deadline_s = parse_seconds(deadline)
    wait_s = deadline_s if wait is None else parse_seconds(wait)
    with connect(address) as client:
        opened = find_space(client, space)
        chain = chosen_keys(keys, tokens, False, opened.spec)
        assert chain is not None
        ticket = opened.prefetch(chain, tier=tier, deadline_s=deadline_s, priority=priority)
        blocks = ticket.wait(wait_s)
    _report(
        as_json,
        f"{blocks} of {len(chain)} blocks are in {'memory' if tier == 'host' else tier} now",
        blocks=blocks,
        keys=len(chain),
    )


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for name, command in (
        ("pin", pin),
        ("unpin", unpin),
        ("evict", evict),
        ("prefetch", prefetch),
    ):
        app.command(name)(command)
