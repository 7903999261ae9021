"""`kvstore explain` on a running daemon: what a person reads, and what `--json` holds."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.aio import AsyncClient
from kvstore.cli.app import main
from kvstore.errors import InvalidRequest
from kvstore.vllm_keys import vllm_keys

SPEC = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,))
TOKENS = list(range(100, 165))  # four blocks and a token
FIELDS = {
    "blocks": int,
    "miss": dict,
    "lines": list,
    "others": list,
    "asked": int,
    "space": dict,
    "key": str,
    "tokens": int,
    "tail_tokens": int,
}


class Asker:
    """Runs the command on a daemon of its own."""

    def __init__(self, daemon: Any, directory: Path) -> None:
        self.address = daemon.address
        self.client = kvstore.Client(daemon.address)
        self.space = self.client.open_space(SPEC)
        self.keys = kvstore.chain_keys(TOKENS, 16)
        self._prompt = directory / "tokens"

    def store(self, space: Any, tokens: list[int]) -> None:
        keys = kvstore.chain_keys(tokens, space.spec.block_tokens)
        rows = np.zeros((len(keys), space.spec.block_bytes), np.uint8)
        assert space.put(keys, rows) == len(keys)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["explain", *arguments, "--address", self.address])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def prompt(self, tokens: list[int]) -> dict[str, Any]:
        self._prompt.write_text(" ".join(map(str, tokens)))
        done = self.run(SPEC.fingerprint.hex()[:12], "--tokens", str(self._prompt), "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        assert {name: type(value) for name, value in document.items()} == FIELDS
        return document


@pytest.fixture
def asker(daemon: Any, tmp_path: Path) -> Iterator[Asker]:
    made = Asker(daemon, tmp_path)
    yield made
    made.client.close()


def test_keys_and_prompts(asker: Asker) -> None:
    asker.store(asker.space, TOKENS[:32])
    keys = ",".join(key.hex() for key in asker.keys)
    done = asker.run(SPEC.fingerprint.hex()[:12], "--keys", keys)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "2 of 4 blocks are there (32 tokens): 2 in host"
    assert second.startswith(f"block 2 ({asker.keys[2].hex()[:16]}): never seen")

    document = asker.prompt(TOKENS)
    assert (document["blocks"], document["asked"]) == (2, 4)
    assert (document["tokens"], document["tail_tokens"]) == (65, 1)
    assert document["miss"]["reason"] == "never_seen"
    assert document["key"] == asker.keys[2].hex()
    assert document["lines"][-1].startswith("shorter than a block: the last 1 tokens")

    short = asker.prompt(TOKENS[:9])
    assert (short["blocks"], short["asked"], short["tail_tokens"]) == (0, 0, 9)
    assert short["lines"] == [
        "shorter than a block: 9 tokens fill no block of 16; they are computed in any case"
    ]


def test_a_prompt_is_found_where_its_keys_are_others(asker: Asker) -> None:
    """What differs changes the keys: only the tokens can tell."""
    other = asker.client.open_space(replace(SPEC, block_tokens=32))
    asker.store(other, TOKENS)
    document = asker.prompt(TOKENS)
    assert document["blocks"] == 0
    [there] = document["others"]
    assert there["blocks"] == 2
    assert there["space"]["id"] == other.spec.fingerprint.hex()
    assert there["differences"] == [{"field": "block_tokens", "here": "16", "there": "32"}]
    assert any("holds 64 of these tokens" in line for line in document["lines"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("root_seed", "5b" * 32), ("hash_algorithm", "vllm-sha256/16"), ("block_tokens", 64)],
)
def test_a_vllm_prompt_is_found_where_its_keys_are_others(
    asker: Asker, tmp_path: Path, field: str, value: Any
) -> None:
    """An engine's keys are computed from the tokens, as the engine does."""
    spec = replace(
        SPEC,
        block_tokens=32,
        hash_algorithm="vllm-sha256_cbor/16",
        root_seed="4e" * 32,
        key_bytes=32,
    )
    there = asker.client.open_space(replace(spec, **{field: value}))
    asker.client.open_space(spec)
    keys = vllm_keys(TOKENS, there.spec)
    stored = there.put(keys, np.zeros((len(keys), 4096), np.uint8))
    assert stored == len(keys) > 0
    prompt = tmp_path / "prompt"
    prompt.write_text(" ".join(map(str, TOKENS)))
    done = asker.run(spec.fingerprint.hex(), "--tokens", str(prompt), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["blocks"], document["asked"], document["tail_tokens"]) == (0, 2, 1)
    [found] = document["others"]
    assert found["blocks"] == stored
    assert [different["field"] for different in found["differences"]] == [field]
    # In its own space it is simply there.
    done = asker.run(there.spec.fingerprint.hex(), "--tokens", str(prompt))
    assert done.stdout.startswith(f"{stored} of {stored} blocks are there")


