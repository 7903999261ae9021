"""Messages that no client of ours would send: refused by name, logged without a traceback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_calls import MIB, UINT64_MAX, Raw, RawAttachment, chain, content, spec, status

from kvstore.proto import kvstore_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT
REFUSALS = {
    INVALID,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
METHODS = [
    f"{service}.{method.name}"
    for service in ("KVStore", "Admin")
    for method in pb.DESCRIPTOR.services_by_name[service].methods
]


def _daemon(new_daemon: Any, directory: Path) -> Iterator[Raw]:
    daemon = new_daemon(directory, "--host-pool", "64MiB")
    raw = Raw(daemon.start())
    try:
        yield raw
        log = daemon.log.read_text()
        assert "Traceback" not in log
        assert " ERROR " not in log
        stats = raw.stats()
        assert (stats.leases, stats.grants, stats.stuck_slots) == (0, 0, 0)
    finally:
        raw.close()
        daemon.end()


@pytest.fixture(scope="module")
def shared(new_daemon: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raw]:
    """A daemon for all tests here; at the end its log must be clean and nothing may be left."""
    yield from _daemon(new_daemon, tmp_path_factory.mktemp("rubbish"))


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_refused_like_any_bad_request(
    shared: Raw, method: str
) -> None:
    code, message = shared.send(method, b"\xff\xfe\x01")
    assert code is INVALID
    assert message.startswith("request: cannot be read")


def test_text_that_is_no_text_is_refused(shared: Raw) -> None:
    code, message = shared.send("KVStore.Hello", b"\x12\x02\xff\xfe")
    assert code is INVALID
    assert "UTF-8" in message


# An empty Drain means what it says: grant nothing any more.
@pytest.mark.parametrize("method", sorted({*METHODS} - {"Admin.Drain"}))
def test_a_message_without_any_field_is_answered_or_refused(shared: Raw, method: str) -> None:
    code, _ = shared.send(method, b"")
    assert code is grpc.StatusCode.OK or code in REFUSALS


@pytest.mark.parametrize("tier", [1, 4, 99, -5])
def test_a_tier_that_does_not_exist_is_refused(shared: Raw, tier: Any) -> None:
    space = shared.open()
    keys = chain("tier", 1)
    for call in (
        lambda: shared.kv.Evict(pb.EvictRequest(space=space, keys=keys, tier=tier)),
        lambda: shared.kv.Prefetch(
            pb.PrefetchRequest(space=space, keys=keys, tier=tier, ticket_id=1)
        ),
    ):
        code, message = status(call)
        assert code is INVALID
        assert message.startswith("tier: ")


def test_keys_of_a_wrong_length_all_zero_or_named_twice_are_refused_everywhere(
    shared: Raw,
) -> None:
    space = shared.open()
    kv = shared.kv
    calls: list[Callable[[bytes], object]] = [
        lambda k: kv.Lookup(pb.LookupRequest(space=space, keys=k)),
        lambda k: kv.Pin(pb.PinRequest(space=space, keys=k)),
        lambda k: kv.Unpin(pb.UnpinRequest(space=space, keys=k)),
        lambda k: kv.Evict(pb.EvictRequest(space=space, keys=k)),
        lambda k: kv.Prefetch(pb.PrefetchRequest(space=space, keys=k, ticket_id=2)),
        lambda k: list(kv.Get(pb.GetRequest(space=space, keys=k))),
        lambda k: kv.Put(iter([pb.PutRequest(header=pb.PutHeader(space=space, keys=k))])),
    ]
    for keys in (b"x", bytes(16), chain("k", 3) + b"x", chain("k", 1) + bytes(16)):
        for call in calls:
            code, message = status(lambda call=call, keys=keys: call(keys))  # type: ignore[misc]
            assert code is INVALID
            assert message.startswith("keys: ")
    twice = 2 * chain("k", 1)
    for call in (calls[1], calls[4], calls[5]):
        assert status(lambda call=call: call(twice)) == (  # type: ignore[misc]
            INVALID,
            "keys: names a key twice",
        )


def test_a_spec_is_refused_naming_the_field(shared: Raw) -> None:
    good = spec()
    for field, value in {
        "model": "",
        "dtype": "x" * 5000,
        "block_tokens": 0,
        "pipeline_rank": 1,
        "key_bytes": 7,
    }.items():
        bad = pb.SpaceSpec()
        bad.CopyFrom(good)
        setattr(bad, field, value)
        code, message = status(
            lambda bad=bad: shared.kv.OpenSpace(  # type: ignore[misc]
                pb.OpenSpaceRequest(spec=bad)
            )
        )
        assert code is INVALID
        assert message.startswith(f"{field}: ")
    for shards in ((), (0,), (UINT64_MAX,), (UINT64_MAX, UINT64_MAX), (1,) * 100_000, (65 * MIB,)):
        code, message = status(lambda shards=shards: shared.open("s", shards))  # type: ignore[misc]
        assert code is INVALID
        assert message.startswith("shard_bytes: ")


def _chunk(block: int, offset: int, data: bytes) -> pb.PutRequest:
    return pb.PutRequest(chunk=pb.Chunk(block=block, offset=offset, data=data))


def test_put_streams_out_of_order_leave_no_slot_and_no_block(shared: Raw) -> None:
    space = shared.open()
    keys = chain("order", 1)
    header = pb.PutRequest(header=pb.PutHeader(space=space, keys=keys, deadline_ms=1000))
    part = _chunk(0, 0, b"x" * 10)
    for stream in (
        [],
        [part],
        [header, header],
        [header, part, header],
        [header, _chunk(0, 5, b"x")],
        [header, part, part],
        [header, _chunk(0, 0, b"x" * 65537)],
        [header, _chunk(0, 0, b"")],
        [header, _chunk(1, 0, b"x")],
        [header, _chunk((1 << 32) - 1, UINT64_MAX, b"x")],
        [header, part, pb.PutRequest()],
    ):
        code, _ = status(
            lambda stream=stream: shared.kv.Put(  # type: ignore[misc]
                iter(stream), timeout=10
            )
        )
        assert code is INVALID
    # One that merely stops has stored nothing, which is no error.
    assert shared.kv.Put(iter([header, part]), timeout=10).blocks == 0
    assert shared.stats().granted_slots == 0
    assert shared.put(space, keys, 65536) == 1
    assert _bytes(shared, space, keys) == content(keys, 65536)


def _bytes(raw: Raw, space: pb.SpaceRef, keys: bytes) -> bytes:
    request = pb.GetRequest(space=space, keys=keys, deadline_ms=5000)
    return b"".join(m.chunk.data for m in raw.kv.Get(request, timeout=20) if m.HasField("chunk"))


_TIMES = [
    (pb.Heartbeat(times=[pb.OperationTimes()] * 65), "times: "),
    (pb.Heartbeat(times=[pb.OperationTimes(operation="load", buckets=[0] * 26)]), "buckets: "),
    (
        pb.Heartbeat(times=[pb.OperationTimes(operation="load", total_seconds=-1)]),
        "total_seconds: ",
    ),
    (
        pb.Heartbeat(times=[pb.OperationTimes(operation="load", longest_seconds=float("inf"))]),
        "longest_seconds: ",
    ),
]


def test_attach_streams_that_break_the_rules_are_told_so(shared: Raw) -> None:
    opened = pb.AttachUp(open=pb.AttachOpen(map_memory=True))
    locked = pb.AttachUp(locked=pb.AttachLocked())
    for stream, said in (
        ([], "open: "),
        ([locked], "open: "),
        ([opened, opened], "event: "),
        ([opened, locked], "locked: "),
        ([opened, pb.AttachUp()], "event: "),
        (
            [opened, pb.AttachUp(heartbeat=pb.Heartbeat(usage=[pb.Usage()] * 100_000))],
            "usage: ",
        ),
        *(([opened, pb.AttachUp(heartbeat=beat)], said) for beat, said in _TIMES),
    ):
        code, message = status(
            lambda stream=stream: list(  # type: ignore[misc]
                shared.kv.Attach(iter(stream), timeout=10)
            )
        )
        assert code is INVALID
        assert message.startswith(said)
    assert not shared.stats().clients


def test_a_client_that_counts_nonsense_cannot_break_the_statistics(shared: Raw) -> None:
    space = shared.open("usage")
    huge = pb.Usage(space=space, requests=UINT64_MAX, prompt_tokens=UINT64_MAX)
    unknown = pb.Usage(space=pb.SpaceRef(id=b"?"), requests=1)
    stream = [
        pb.AttachUp(open=pb.AttachOpen()),
        pb.AttachUp(heartbeat=pb.Heartbeat(usage=[huge, huge, unknown])),
        # An operation of a later version: not counted, and no fault.
        pb.AttachUp(heartbeat=pb.Heartbeat(times=[pb.OperationTimes(operation="later")])),
        pb.AttachUp(detach=pb.Detach()),
        pb.AttachUp(detach=pb.Detach()),
    ]
    list(shared.kv.Attach(iter(stream), timeout=10))
    assert shared.stats().usage.requests == UINT64_MAX
    assert shared.admin.ListSpaces(pb.ListSpacesRequest()).spaces


def test_a_clients_name_cannot_write_lines_of_its_own_into_the_log(shared: Raw) -> None:
    name = "x\n2026-01-01 CRITICAL kvstore: all is lost\x1b[2J"
    list(shared.kv.Attach(iter([pb.AttachUp(open=pb.AttachOpen(client=name))]), timeout=10))
    lines = shared.daemon.log.read_text().splitlines()
    assert any("x?2026-01-01 CRITICAL kvstore: all is lost?[2J" in line for line in lines)
    assert not any(line.startswith("2026-01-01") for line in lines)


def test_lists_of_a_million_ids_do_not_stop_the_loop(shared: Raw) -> None:
    space = shared.open()
    attachment = RawAttachment(shared)
    other = shared.again()
    million = [attachment.id] * 2_000_000
    calls = [
        shared.kv.Release.future(pb.ReleaseRequest(attachment_id=attachment.id, lease_ids=million)),
        shared.kv.CancelPrefetch.future(pb.CancelPrefetchRequest(ticket_ids=million)),
        shared.kv.Reserve.future(
            pb.ReserveRequest(
                attachment_id=attachment.id, space=space, grant_id=1, count=1, writers=million
            )
        ),
    ]
    attachment.say(unmapped=pb.SlabsUnmapped(groups=[7] * 1_000_000))
    worst = 0.0
    while not all(call.done() for call in calls):
        begun = time.perf_counter()
        other.kv.Hello(pb.HelloRequest(), timeout=10)
        worst = max(worst, time.perf_counter() - begun)
    assert worst < 1.0
    for call, field in zip(calls[1:], ("ticket_ids", "writers"), strict=True):
        code, message = status(call.result)
        assert code is INVALID
        assert message.startswith(f"{field}: ")
    attachment.hang_up()
    attachment.die()
    other.close()


def test_what_belongs_to_others_can_be_neither_committed_nor_aborted(
    shared: Raw, until: Callable[..., None]
) -> None:
    space = shared.open()
    owner, thief = RawAttachment(shared), RawAttachment(shared)
    kv = shared.kv
    reserve = pb.ReserveRequest(attachment_id=owner.id, space=space, grant_id=5, count=8)
    reserve.deadline_ms = 5000
    granted = kv.Reserve(reserve).slots
    names = [granted[i : i + 8] for i in range(0, len(granted), 16)]
    assert len(names) == 8

    def commit(slots: bytes, keys: bytes, **fields: Any) -> list[int]:
        wanted = {"attachment_id": owner.id, "grant_id": 5, "space": space, **fields}
        parents = wanted.pop("parents", bytes(len(keys)))
        answer = kv.Commit(pb.CommitRequest(slots=slots, keys=keys, parents=parents, **wanted))
        return list(answer.outcomes)

    mine = chain("mine", 8)
    assert status(lambda: commit(names[0], mine[:16], attachment_id=thief.id, owner_id=owner.id))[
        1
    ].startswith("shard: ")
    assert status(lambda: commit(names[0], mine[:16], shard=1))[1].startswith("shard: ")
    assert status(lambda: commit(names[0], mine[:32]))[1].startswith("slots: ")
    for foreign in ({"grant_id": 6}, {"owner_id": thief.id}):
        assert commit(names[0], mine[:16], **foreign) == [pb.UNKNOWN_SLOT]
    assert commit(b"\xff" * 8, mine[:16]) == [pb.UNKNOWN_SLOT]
    kv.Abort(pb.AbortRequest(attachment_id=thief.id, owner_id=owner.id, grant_id=5))
    code, message = status(
        lambda: kv.Abort(
            pb.AbortRequest(attachment_id=thief.id, owner_id=owner.id, grant_id=5, all_shards=True)
        )
    )
    assert (code, message.split(":")[0]) == (INVALID, "all_shards")
    assert len(kv.Reserve(reserve).slots) == len(granted)

    assert commit(names[0], mine[:16]) == [pb.COMMITTED]
    assert commit(names[0], mine[:16]) == [pb.UNKNOWN_SLOT]
    assert commit(names[1] + names[2], 2 * mine[:16]) == [pb.EXISTS, pb.EXISTS]
    assert commit(2 * names[3], chain("other", 2)) == [pb.COMMITTED, pb.UNKNOWN_SLOT]
    itself = mine[32:48]
    assert commit(names[4], itself, parents=itself) == [pb.PARENT_MISSING]
    owner.say(detach=pb.Detach())
    thief.hang_up()
    thief.die()
    until(lambda: not shared.stats().clients and not shared.stats().grants)
    owner.die()
