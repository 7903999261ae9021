"""Takes spans as a collector of OpenTelemetry does."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    for attribute in resource.resource.attributes:
                        if attribute.key == "service.name":
                            collector.services.add(attribute.value.string_value)
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
