"""How long a client's operations take: as its program sees it, and as the daemon's metrics show it."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.attach.times import TimesLog
from kvstore.buckets import BUCKET_SECONDS, Buckets
from kvstore.errors import InvalidRequest

SPEC = kvstore.SpaceSpec(model="m", dtype="f", block_tokens=16, shard_bytes=(4096,))
KEYS = kvstore.chain_keys(list(range(64)), 16)
BLOCKS = np.zeros((4, 4096), np.uint8)


def test_buckets_hold_any_number_of_samples() -> None:
    buckets = Buckets()
    assert (buckets.count, buckets.quantile(0.5)) == (0, 0.0)
    for seconds in (1e-7, 3e-6, 3e-6, 0.004, 1e3):
        buckets.add(seconds)
    assert buckets.count == 5
    assert [buckets.counts[at] for at in (0, 2, -1)] == [1, 2, 1]
    assert buckets.longest == 1e3
    assert [buckets.quantile(share) for share in (0.2, 0.6, 0.8, 1.0)] == [1e-6, 5e-6, 0.005, 1e3]
    buckets.merge([1], 1e-6, 1e-6)
    assert (buckets.counts[0], buckets.longest) == (2, 1e3)
    short = Buckets()
    short.add(0.0011)
    assert short.quantile(0.99) == 0.0011, "no longer than the longest"


def test_what_was_told_is_not_told_again_and_stays_with_the_program() -> None:
    log = TimesLog()

    def add() -> None:
        for _ in range(1000):
            log.add("load", 0.001)

    threads = [threading.Thread(target=add) for _ in range(4)]
    told = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        told += sum(sum(message.buckets) for message in log.take())
    for thread in threads:
        thread.join()
    told += sum(sum(message.buckets) for message in log.take())
    assert told == log.seen()["load"].count == 4000
    assert log.take() == []
    assert set(log.seen()) == {"load"}
    assert log.seen()["load"].total == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("operation", "seconds"), [("get", 1.0), ("load", -1.0), ("load", float("nan"))]
)
def test_what_is_no_time_is_refused(operation: str, seconds: float) -> None:
    log = TimesLog()
    with pytest.raises(InvalidRequest):
        log.add(operation, seconds)
    assert log.take() == []


def test_metrics_show_the_times_of_all_clients(
    start_daemon: Callable[..., Any], until: Callable[..., None]
) -> None:
    daemon = start_daemon("--metrics", "127.0.0.1:0")
    said = re.search(r"metrics: port (\d+)", daemon.log.read_text())
    assert said is not None

    def counts() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{said[1]}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return {
            sample.labels["operation"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "kvstore_client_seconds_count"
        }

    assert counts() == {"lookup": 0, "load": 0, "store": 0}
    # One maps memory, one streams.
    for address in (daemon.address, daemon.tcp):
        with kvstore.Client(address) as client:
            space = client.open_space(SPEC)
            streamed = b"streamed" if address == daemon.tcp else b""
            keys = kvstore.chain_keys(list(range(64)), 16, streamed)
            assert space.put(keys, BLOCKS) == 4
            assert space.put(keys, BLOCKS) == 4, "stores nothing"
            assert len(space.get(keys)) == 4
            assert len(space.get(kvstore.chain_keys([7] * 64, 16))) == 0, "loads nothing"
            assert space.lookup(keys).blocks == 4
            client.report_time("load", 2.0)
            times = client.times()
            assert (times["store"].count, times["load"].count) == (1, 2)
            assert times["load"].longest == 2.0
            assert 0 < times["store"].p50 <= times["store"].longest
            assert len(times["store"].buckets) == len(BUCKET_SECONDS) + 1
            assert times["lookup"].count >= 1
    until(lambda: counts()["load"] == 4)
    assert counts()["store"] == 2

    async def use() -> None:
        async with kvstore.AsyncClient(daemon.address) as client:
            space = await client.open_space(SPEC)
            assert len(await space.get(KEYS)) == 4
            assert client.times()["load"].count == 1

    asyncio.run(use())
    until(lambda: counts()["load"] == 5)
    with kvstore.Client(daemon.address) as client:
        timings = {timing.name: timing for timing in client.stats().timings}
    load = timings["client_load"]
    assert (load.count, load.max_seconds) == (5, 2.0)
    assert 0 < load.p50_seconds <= load.p99_seconds == 2.0
