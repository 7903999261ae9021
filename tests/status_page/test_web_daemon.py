"""A daemon's HTTP side: the page, its numbers, the metrics, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore

_TIMEOUT = 60.0
Answer = tuple[int, dict[str, str], str]
Ask = Callable[..., Answer]


@pytest.fixture
def served(start_daemon: Any) -> Any:
    """A daemon that serves HTTP on a free port, which its log tells."""
    return start_daemon("--metrics", "127.0.0.1:0")


def _port(daemon: Any) -> int:
    found = re.search(r"status page and metrics: port (\d+)", daemon.log.read_text())
    assert found is not None
    return int(found[1])


@pytest.fixture
def ask(served: Any) -> Ask:
    port = _port(served)

    def asked(path: str, method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    return asked


def test_the_page_is_allowed_its_own_script_and_style_only(ask: Ask) -> None:
    status, headers, page = ask("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    head, head_headers, nothing = ask("/", "HEAD")
    assert (head, nothing) == (200, "")
    assert head_headers["Content-Length"] == headers["Content-Length"]


def test_numbers_are_those_of_the_daemon(served: Any, ask: Ask, until: Any) -> None:
    spec = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(65536,))
    keys = kvstore.chain_keys(list(range(64)), 16)
    with kvstore.Client(served.address) as client:
        space = client.open_space(spec)
        assert space.put(keys, np.ones((4, 65536), np.uint8)) == 4
        assert space.get(keys, np.empty((4, 65536), np.uint8)) == 4

        def numbers() -> Any:
            status, headers, body = ask("/status.json")
            assert (status, headers["Content-Type"]) == (200, "application/json")
            return json.loads(body)

        # A look is a second old at most.
        until(lambda: numbers()["now"]["tiers"][0]["hit_blocks"] == 4)
        answer, stats = numbers(), client.stats()
        assert answer["boot_id"] == stats.boot_id.hex()
        (host,) = answer["now"]["tiers"]
        assert (host["tier"], host["state"]) == ("host", "ok")
        assert host["blocks"] == stats.tiers[0].blocks == 4
        assert host["used_bytes"] == stats.tiers[0].used_bytes
        assert answer["samples"][0]["at"] <= answer["now"]["at"]
        latest = answer["samples"][-1]["at"]
        rest = json.loads(ask(f"/status.json?since={latest}")[2])["samples"]
        assert all(sample["at"] > latest for sample in rest)
    status, _, metrics = ask("/metrics")
    assert status == 200
    assert 'kvstore_tier_blocks{tier="host"} 4.0' in metrics


@pytest.mark.parametrize(
    ("path", "method", "status", "told"),
    [
        ("/other", "GET", 404, "/status.json"),
        ("/../../etc/passwd", "GET", 404, "/status.json"),
        ("/", "POST", 405, "only GET"),
        ("/status.json?since=soon", "GET", 400, "since"),
        ("/status.json?since=nan", "GET", 400, "since"),
    ],
)
def test_what_is_refused(ask: Ask, path: str, method: str, status: int, told: str) -> None:
    answered, _, body = ask(path, method)
    assert answered == status
    assert told in body


def test_silent_and_rude_clients_hold_nobody_up(served: Any, ask: Ask) -> None:
    where = ("127.0.0.1", _port(served))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            silent = stack.enter_context(socket.create_connection(where))
        silent.sendall(b"GET / HTTP/1.1\r\nX: ")
        rude = stack.enter_context(socket.create_connection(where))
        rude.sendall(b"\x16\x03\x01\x00\xff rubbish\r\n\r\n")
        assert ask("/status.json")[0] == 200
        # They do not keep the daemon from stopping either.
        assert served.stop() == 0
    assert "Traceback" not in served.log.read_text()


def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "kvstore", "serve", "--state", str(tmp_path / "s")]
        command += ["--listen", f"unix://{tmp_path / 'k'}", "--host-pool", "64MiB"]
        done = subprocess.run(
            [*command, "--metrics", address],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    assert done.returncode == 1
    (line,) = [said for said in done.stderr.splitlines() if said.startswith("kvstore: ")]
    assert line == f"kvstore: metrics: cannot bind {address}: Address already in use"
    assert "Traceback" not in done.stderr


def test_every_field_is_documented(ask: Ask) -> None:
    told = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    answer = json.loads(ask("/status.json")[2])
    sample = answer["now"]
    fields = {*answer, *answer["timings"][0], *sample, *sample["tiers"][0]}
    fields |= {*sample["evictions"], *sample["queue"]}
    assert {field for field in fields if f"`{field}`" not in told} == set()
    # `usage` is the contract's.
    contract = (Path(__file__).parents[2] / "proto" / "kvstore.proto").read_text()
    assert {field for field in sample["usage"] if f" {field} = " not in contract} == set()
