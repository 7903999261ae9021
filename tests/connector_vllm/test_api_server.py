"""A real API server with the connector: vLLM's own `/metrics`, and a request's trace."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_engine import ENVIRONMENT, MODEL, transfer_config

sys.path.insert(0, str(Path(__file__).parents[1] / "tracing"))

from otlp_collector import Collector

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 530  # four stored blocks of 128 tokens, 18 left
START_SECONDS = 400.0


class Server:
    """What `vllm serve` runs: an API server whose engine is a process of its own."""

    def __init__(self, target: str, log: Path, collector: str) -> None:
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
        command += ["--otlp-traces-endpoint", f"{collector}/v1/traces"]
        environment = {
            **ENVIRONMENT,
            "VLLM_LOGGING_LEVEL": "INFO",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
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

    def complete(self, prompt: list[int], **headers: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json", **headers},
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


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def daemon(
    new_daemon: Any, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("daemon")
    running = new_daemon(
        directory,
        *("--host-pool", "256MiB", "--log-format", "json"),
        *("--disk", str(directory / "disk"), "--disk-capacity", "256MiB"),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    yield running.start()
    running.end()


@pytest.fixture(scope="module")
def server(
    daemon: Any, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    started = Server(daemon.address, log, collector.url)
    try:
        end = time.monotonic() + START_SECONDS
        while not started.up():
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        yield started
    finally:
        started.end()


def test_a_server_shows_what_it_loads_and_stores(
    server: Server, until: Callable[..., None]
) -> None:
    before = server.scrape()
    assert {"hit_tokens_total/disk", "load_seconds_count", "lookup_failures_total"} <= set(before)

    def gained(name: str) -> float:
        return server.scrape()[name] - before[name]

    prompt = random.Random(1).choices(range(1000, 40000), k=LENGTH)
    cold = server.complete(prompt)
    # The last stores are told with the next step: an unrelated request's.
    unrelated = random.Random(2).choices(range(1000, 40000), k=20)
    asked = 0

    def told(name: str) -> bool:
        nonlocal asked
        asked += 1
        server.complete(unrelated)
        return gained(name) > 0

    until(lambda: told("stored_bytes_total"), 200.0)
    warm = server.complete(prompt)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    until(lambda: told("hit_tokens_total/host"), 200.0)
    assert gained("hit_tokens_total/host") == 512
    assert gained("load_seconds_count") == 1
    assert gained("load_seconds_sum") > 0
    assert gained("store_seconds_count") >= 1
    # A prompt shorter than a block is not asked for.
    assert gained("lookup_seconds_count") == 2
    assert gained("loaded_bytes_total") == gained("stored_bytes_total")
    assert gained("prompt_tokens_total") == 2 * LENGTH + asked * 20
    found = server.scrape()
    assert not {name: found[name] for name in found if "failures_total" in name and found[name]}


def test_a_request_s_trace_goes_from_its_header_to_the_daemon_and_the_worker(
    server: Server, collector: Collector, until: Callable[..., None]
) -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    stored = "4bf92f3577b34da6a3ce929d0e0e4736"
    prompt = random.Random(3).choices(range(1000, 40000), k=LENGTH)
    server.complete(prompt, traceparent=f"00-{stored}-{caller}-01")
    unrelated = random.Random(4).choices(range(1000, 40000), k=20)

    def hit() -> bool:
        server.complete(unrelated)  # stores and their telling go on in its steps
        before = server.scrape()["hit_tokens_total/host"]
        server.complete(prompt, traceparent=f"00-{trace}-{caller}-01")
        server.complete(unrelated)
        return server.scrape()["hit_tokens_total/host"] > before

    until(hit, 200.0)

    def named(name: str, within: str = trace) -> list[Any]:
        return [span for span in collector.named(name) if span.trace_id.hex() == within]

    until(lambda: named("kvstore.load") and named("kvstore.acquire"), 60.0)
    lookups = {span.span_id for span in named("kvstore.lookup")}
    assert {span.parent_span_id for span in named("kvstore.acquire")} <= lookups
    # vLLM's own span is in the same trace; it exports every few seconds.
    until(lambda: named("llm_request"), 60.0)
    [load] = named("kvstore.load")[:1]
    attributes = {a.key: a.value for a in load.attributes}
    assert attributes["kvstore.blocks"].int_value == 4
    assert attributes["kvstore.loaded_bytes"].int_value > 0

    # What the first request computed went from the worker to the daemon and on to its disk.
    # Engine and daemon export each in their own time.
    def followed() -> bool:
        stores = {span.span_id for span in named("kvstore.store", stored)}
        commits = {s.span_id for s in named("kvstore.commit", stored) if s.parent_span_id in stores}
        writes = named("kvstore.flush", stored)
        return bool(writes) and all(span.parent_span_id in commits for span in writes)

    until(followed, 60.0)
