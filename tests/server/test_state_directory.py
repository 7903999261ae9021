"""A state directory that is full or falls apart: one line each, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_calls import Raw, chain, status

from kvstore.config import load_config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.proto import kvstore_pb2 as pb
from kvstore.regular_file import read_regular
from kvstore.server import serve


def test_a_full_state_directory_is_refused_before_its_index_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # LMDB would map what cannot be written: SIGBUS, and no line at all.
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = tmp_path / "s"
    index = state / "index.mdb"
    index.mkdir(parents=True)
    (index / "data.mdb").write_bytes(b"as it was")
    monkeypatch.setattr(os, "posix_fallocate", full)
    # What a daemon does to its process, this one needs as it is.
    monkeypatch.setattr("kvstore.server.daemon.set_up_logging", lambda config: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    config = load_config(
        {"state": str(state), "listen": [f"unix://{tmp_path}/k"], "host_pool": "16MiB"}
    )
    with pytest.raises(ConfigError, match=f"^state: {state} needs .*: No space left on device$"):
        serve(config)
    assert (index / "data.mdb").read_bytes() == b"as it was"
    assert sorted(p.name for p in state.iterdir()) == ["index.mdb", "lock"]


def test_a_store_that_fails_is_unavailable_and_what_is_cached_is_served_on(
    raw: Callable[..., Raw],
) -> None:
    server = raw()
    space = server.open()
    keys = chain("c", 4)
    assert server.put(space, keys, 65536) == 4
    epochs = server.daemon.directory / "s" / "epochs"
    epochs.unlink()
    epochs.mkdir()
    code, message = status(
        lambda: server.kv.BumpEpoch(pb.BumpEpochRequest(space=space), timeout=10)
    )
    assert code is grpc.StatusCode.UNAVAILABLE
    assert message.startswith("state tier: ")
    assert "Is a directory" in message
    log = server.daemon.log.read_text()
    assert "Traceback" not in log
    assert "bumpepoch failed" in log
    # Nothing has changed: the epoch is the old one.
    assert server.kv.Lookup(pb.LookupRequest(space=space, keys=keys)).blocks == 4
    epochs.rmdir()
    assert server.kv.BumpEpoch(pb.BumpEpochRequest(space=space)).space.epoch > space.epoch


@pytest.mark.parametrize("name", ["epochs", "host-index", "write-budget", "speeds"])
def test_a_fifo_in_place_of_a_file_is_no_file(tmp_path: Path, name: str) -> None:
    # Opening one waits for somebody who writes: a start would never end.
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"is no regular file: .*{name}"):
        read_regular(tmp_path / name)
    with pytest.raises(OSError, match="is no regular file"):
        read_regular(Path("/dev/zero"))
    with pytest.raises(OSError, match=f"Is a directory: '{tmp_path}'"):
        read_regular(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_regular(tmp_path / "link", 4) == b"1234"
    with pytest.raises(OSError, match="has 4 bytes"):
        read_regular(tmp_path / "link", 3)


def test_odd_files_in_a_state_directory_hold_up_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.daemon.set_up_logging", lambda config: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    names = ["lock", "epochs", "index.mdb/data.mdb", "index.mdb/lock.mdb", "index.mdb/seal"]
    for number, name in enumerate([*names, "disk/store-id"]):
        state = tmp_path / str(number)
        (state / name).parent.mkdir(parents=True)
        os.mkfifo(state / name)
        config = load_config(
            {
                "state": str(state),
                "disk": str(state / "disk"),
                "listen": [f"unix://{tmp_path}/k"],
                "host_pool": "16MiB",
            }
        )
        with pytest.raises(KVStoreError, match=rf"{state / name}|{state}/disk: .*store-id"):
            serve(config)
        # Neither moved nor taken for damage: whoever put it there may take it away again.
        assert (state / name).is_fifo()
        assert not list(state.glob("*.damaged-*"))


def test_a_fifo_that_waits_for_a_record_holds_up_no_stop(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = start_daemon("--disk", str(tmp_path / "disk"), "--disk-budget", "1GiB")
    for name in ("disk-budget.tmp", "host-index.tmp", "speeds.new", "index.mdb/seal.new"):
        os.mkfifo(daemon.directory / "s" / name)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()
