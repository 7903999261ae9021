"""What a daemon records is what was asked for, hides the keys, and replays as it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.engine.counters import Counters
from kvstore.engine.recorder import TRACE_VERSION, Recorder
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.index import BlockIndex, SpaceIndex
from kvstore.replay import CostModel, Simulation, TraceFormat, open_trace, parse_blocks, replay
from kvstore.replay import recorded as reader
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot

SPEC = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(65536,))


def space_of(spec: SpaceSpec = SPEC) -> SpaceIndex:
    return SpaceIndex(spec.fingerprint, spec, 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_daemon_records_and_the_replay_hits_what_it_hit(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    daemon = start_daemon("--record", str(trace))
    rows = np.zeros((40, 65536), np.uint8)
    long, short = (kvstore.chain_keys(np.arange(n * 16), 16) for n in (40, 12))
    other = kvstore.chain_keys(np.arange(1, 161), 16)
    with kvstore.Client(daemon.address, timeout_s=60) as client:
        space = client.open_space(SPEC)
        hits = []
        for keys in (short, long, other, long[:30], other):
            hits.append(space.get(keys, rows, timeout_s=60))
            space.put(keys, rows[: len(keys)], timeout_s=60)
        assert space.lookup(other).blocks == 10
    assert daemon.stop() == 0
    assert hits == [0, 12, 0, 30, 10]

    lines = lines_of(trace)
    assert lines[0]["kvstore_trace"] == TRACE_VERSION == reader.TRACE_VERSION
    assert lines[1] == {"space": 0, "block_tokens": 16, "block_bytes": 65536}
    ops = [line["op"] for line in lines[2:]]
    assert (ops.count("load"), ops.count("store")) == (5, 3)
    # A store looks first what is there.
    assert ops.count("look") + 8 == len(ops)
    assert ops[-1] == "look"
    stores = [line for line in lines if line.get("op") == "store"]
    # The second chain was stored below the end of the first.
    assert stores[1]["parent"] == stores[0]["keys"][-16:]
    # Nothing of a key is in the file.
    text = trace.read_text()
    assert not any(key.hex()[at : at + 8] in text for key in long for at in (0, 16, 24))

    opened = open_trace(str(trace), token_bytes=1)
    assert opened.format is TraceFormat.KVSTORE
    simulation = Simulation(parse_blocks("unlimited")[0], opened.spaces, CostModel())
    (result,) = replay(opened, [simulation])
    opened.close()
    assert (result.requests, result.host_blocks) == (5, sum(hits))
    assert result.blocks == 12 + 40 + 10 + 30 + 10
    assert result.pool.stored == 50
    command = [sys.executable, "-m", "kvstore", "replay", str(trace), "--blocks", "5", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    document = json.loads(done.stdout)
    assert document["trace"]["block_bytes"] == 65536
    # Five blocks: the heads of the last chain.
    assert document["hit_blocks_host"] < 30


def run_of(space: SpaceIndex, names: str, index: BlockIndex) -> list[Any]:
    slots = [Slot(0, n) for n in range(len(names))]
    return index.insert_run(space, [name.encode() * 16 for name in names], None, slots)


def test_stores_are_split_where_chains_part(tmp_path: Path) -> None:
    path, counters = tmp_path / "t", Counters()
    recorder = Recorder(path, counters)
    index = BlockIndex(lambda _: None, lambda *_: None)
    space = space_of()
    one, two = run_of(space, "abc", index), run_of(space, "de", index)
    recorder.start()
    recorder.store([*one[1:], *two])
    recorder.close()
    recorder.close()
    stores = lines_of(path)[2:]
    assert [len(line["keys"]) // 16 for line in stores] == [2, 2]
    assert ["parent" in line for line in stores] == [True, False]
    assert counters.counts["recorded_events"] == 2


def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path: Path) -> None:
    path, counters = tmp_path / "t", Counters()
    recorder = Recorder(path, counters, queued_keys=10)
    space = space_of()
    keys = [bytes([n]) * 16 for n in range(6)]
    # Nothing is written before the start: the second does not fit.
    recorder.load(space, keys, None)
    recorder.load(space, keys, None)
    recorder.look(space, keys[:4], keys[4])
    recorder.start()
    recorder.close()
    assert counters.counts["recording_dropped_events"] == 1
    assert counters.counts["recorded_events"] == 2
    lines = lines_of(path)
    assert [line.get("op", "") for line in lines] == ["", "", "load", "", "look"]
    assert lines[3]["dropped"] == 1


def test_a_full_disk_ends_the_recording_and_nothing_else(
    until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    recorder = Recorder(Path("/dev/full"), counters)
    recorder.start()
    space = space_of()

    def dropped() -> int:
        recorder.load(space, [b"k" * 16], None)
        return counters.counts["recording_dropped_events"]

    until(dropped, 60)
    recorder.close()
    assert "recording ends: /dev/full: No space left" in caplog.text
    with pytest.raises(ConfigError, match="record: /no/such/file: No such file"):
        Recorder(Path("/no/such/file"), counters)


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    keys = [bytes([n]) * 16 for n in range(4)]
    wide = SpaceSpec(model="w", dtype="bfloat16", block_tokens=32, shard_bytes=(131072,))
    for spec in (SPEC, wide):
        recorder = Recorder(path, Counters())
        recorder.start()
        for _ in range(2):
            recorder.load(space_of(spec), keys, None)
            time.sleep(0.001)
        recorder.close()
    trace = open_trace(str(path), token_bytes=1)
    requests = list(trace)
    trace.close()
    assert [trace.spaces[r.space].block_tokens for r in requests] == [16, 16, 32, 32]
    assert [r.at for r in requests] == sorted(r.at for r in requests)
    # Another start hashes with another secret.
    assert not set(requests[0].keys) & set(requests[2].keys)
    assert requests[0].keys == requests[1].keys


HEAD = '{"kvstore_trace":1,"unix_seconds":0}\n{"space":0,"block_tokens":16,"block_bytes":4096}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"kvstore_trace":2}', "kvstore_trace: version 2, not 1"),
        ('{"at":0,"op":"load","space":1,"keys":""}', "space: 1 was not described"),
        ('{"at":0,"op":"jump","space":0,"keys":""}', "op: 'jump' is none of"),
        ('{"at":0,"op":"load","space":0,"keys":"00"}', "keys: no multiple of 16"),
        ('{"at":0,"op":"load","space":0,"keys":"zzzzzzzzzzzzzzzz"}', "keys: are no hexadecimal"),
        ('{"at":-1,"op":"load","space":0,"keys":""}', "at: -1 is no time"),
        ('{"space":1,"block_tokens":0,"block_bytes":1}', "block_tokens: 0 is no number"),
    ],
)
def test_a_bad_line_of_a_recording_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "t"
    path.write_text(HEAD + line + "\n")
    trace = open_trace(str(path), token_bytes=1)
    with pytest.raises(InvalidRequest, match=f"^{path}:3: {problem}"):
        list(trace)
    trace.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_line_that_was_cut_short_costs_one_event(tmp_path: Path, again: bool) -> None:
    trace = tmp_path / "trace.jsonl"
    space, keys = space_of(), [bytes([n]) * 16 for n in range(3)]

    def record() -> None:
        recorder = Recorder(trace, Counters())
        recorder.start()
        for key in keys:
            recorder.load(space, [key], None)
        recorder.close()

    record()
    # As a full disk, or a kill, leaves it.
    trace.write_bytes(trace.read_bytes()[:-5])
    if again:
        record()
        assert trace.read_text().count("kvstore_trace") == 2
    opened = open_trace(str(trace), token_bytes=1)
    assert len(list(opened)) == (5 if again else 2)
    assert opened.dropped == 1
    opened.close()
    # What is wrong in the middle is no rest of a line.
    trace.write_text(trace.read_text().replace('"op"', "op", 1))
    opened = open_trace(str(trace), token_bytes=1)
    with pytest.raises(InvalidRequest, match="trace.jsonl:3: is no JSON"):
        list(opened)
    opened.close()


def test_a_fifo_is_no_file_to_record_to(tmp_path: Path) -> None:
    # Opening one waits for a reader, who may never come.
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=f"^record: {tmp_path}/fifo: is a FIFO$"):
        Recorder(tmp_path / "fifo", Counters())
    Recorder(Path("/dev/null"), Counters()).close()
