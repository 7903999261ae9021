"""vLLM's own `/metrics`, of a real API server with the connector."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_engine import ENVIRONMENT, MODEL, transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 530  # four stored blocks of 128 tokens, 18 left
START_SECONDS = 400.0


class Server:
    """What `vllm serve` runs: an API server whose engine is a process of its own."""

    def __init__(self, target: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        # Not by `vllm serve`, which asks for a distribution of that very name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        command += ["--no-enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
        command += ["--kv-transfer-config", json.dumps(transfer_config({"target": target}))]
        environment = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("vllm:kvstore_") and "le" not in sample.labels:
                    tier = sample.labels.get("tier")
                    name = sample.name.removeprefix("vllm:kvstore_")
                    found[f"{name}/{tier}" if tier else name] = sample.value
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture
def server(
    start_daemon: Callable[..., Any], tmp_path: Path, until: Callable[..., None]
) -> Iterator[Server]:
    started = Server(start_daemon("--host-pool", "256MiB").address, tmp_path / "vllm.log")
    try:
        until(started.up, START_SECONDS)
        yield started
    finally:
        started.end()


def test_a_server_shows_what_it_loads_and_stores(
    server: Server, until: Callable[..., None]
) -> None:
    before = server.scrape()
    assert before["hit_tokens_total/host"] == before["load_seconds_count"] == 0
    prompt = random.Random(1).choices(range(1000, 40000), k=LENGTH)
    cold = server.complete(prompt)
    # The last stores are told with the next step: an unrelated request's.
    unrelated = random.Random(2).choices(range(1000, 40000), k=20)
    asked = 1

    def stored() -> bool:
        nonlocal asked
        asked += 1
        server.complete(unrelated)
        return server.scrape()["stored_bytes_total"] > 0

    until(stored, 200.0)
    warm = server.complete(prompt)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]

    def told() -> bool:
        server.complete(unrelated)
        return server.scrape()["hit_tokens_total/host"] > 0

    until(told, 200.0)
    found = server.scrape()
    assert found["hit_tokens_total/host"] == 512
    assert found["load_seconds_count"] == 1
    assert found["load_seconds_sum"] > 0
    assert found["store_seconds_count"] >= 1
    assert found["lookup_seconds_count"] == 2, "a prompt shorter than a block is not asked for"
    assert found["loaded_bytes_total"] == found["stored_bytes_total"]
    assert found["prompt_tokens_total"] >= 2 * LENGTH + asked * 20
    assert not {name: found[name] for name in found if "failures_total" in name and found[name]}
