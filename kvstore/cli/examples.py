"""What people type: examples that stand below each command's help. Tests parse every one."""

from __future__ import annotations

from typing import Final

import typer

__all__ = ["EXAMPLES", "add_examples", "top_examples"]

# By a command's name; of the program itself, by the empty one. A prompt's tokens are ids of its
# model, one file a prompt; 3f2a stands for a space.
EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "": (
        "kvstore doctor",
        "kvstore serve --host-pool 64GiB --disk /mnt/nvme/kvstore",
        "kvstore top",
    ),
    "serve": (
        "kvstore serve",
        "kvstore serve --host-pool 64GiB --disk /mnt/nvme/kvstore",
        "kvstore serve --metrics 127.0.0.1:9405",
        "kvstore serve --config /etc/kvstore/kvstore.toml",
    ),
    "stats": ("kvstore stats", "kvstore stats --json"),
    "spaces": ("kvstore spaces", "kvstore spaces --long"),
    "top": ("kvstore top", "kvstore top --once --interval 5s"),
    "pin": (
        "kvstore pin --space 3f2a --tokens system_prompt.txt",
        "kvstore pin --space 3f2a --tokens system_prompt.txt --for 12h",
        "kvstore pin --space 3f2a --tokens chat.txt --for 1h --owner chat-17",
    ),
    "unpin": (
        "kvstore unpin --space 3f2a --tokens system_prompt.txt",
        "kvstore unpin --space 3f2a --all",
        "kvstore unpin --owner chat-17",
    ),
    "pins": ("kvstore pins", "kvstore pins --owner chat-17"),
    "quota": (
        "kvstore quota",
        "kvstore quota set --space 3f2a --host 8GiB --disk 1TiB",
        "kvstore quota clear --space 3f2a --tier host",
    ),
    "quota set": (
        "kvstore quota set --space 3f2a --host 8GiB --disk 1TiB",
        "kvstore quota set --space 3f2a --gpu none",
    ),
    "quota clear": (
        "kvstore quota clear --space 3f2a",
        "kvstore quota clear --space 3f2a --tier host",
    ),
    "ttl": ("kvstore ttl", "kvstore ttl set 7d --space 3f2a"),
    "ttl set": ("kvstore ttl set 7d --space 3f2a", "kvstore ttl set none --space 3f2a"),
    "ttl clear": ("kvstore ttl clear --space 3f2a",),
    "evict": (
        "kvstore evict --space 3f2a --tokens prompt.txt",
        "kvstore evict --space 3f2a --all --tier host",
    ),
    "prefetch": (
        "kvstore prefetch --space 3f2a --tokens prompt.txt",
        "kvstore prefetch --space 3f2a --tokens prompt.txt --tier gpu --wait 0s",
    ),
    "flush": ("kvstore flush", "kvstore flush --timeout 5m"),
    "drain": ("kvstore drain --timeout 30s",),
    "resize": ("kvstore resize 32GiB --tier host", "kvstore resize 1TiB --tier disk"),
    "verify": ("kvstore verify --rate 100MiB/s", "kvstore verify --fraction 5%"),
    "doctor": (
        "kvstore doctor",
        "kvstore doctor --offline --host-pool 64GiB --disk /mnt/nvme/kvstore",
    ),
    "replay": (
        "kvstore replay trace.jsonl --host 64GiB,256GiB --disk 0,4TiB --recommend 5%",
        "kvstore replay trace.jsonl --blocks 1000,30000,unlimited",
        "kvstore replay --generate 10000",
    ),
    "explain": (
        "kvstore explain --request chatcmpl-12",
        "kvstore explain 3f2a --tokens prompt.txt",
        "kvstore explain prompts.jsonl --top 20",
    ),
    "demo": ("kvstore demo --model .cache/smollm2-fp32",),
    "bench": ("kvstore bench --only memory --only disk", "kvstore bench --json"),
    "bench gpu": ("kvstore bench gpu --shard 2MiB --only host",),
    "bench prefetch": ("kvstore bench prefetch --rounds 3",),
}


def _text(name: str) -> str:
    # \b: lines stay as they are.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])))


def top_examples() -> str:
    """Return what stands below the help of the program itself."""
    return _text("")


def add_examples(app: typer.Typer, path: tuple[str, ...] = ()) -> None:
    """Write the examples below the help of every command of an app, which all must have some."""
    for command in app.registered_commands:
        command.epilog = _text(" ".join((*path, command.name or "")))
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        name = (*path, group.name or "")
        group.epilog = _text(" ".join(name))
        add_examples(inner, name)
