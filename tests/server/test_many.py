"""More of something than anybody expects: calls at once, spaces, tickets."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from raw_calls import Raw, chain, spec

from kvstore.proto import kvstore_pb2 as pb


def test_no_call_is_dropped_when_a_daemon_wakes_up_to_thousands(raw: Callable[..., Raw]) -> None:
    server = raw()
    space = server.open()
    keys = chain("c", 4)
    assert server.put(space, keys, 65536) == 4
    server.daemon.signal(signal.SIGSTOP)
    request = pb.LookupRequest(space=space, keys=keys)
    calls = [server.kv.Lookup.future(request, timeout=60) for _ in range(5000)]
    server.daemon.signal(signal.SIGCONT)
    assert {call.result().blocks for call in calls} == {4}


def test_tickets_without_number_are_cancelled_and_forgotten(
    raw: Callable[..., Raw], tmp_path: Path
) -> None:
    server = raw("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB")
    space = server.open()
    keys = chain("c", 40)
    assert server.put(space, keys, 65536) == 40
    assert server.admin.Flush(pb.FlushRequest(deadline_ms=10_000), timeout=20).done
    assert server.kv.Evict(pb.EvictRequest(space=space, tier=pb.TIER_HOST)).copies == 40
    ids = range(1, 3001)
    waits = [
        server.kv.Prefetch.future(
            pb.PrefetchRequest(
                space=space, keys=keys[: 16 * (1 + i % 40)], ticket_id=i, wait_ms=3_600_000
            ),
            timeout=60,
        )
        for i in ids
    ]
    server.kv.CancelPrefetch(pb.CancelPrefetchRequest(ticket_ids=ids), timeout=60)
    assert all(wait.result().done for wait in waits)


def test_statistics_fit_a_message_however_many_spaces_there_are(raw: Callable[..., Raw]) -> None:
    server = raw()
    fat = spec()
    for field in ("weights_version", "layout", "kv_group", "root_seed", "tenant"):
        setattr(fat, field, "x" * 4096)
    for i in range(250):
        fat.model = str(i)
        server.kv.OpenSpace(pb.OpenSpaceRequest(spec=fat), timeout=10)
    full = server.open("full")
    assert server.put(full, chain("c", 2), 65536) == 2
    assert server.stats().counters["spaces"] == 251
    listed = server.admin.ListSpaces(pb.ListSpacesRequest(), timeout=10).spaces
    assert 0 < len(listed) < 251
    # Its blocks are what makes a space worth showing.
    assert listed[0].space == full
