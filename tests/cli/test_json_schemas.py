"""What commands print with `--json` is what docs/schemas says; and all of it is written down."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import typer.main
from jsonschema import Draft202012Validator

import kvstore
from kvstore.cli.app import app, main
from kvstore.cli.child import ChildDaemon
from kvstore.cli.demo import report
from kvstore.cli.demo.hit_rate import HitRates
from kvstore.cli.demo.scenario import DemoResult, DemoSettings, Row

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "schemas"
RECORDED: Final = ROOT / "docs" / "benchmarks"
_BLOCK: Final = 16
TOKENS: Final = list(range(10 * _BLOCK))
# Commands that print a document of another kind, or none; docs/json.md says so.
_WITHOUT: Final = {"serve", "top"}

sys.path.insert(0, str(ROOT / "scripts" / "schemas"))
writing: Any = importlib.import_module("write_schemas")


def strict(schema: Any) -> Any:
    """Return a schema that allows no field that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(part) for key, part in schema.items()}
    if isinstance(closed.get("properties"), dict) and "type" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def check(name: str, document: Any) -> None:
    """Compare a document with the schema of that name, as it is published and field by field."""
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    Draft202012Validator(schema).validate(document)
    Draft202012Validator(strict(schema)).validate(document)


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def printed(*arguments: str, code: int = 0) -> Any:
    got, out, err = run(*arguments, "--json")
    assert got == code, err
    return json.loads(out)


class Store:
    """A daemon with a disk, ten blocks, leases that missed, and a prompt's file."""

    def __init__(self, directory: Path) -> None:
        options = ["--host-pool", "64MiB", "--disk", str(directory / "disk")]
        self.child = ChildDaemon(directory, [*options, "--disk-capacity", "64MiB"])
        self.client = kvstore.Client(self.child.address)
        spec = kvstore.SpaceSpec(
            model="m", dtype="bfloat16", block_tokens=_BLOCK, shard_bytes=(65536,)
        )
        space = self.client.open_space(spec)
        self.id = spec.fingerprint.hex()
        keys = kvstore.chain_keys(TOKENS, _BLOCK)
        rows = np.ones((10, 65536), np.uint8)
        assert space.put(keys, rows) == 10
        assert space.get(keys, rows) == 10
        assert self.client.attachment.wait_active(60)
        longer = kvstore.chain_keys([*TOKENS, *range(_BLOCK)], _BLOCK)
        space.acquire(longer, request_id="chat-1").result(60).release()
        self.prompt = directory / "prompt.txt"
        self.prompt.write_text(" ".join(map(str, [*TOKENS, *range(20)])))

    def json(self, *arguments: str, code: int = 0) -> Any:
        return printed(*arguments, "--address", self.child.address, code=code)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("json"))
    yield made
    made.client.close()
    assert made.child.stop() == 0


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the names and objects of all commands; of a group that does something itself, too."""
    if path and (not hasattr(group, "commands") or group.invoke_without_command):
        yield " ".join(path), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_schemas_and_their_page_are_those_of_the_code() -> None:
    for name, text in writing.files().items():
        assert (FOLDER / name).read_text() == text, "run `make schemas`"
        Draft202012Validator.check_schema(json.loads(text))
    assert {path.name for path in FOLDER.iterdir()} == set(writing.files())
    page = (ROOT / "docs" / "json.md").read_text()
    assert writing.page(page) == page, "run `make schemas`"


def test_every_command_has_one() -> None:
    described = {writing.COMMANDS.get(path.stem, path.stem) for path in FOLDER.iterdir()}
    found = dict(commands(typer.main.get_command(app)))
    assert set(found) == described | _WITHOUT
    for name, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ("--json" in options) == (name not in _WITHOUT), name


def test_what_commands_on_a_daemon_print(store: Store, tmp_path: Path) -> None:
    chain = ("--space", store.id[:8], "--tokens", str(store.prompt))
    stats = store.json("stats")
    assert stats["prefixes"]
    assert stats["misses_blocks"]
    assert len(stats["tiers"]) == 2
    check("stats", stats)
    check("spaces", store.json("spaces"))
    check("pin", store.json("pin", *chain))
    owned = ("--owner", "chat-17", "--for", "1h")
    check("pin", store.json("pin", *chain, *owned))
    pins = store.json("pins")
    assert [(group["owner"], group["blocks"]) for group in pins] == [("", 10), ("chat-17", 10)]
    check("pins", pins)
    assert store.json("unpin", "--owner", "chat-17") == {"unpinned_blocks": 10}
    check("unpin", store.json("unpin", "--space", store.id, "--all"))
    space = ("--space", store.id[:8])
    check("quota-set", store.json("quota", "set", *space, "--host", "32MiB", "--disk", "none"))
    check("ttl-set", store.json("ttl", "set", "3h", *space))
    quotas, ttls = store.json("quota"), store.json("ttl")
    assert quotas[0]["limits"]["host_bytes"] == 32 << 20
    assert ttls[0]["limits"]["ttl_ms"] == 10_800_000
    check("quota", quotas)
    check("ttl", ttls)
    check("spaces", store.json("spaces"))
    check("quota-clear", store.json("quota", "clear", *space))
    check("ttl-clear", store.json("ttl", "clear", *space))
    assert store.json("quota") == store.json("ttl") == []
    check("flush", store.json("flush"))
    check("evict", store.json("evict", "--space", store.id, "--all", "--tier", "host"))
    check("prefetch", store.json("prefetch", *chain))
    check("verify", store.json("verify"))
    check("resize", store.json("resize", "48MiB", "--tier", "host"))
    # With an error where this machine has one.
    code, out, _ = run("doctor", "--address", store.child.address, "--json")
    doctor = json.loads(out)
    assert (code, doctor["daemon"]) == (int(doctor["errors"] > 0), store.child.address)
    check("doctor", doctor)
    for arguments in (
        (store.id, "--tokens", str(store.prompt)),
        (store.id, "--keys", "0f" * 16),
        ("--request", "chat-1"),
    ):
        check("explain-request", store.json("explain", *arguments))
    check("drain", store.json("drain"))


def test_what_commands_without_a_daemon_print(tmp_path: Path) -> None:
    code, out, _ = run("doctor", "--offline", "--state", str(tmp_path), "--json")
    assert code in (0, 1)
    check("doctor", json.loads(out))
    trace = str(ROOT / "tests" / "replay" / "chats.jsonl")
    usual = (trace, "--limit", "50")
    check("replay", printed("replay", *usual, "--blocks", "100"))
    check("replay", printed("replay", *usual, "--host", "16GiB,unlimited", "--disk", "0,1TiB"))
    check("replay", printed("replay", *usual, "--recommend", "5%", "--host", "1GiB,16GiB"))
    prompts = tmp_path / "prompts.jsonl"
    same = "You are a helpful assistant. Answer in one sentence, and cite your sources. " * 3
    lines = [f"Now: 2026-11-29T10:{minute:02}:00Z\n{same} {minute}" for minute in range(20)]
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    explained = printed("explain", str(prompts))
    assert explained["findings"]
    assert explained["groups"]
    check("explain-prompts", explained)


def test_what_a_measured_replay_prints() -> None:
    """In a process of its own: it starts a daemon, and this one has a client's threads."""
    trace = str(ROOT / "tests" / "replay" / "chats.jsonl")
    arguments = ("--host", "16MiB", "--disk", "16MiB", "--token-bytes", "128", "--limit", "5")
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "replay", trace, *arguments, "--measure", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    check("replay", json.loads(done.stdout))


