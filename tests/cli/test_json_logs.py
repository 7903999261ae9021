"""`serve --log-format json`: everything that a daemon prints is one JSON object a line."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvstore
from kvstore import log_lines
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc as rpc

TRACE = "0af7651916cd43dd8448eb211c80319c"
LEVELS = {"debug", "info", "warning", "error", "critical"}


def parsed(text: str) -> list[dict[str, Any]]:
    """Every line, each checked for what all have."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]), line
        assert line["level"] in LEVELS
        assert isinstance(line["message"], str)
        assert line["logger"]
    return lines


class Daemon:
    """A daemon whose whole output is kept."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.address = f"unix://{directory / 'k.sock'}"
        command = [sys.executable, "-m", "kvstore", "serve", "--listen", self.address]
        command += ["--state", str(directory / "s"), "--host-pool", "64MiB", "--no-save-host"]
        self.errors = directory / "err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--log-format", "json", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()

    def stop(self) -> str:
        """Stop it; return all that it printed."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return self.first + rest + self.errors.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def begin(*options: str) -> Daemon:
        started.append(Daemon(tmp_path, *options))
        return started[-1]

    yield begin
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.communicate()


def test_every_line_of_a_run_with_a_refused_call(start: Callable[..., Daemon]) -> None:
    daemon = start("--log-level", "debug", "--metrics", "127.0.0.1:0")
    with kvstore.Client(daemon.address, name="the client") as client:
        space = client.open_space(
            kvstore.SpaceSpec(model="m", dtype="f", block_tokens=16, shard_bytes=(4096,))
        )
        assert client.attachment.wait_active(60)
        assert space.put(kvstore.chain_keys(list(range(32)), 16), np.zeros((2, 4096), "u1")) == 2
        with grpc.insecure_channel(daemon.address.replace("unix://", "unix:")) as channel:
            stub: Any = rpc.KVStoreStub(channel)  # type: ignore[no-untyped-call]
            request = pb.AcquireRequest(
                attachment_id=client.attachment.id,
                space=space.ref,
                lease_id=0,
                keys=b"k" * 32,
                request_id="cmpl-7",
            )
            with pytest.raises(grpc.RpcError, match="lease_id"):
                stub.Acquire(request, metadata=[("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")])
    lines = parsed(daemon.stop())
    ready = next(line for line in lines if line.get("event") == "ready")
    assert ready["listen"] == daemon.address
    assert ready["message"].startswith("kvstore ready listen=")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", ready["metrics"])
    [refused] = [line for line in lines if line["message"].startswith("acquire refused")]
    assert refused["call"] == "acquire"
    assert refused["client"] == "the client"
    assert refused["request"] == "cmpl-7"
    assert refused["trace_id"] == TRACE
    assert refused["level"] == "debug"
    [attached] = [line for line in lines if "mapped True" in line["message"]]
    assert attached["client"] == "the client"
    assert any("SIGTERM" in line["message"] for line in lines)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--io-threads", "0"], 1, "io_threads"),
        (["--io-threads", "many"], 2, "io-threads"),
        (["--state", "/proc/nowhere"], 1, "state: "),
        (["--listen", "127.0.0.1:1", "--listen", "127.0.0.1:1"], 1, "listen: "),
    ],
)
def test_what_keeps_it_from_starting(
    tmp_path: Path, options: list[str], code: int, said: str
) -> None:
    where = ["--state", str(tmp_path / "s")] if "--state" not in options else []
    done = subprocess.run(
        [*(sys.executable, "-m", "kvstore", "serve", "--log-format=json"), *where, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code
    lines = parsed(done.stdout + done.stderr)
    assert lines[-1]["level"] == "error"
    assert said in lines[-1]["message"]
    assert len([line for line in lines if line["level"] == "error"]) == 1


def test_the_format_of_a_file_with_an_error(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('log_format = "json"\nhost_pool = "much"\n')
    done = subprocess.run(
        [*(sys.executable, "-m", "kvstore", "serve", "--config", str(file))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    [line] = parsed(done.stderr)
    assert "host_pool" in line["message"]


def test_an_address_that_is_taken(start: Callable[..., Daemon], tmp_path: Path) -> None:
    first = start("--listen", "127.0.0.1:0")
    port = re.search(r"127\.0\.0\.1:(\d+)", json.loads(first.first)["listen"])
    assert port is not None
    command = [sys.executable, "-m", "kvstore", "serve", "--log-format", "json"]
    command += ["--state", str(tmp_path / "other"), "--host-pool", "64MiB"]
    done = subprocess.run(
        [*command, "--listen", f"127.0.0.1:{port[1]}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # Also where gRPC's core would say something.
        env={key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"},
    )
    assert done.returncode == 1
    assert "cannot bind" in parsed(done.stdout + done.stderr)[-1]["message"]
    parsed(first.stop())


@pytest.fixture
def printed() -> Iterator[tuple[logging.Handler, io.StringIO]]:
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    root, stream = logging.getLogger(), io.StringIO()
    handler = log_lines.install()
    handler.setStream(stream)
    root.addHandler(handler)
    yield handler, stream
    root.removeHandler(handler)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def test_what_is_printed_past_loggers_is_a_line_too(
    printed: tuple[logging.Handler, io.StringIO],
) -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    thread = threading.Thread(target=fail, name="worker")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    logging.getLogger("x").warning("a %s", "b", extra={"tier": "disk", "path": Path("/p")})
    in_thread, warned, uncaught, plain = parsed(printed[1].getvalue())
    assert "thread worker" in in_thread["message"]
    assert "ValueError: two\nlines" in in_thread["exception"]
    assert "careful" in warned["message"]
    assert uncaught["level"] == "critical"
    assert plain["message"] == "a b"
    assert (plain["tier"], plain["path"]) == ("disk", "/p")


def test_a_line_that_cannot_be_made_is_told_about(
    printed: tuple[logging.Handler, io.StringIO],
) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "%d", "args": ("one",), "pathname": "p.py"})
    printed[0].handle(record)
    [line] = parsed(printed[1].getvalue())
    assert "p.py" in line["message"]
    assert "TypeError" in line["exception"]
