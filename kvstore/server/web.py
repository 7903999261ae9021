"""What the daemon serves over HTTP: `/metrics`, the status page at `/`, its numbers.

Reading only, and nothing that names a model or a prompt: spaces are counted, not listed. The page
is one file that asks for nothing but `/status.json` here; its content security policy lets it do
nothing else. A client that is slow or silent holds one thread until its time is up; it never holds
the daemon's loop.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import re
import socket
import sys
import threading
from contextlib import contextmanager
from importlib import resources
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from kvstore.errors import ConfigError
from kvstore.server.metrics import EngineCollector
from kvstore.server.status_samples import StatusSamples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from wsgiref.types import StartResponse, WSGIEnvironment

    from kvstore.address import Address
    from kvstore.engine import Engine

__all__ = ["WebApp", "serve_web"]

log = logging.getLogger(__name__)

_TEXT: Final = "text/plain; charset=utf-8"
_SILENT_SECONDS: Final = 30.0


def _hashes(page: str, element: str) -> str:
    """Return what a content security policy says to allow a page's own inline elements."""
    found = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _since(environ: WSGIEnvironment) -> float | None:
    """Return the query's `since`, -1 when there is none, None when it is not a number."""
    text = parse_qs(environ.get("QUERY_STRING", "")).get("since", ["-1"])[-1]
    try:
        since = float(text)
    except ValueError:
        return None
    return since if math.isfinite(since) else None


class WebApp:
    """The WSGI application."""

    def __init__(self, engine: Engine, samples: StatusSamples) -> None:
        """Serve an engine's metrics, and samples of it."""
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        # The daemon's own memory, processor time, open files and start, by their usual names.
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        self._samples = samples
        page = resources.files("kvstore.server").joinpath("status_page.html").read_text("utf-8")
        self._page = page.encode()
        self._policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
            f"form-action 'none'; frame-ancestors 'none'; script-src {_hashes(page, 'script')}; "
            f"style-src {_hashes(page, 'style')}"
        )

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._send(environ, start, "405 Method Not Allowed", _TEXT, b"only GET\n")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start)
            return answer
        if path in ("", "/"):
            return self._send(environ, start, "200 OK", "text/html; charset=utf-8", self._page)
        if path == "/status.json":
            since = _since(environ)
            if since is None:
                problem = b"since: not a number of seconds\n"
                return self._send(environ, start, "400 Bad Request", _TEXT, problem)
            body = json.dumps(self._samples.answer(since), separators=(",", ":")).encode()
            return self._send(environ, start, "200 OK", "application/json", body)
        known = b"here are /, /status.json and /metrics\n"
        return self._send(environ, start, "404 Not Found", _TEXT, known)

    def _send(
        self, environ: WSGIEnvironment, start: StartResponse, status: str, kind: str, body: bytes
    ) -> list[bytes]:
        headers = [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", self._policy),
        ]
        if status.startswith("405"):
            headers.append(("Allow", "GET, HEAD"))
        start(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for our own name, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what ended a connection; browsers and scrapers leave when they like."""
        log.debug("connection from %s ended: %s", client_address, sys.exception())


def _bind(address: Address) -> _Server:
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, bound = found[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    server: _Server = kind((bound[0], bound[1]), _Handler)
    return server


@contextmanager
def serve_web(engine: Engine, boot_id: bytes, address: Address) -> Iterator[int]:
    """Serve on an address for as long as the context lasts; the value is the port.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        server = _bind(address)
    except OSError as error:
        raise ConfigError(f"metrics: cannot bind {address}: {error.strerror}") from error
    samples = StatusSamples(engine, boot_id)
    server.set_app(WebApp(engine, samples))
    thread = threading.Thread(target=server.serve_forever, name="web", daemon=True)
    samples.start()
    thread.start()
    log.info("status page and metrics: port %d", server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        samples.close()