def test_what_the_demo_prints() -> None:
    settings = DemoSettings(model=Path("model"), directory=Path("x"), prompts=2, prompt_tokens=300)
    rows = [Row(name, [1.0, 2.0], 256, {"host": 256}, [[1], [2]]) for name in ("cold", "warm")]
    rates = [HitRates("daemon 1", 0.5, {"stats": 0.5, "Prometheus": 0.5})]
    document = report.as_json(DemoResult(settings, rows, rates))
    check("demo", json.loads(json.dumps(document)))


def test_what_benches_have_printed() -> None:
    """Their recorded results: to run them takes minutes, a GPU, or a model."""
    for name, file in (
        ("bench", "data_path_2core.json"),
        ("bench-prefetch", "prefetch_2core.json"),
        ("bench-prefetch", "ttft_sweep_2core.json"),
    ):
        check(name, json.loads((RECORDED / file).read_text()))
    for line in map(json.loads, (RECORDED / "gpu_copies_h200.jsonl").read_text().splitlines()):
        line.pop("command", None)  # whoever recorded it wrote that in
        check("bench-gpu", line)


def test_a_field_that_nobody_described_is_found() -> None:
    """The comparison is not one that everything passes."""
    document = {"pinned_blocks": 1, "keys": 1}
    check("pin", document)
    for wrong in ({**document, "more": 1}, {"keys": 1}, {**document, "keys": "1"}):
        with pytest.raises(Exception, match="keys|pinned_blocks|more"):
            check("pin", wrong)