def test_a_recent_request_by_its_name(asker: Asker) -> None:
    asker.store(asker.space, TOKENS[:32])
    assert asker.client.attachment.wait_active(60)
    lease = asker.space.acquire(asker.keys, request_id="chatcmpl-5").result(60)
    lease.release()
    for name in ("chatcmpl-5", str(lease.id)):
        done = asker.run("--request", name)
        assert done.returncode == 0, done.stderr
        assert "2 of 4 blocks; block 2: never seen" in done.stdout
    answer = asker.client.explain_request("chatcmpl-5")
    assert (answer.blocks, answer.asked, answer.key) == (2, 4, asker.keys[2])
    done = asker.run("--request", "nobody")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("kvstore: request_id: 'nobody' is none of the last ")
    done = asker.run("--request", "x" * 50_000)
    assert (done.returncode, done.stderr) == (
        1,
        "kvstore: request_id: is longer than 256 characters\n",
    )


def test_an_asynchronous_client_explains_too(asker: Asker) -> None:
    asker.store(asker.space, TOKENS[:32])
    assert asker.client.attachment.wait_active(60)
    asker.space.acquire(asker.keys, request_id="chatcmpl-6").result(60).release()

    async def ask() -> None:
        async with AsyncClient(asker.address) as client:
            space = await client.open_space(SPEC)
            assert (await space.explain(asker.keys)).blocks == 2
            assert (await client.explain_request("chatcmpl-6")).blocks == 2

    asyncio.run(ask())


def test_a_question_that_makes_no_sense_is_refused(asker: Asker) -> None:
    assert asker.client.attachment.wait_active(60)
    with pytest.raises(InvalidRequest, match="^request_id: is longer than 256 characters"):
        asker.space.acquire(asker.keys, request_id="x" * 257).result(60)
    with pytest.raises(InvalidRequest, match="^keys: must name at least one key"):
        asker.space.explain([])
    with pytest.raises(InvalidRequest, match="^request_id"):
        asker.client.explain_request("x" * 257)


def test_an_epoch_that_has_ended(asker: Asker) -> None:
    asker.store(asker.space, TOKENS)
    with kvstore.Client(asker.address) as second:
        second.open_space(SPEC).bump_epoch()
    answer = asker.space.explain(asker.keys)
    assert (answer.blocks, answer.asked) == (0, 4)
    assert "other epoch: the space is at epoch" in answer.lines[0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give a file of prompts, or a space"),
        (("ab", "--request", "x"), 2, "give a file of prompts, or a space"),
        (("ab", "--keys", "00", "--request", "x"), 2, "give one of"),
        (("ffff", "--keys", "00"), 1, "no space's id starts with 'ffff'"),
    ],
)
def test_a_wrong_question_is_one_line(
    asker: Asker, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = asker.run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("", "holds no token ids"),
        ("1, -5", "'-5' is no token id"),
        ("1 " + "[" * 5000, f"'{'[' * 20}' is no token id"),
        ("9" * 23, f"'{'9' * 20}' is no token id"),
    ],
)
def test_a_file_without_token_ids_is_one_line(
    asker: Asker, tmp_path: Path, tokens: str, said: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(tokens)
    done = asker.run(SPEC.fingerprint.hex()[:12], "--tokens", str(file))
    assert (done.returncode, done.stderr) == (1, f"kvstore: tokens: {file}: {said}\n")
