"""Quotas, times to live and pins as clients and operators set and see them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.cli.app import main
from kvstore.cli.child import ChildDaemon
from kvstore.errors import InvalidRequest, KVStoreError, UnknownSpace
from kvstore.proto import kvstore_pb2 as pb

_BLOCK = 65_536
SPEC = kvstore.SpaceSpec(model="limited", dtype="u8", block_tokens=4, shard_bytes=(_BLOCK,))
OTHER = kvstore.SpaceSpec(model="other", dtype="u8", block_tokens=4, shard_bytes=(_BLOCK,))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    directory = tmp_path_factory.mktemp("limits")
    options = ["--host-pool", "32MiB", "--disk", str(directory / "disk")]
    options += ["--disk-capacity", "32MiB", "--default-quota", "disk=24MiB"]
    child = ChildDaemon(directory, options)
    yield child
    assert child.stop() == 0


@pytest.fixture
def client(daemon: ChildDaemon) -> Iterator[kvstore.Client]:
    with kvstore.Client(daemon.address, timeout_s=60.0) as client:
        yield client


def _chain(name: int, blocks: int) -> kvstore.Keys:
    return kvstore.chain_keys([name] * 4 * blocks, 4)


def _put(space: kvstore.client.Space, name: int, blocks: int) -> int:
    return space.put(_chain(name, blocks), np.ones((blocks, _BLOCK), np.uint8), timeout_s=60.0)


def _info(client: kvstore.Client, spec: kvstore.SpaceSpec) -> pb.SpaceInfo:
    return next(info for info in client.spaces() if info.space.id == spec.fingerprint)


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_quota_is_kept_and_shown(client: kvstore.Client) -> None:
    space = client.open_space(SPEC)
    in_force = space.set_quotas(host=8 * _BLOCK, gpu=math.inf)
    assert in_force.limits.host_bytes == 8 * _BLOCK
    assert in_force.limits.disk_bytes == 24 << 20
    assert not in_force.limits.HasField("gpu_bytes")
    assert in_force.own_limits.gpu_bytes == (1 << 64) - 1
    assert not in_force.own_limits.HasField("disk_bytes")
    for name in range(4):
        assert _put(space, name, 5) == 5
    client.flush()
    _until(lambda: _info(client, SPEC).bytes_host <= 8 * _BLOCK)
    info = _info(client, SPEC)
    assert info.blocks == 20
    assert info.bytes_disk == 20 * _BLOCK
    assert info.limits == in_force.limits
    assert info.own_limits == in_force.own_limits
    assert client.stats().counters["quota_evicted_blocks_host"] >= 12
    # What the quota of host memory let go of is on disk, and comes back within it.
    out = np.zeros((5, _BLOCK), np.uint8)
    assert space.get(_chain(0, 5), out, timeout_s=60.0) == 5
    assert out.all()
    assert _info(client, SPEC).bytes_host <= 8 * _BLOCK
    space.set_quotas(host=None, gpu=None)
    assert _info(client, SPEC).limits == pb.Limits(disk_bytes=24 << 20)


def test_what_can_never_fit_is_counted(client: kvstore.Client) -> None:
    space = client.open_space(OTHER)
    space.set_quotas(host=_BLOCK - 1)
    before = client.stats().counters["quota_refused_blocks"]
    assert _put(space, 9, 3) == 0
    assert client.stats().counters["quota_refused_blocks"] >= before + 3
    space.set_quotas(host=None)


def test_pins_of_owners_over_the_wire(client: kvstore.Client, daemon: ChildDaemon) -> None:
    one, two = client.open_space(SPEC), client.open_space(OTHER)
    assert _put(one, 1, 4) == 4
    assert _put(two, 2, 3) == 3
    now = time.time()
    assert one.pin(_chain(1, 4), 3600.0, "agent-7") == 4
    assert two.pin(_chain(2, 3), 1800.0, "agent-7") == 3
    assert two.pin(_chain(2, 1)) == 1
    groups = {(g.space_id, g.owner): g for g in client.pins()}
    assert set(groups) == {
        (SPEC.fingerprint, "agent-7"),
        (OTHER.fingerprint, "agent-7"),
        (OTHER.fingerprint, ""),
    }
    mine = groups[SPEC.fingerprint, "agent-7"]
    assert (mine.blocks, mine.bytes) == (4, 4 * _BLOCK)
    assert mine.first_end_unix_ms == mine.last_end_unix_ms
    assert mine.first_end_unix_ms / 1e3 > now + 3000
    assert groups[OTHER.fingerprint, ""].last_end_unix_ms == 0
    info = _info(client, OTHER)
    assert (info.pinned, info.pinned_bytes) == (3, 3 * _BLOCK)
    assert now < info.pins_end_unix_ms / 1e3 < now + 3000
    assert [g.blocks for g in client.pins(one)] == [4]

    async def leave() -> None:
        async with kvstore.AsyncClient(daemon.address, timeout_s=60.0) as other:
            assert len(await other.pins(owner="agent-7")) == 2
            assert await other.unpin_owner("agent-7") == 7
            space = await other.open_space(SPEC)
            assert await space.pin(_chain(1, 2), 60.0, "agent-8") == 2
            assert await space.unpin(owner="agent-8") == 2
            limits = await space.set_ttl(600.0)
            assert limits.limits.ttl_ms == 600_000
            assert not (await space.set_ttl(None)).limits.HasField("ttl_ms")
            assert (await space.set_quotas(disk=0)).limits.disk_bytes == 0
            await space.set_quotas(disk=None)

    asyncio.run(leave())
    assert [(g.owner, g.blocks) for g in client.pins()] == [("", 1)]
    assert two.unpin() == 1


def _says(what: Callable[[], object], kind: type[KVStoreError], text: str) -> None:
    with pytest.raises(kind, match=text):
        what()


def test_what_makes_no_sense_is_refused_and_changes_nothing(client: kvstore.Client) -> None:
    space = client.open_space(SPEC)
    before = _info(client, SPEC)

    def set_limits(**fields: Any) -> Callable[[], object]:
        request = pb.SetLimitsRequest(**{"space_id": SPEC.fingerprint, **fields})
        return lambda: client.link.call("SetLimits", request, 60.0)

    def pin(owner: str, ttl_ms: int) -> Callable[[], object]:
        keys = _chain(1, 1).packed
        request = pb.PinRequest(space=space.ref, keys=keys, owner=owner, ttl_ms=ttl_ms)
        return lambda: client.link.call("Pin", request, 60.0)

    limits = pb.Limits(host_bytes=1)
    _says(set_limits(), InvalidRequest, "limits: none is set and none is cleared")
    _says(set_limits(limits=pb.Limits(ttl_ms=0)), InvalidRequest, "ttl_ms must be above 0")
    _says(set_limits(clear=["host"]), InvalidRequest, "clear: 'host' is not one of gpu_bytes, ")
    _says(set_limits(limits=limits, clear=["host_bytes"]), InvalidRequest, "set in the same call")
    _says(set_limits(space_id=b"short", limits=limits), InvalidRequest, "space_id: has 5 bytes")
    _says(set_limits(space_id=bytes(32), limits=limits), UnknownSpace, "unknown: open it")
    _says(lambda: space.set_quotas(memory=1), InvalidRequest, "tier: 'memory' is not one of")
    _says(lambda: space.set_quotas(host=-1), InvalidRequest, "host: -1 is no size")
    _says(lambda: space.set_ttl(0.0), InvalidRequest, "ttl_s: must be above 0")
    _says(lambda: space.pin(_chain(1, 1), owner="x"), InvalidRequest, "its owner may be gone")
    _says(pin("x", 0), InvalidRequest, "ttl_ms: a pin with an owner needs one")
    _says(pin("x" * 129, 1), InvalidRequest, "owner: must be printable")
    _says(pin("a\nb", 1), InvalidRequest, "owner: must be printable")
    _says(lambda: client.unpin_owner(""), InvalidRequest, "owner: must be named")
    request = pb.UnpinRequest(owner="x", keys=_chain(1, 1).packed)
    _says(lambda: client.link.call("Unpin", request, 60.0), InvalidRequest, "space: is missing")
    after = _info(client, SPEC)
    assert (after.limits, after.pinned) == (before.limits, before.pinned)


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def test_commands_for_people(client: kvstore.Client, daemon: ChildDaemon, tmp_path: Path) -> None:
    space = client.open_space(SPEC)
    assert _put(space, 5, 2) == 2
    named = ("--space", SPEC.fingerprint.hex()[:8], "--address", daemon.address)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(" ".join(["5"] * 8))

    code, out, _ = _run("quota", "set", *named, "--host", "16MiB", "--disk", "none")
    assert (code, out) == (0, "in force now: host 16 MiB\n")
    code, out, _ = _run("quota", "--address", daemon.address)
    assert "of 16 MiB" in out
    assert "limited" in out
    code, out, _ = _run("ttl", "set", "90m", *named)
    assert (code, out) == (0, "in force now: host 16 MiB, ttl 90m\n")
    assert "90m" in _run("ttl", "--address", daemon.address)[1]
    owned = ("--owner", "chat-1", "--for", "2h")
    assert (
        _run("pin", *named, "--tokens", str(prompt), *owned)[1] == "2 of 2 blocks are pinned now\n"
    )
    listed = _run("pins", "--address", daemon.address)[1]
    assert "chat-1" in listed
    assert "in 2 h" in listed or "in 1.9" in listed
    assert _run("unpin", "--owner", "chat-1", *named)[1] == "unpinned 2 blocks\n"
    assert _run("pins", "--address", daemon.address)[1] == "nothing is pinned\n"
    assert _run("ttl", "clear", *named)[1] == "in force now: host 16 MiB\n"
    assert _run("quota", "clear", *named)[1] == "in force now: disk 24 MiB\n"

    key = bytes(_chain(5, 1).packed).hex()
    for arguments, said in (
        (("quota", "set", *named, "--host", "8 elephants"), "'8 elephants' is not a size: write"),
        (("quota", "set", *named, "--host", "9" * 400), "'99999999999999999999'… is more than any"),
        (("quota", "set", *named), "quota: give --gpu, --host or --disk"),
        (
            ("quota", "clear", *named, "--tier", "tape"),
            "tier: 'tape' is not one of gpu, host, disk",
        ),
        (("ttl", "set", "0", *named), "ttl: must be above 0, or none"),
        (("ttl", "set", "soon", *named), "'soon' is not a duration: write"),
        (("ttl", "set", "9" * 400, *named), "'99999999999999999999'… is more than any"),
        (("ttl", "set", "99999999999999d", *named), "ttl_s: must be above 0 and below 1e15"),
        (("pin", *named, key, "--owner", "\udcff", "--for", "1h"), "'\\udcff' is not UTF-8"),
        (("unpin", "--owner", "\udcff", "--address", daemon.address), "'\\udcff' is not UTF-8"),
        (("pin", *named, "00", "--owner", "x"), "owner: its pins need --for DURATION"),
        (("unpin", "--address", daemon.address), "space: give --space, or --owner alone"),
        (("quota", "--json", "set", *named, "--host", "1"), "options: write them behind set"),
    ):
        code, out, err = _run(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith(f"kvstore: {said}"), err
        assert err.count("\n") == 1


def test_odd_names_and_ends_break_no_list(client: kvstore.Client, daemon: ChildDaemon) -> None:
    model = "[/red]\x1b[2J\nmodel"
    spec = kvstore.SpaceSpec(model=model, dtype="u8", block_tokens=4, shard_bytes=(_BLOCK,))
    space = client.open_space(spec)
    space.set_quotas(host=1 << 20)
    assert _put(space, 6, 2) == 2
    # A client of another make may name more than a message can say of the end.
    request = pb.PinRequest(
        space=space.ref, keys=_chain(6, 2).packed, owner="[/b]:smile:", ttl_ms=(1 << 64) - 1
    )
    assert client.link.call("Pin", request, 60.0).blocks == 2
    assert client.pins()[0].last_end_unix_ms == (1 << 64) - 1
    assert _info(client, spec).pins_end_unix_ms == (1 << 64) - 1
    for command in ("pins", "quota", "spaces", "stats"):
        code, out, err = _run(command, "--address", daemon.address)
        assert (code, err) == (0, "")
        assert "\x1b" not in out
        assert ("[/b]:smile:" if command == "pins" else "[/red]?[2J?model") in out
        assert _run(command, "--json", "--address", daemon.address)[0] == 0
    code, out, err = _run("spaces", "--long", "--address", daemon.address)
    assert (code, err) == (0, "")
    assert "  model: [/red]?[2J?model\n" in out
    code, out, err = _run("top", "--once", "--address", daemon.address)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert client.unpin_owner("[/b]:smile:") == 2
    space.set_quotas(host=None)
