"""Which request a piece of work belongs to: W3C trace context, and OpenTelemetry spans.

A *traceparent* is what the W3C header of that name says: the id of a trace, and of the span in it
that asked. It travels as gRPC metadata, and is passed on whether or not anybody records spans.

Spans are recorded where OpenTelemetry is installed and set up, which happens in two ways:

* A program that uses the client, vLLM among them, sets up OpenTelemetry for itself; our spans go to
  its tracer provider, a second later at most. A client never sets up anything.
* The daemon calls `set_up`, which does what OpenTelemetry's environment variables ask for, and
  nothing unless one of them does.

Anywhere else `span` returns `OFF`, which does nothing; that costs a dictionary look-up. What goes
wrong in an exporter, or in a sampler or span processor of the program around us, is never a
caller's business: nothing here raises but `set_up` and `use_provider`. It is logged once, and what
cannot be begun is not recorded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final, Self

from kvstore import log_lines

__all__ = [
    "OFF",
    "Span",
    "TracingUnavailable",
    "batch_span",
    "carried",
    "close",
    "current",
    "metadata",
    "recording",
    "set_up",
    "span",
    "trace_id",
    "use_provider",
    "using",
    "wanted",
]

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# A collector that is gone must not hold up a stop.
_CLOSE_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 1.0

# Of the work that this thread or task does now.
_current: Final[ContextVar[str]] = ContextVar("kvstore_traceparent", default="")
_tracer: Any = None
_looked = -1.0
_provider: Any = None
_log: Final = logging.getLogger(__name__)
_told = False


class TracingUnavailable(Exception):
    """Spans were asked for and cannot be recorded; the message says why."""


def trace_id(traceparent: str) -> str:
    """Return the trace's id, 32 hexadecimal digits; "" when the text is no traceparent."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else ""


@contextmanager
def _contained() -> Iterator[None]:
    """Let nothing that OpenTelemetry raises come through."""
    global _told
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the boundary to what the program has plugged in
        if not _told:
            _told = True
            _log.warning("a span is not recorded: %r", error, exc_info=True)


def _find_tracer() -> Any:
    """Return the tracer to use, or None. Finds what the program around us has set up meanwhile.

    It is looked for once a second: OpenTelemetry takes a microsecond to say that nobody has.
    """
    global _tracer, _looked
    if _tracer is not None:
        return _tracer
    api = sys.modules.get("opentelemetry.trace")
    if api is None or (now := time.monotonic()) - _looked < _LOOK_SECONDS:
        return None
    _looked = now
    proxy = getattr(api, "ProxyTracerProvider", None)
    if proxy is not None:
        with _contained():
            provider = api.get_tracer_provider()
            if not isinstance(provider, proxy):
                _tracer = provider.get_tracer("kvstore")
    return _tracer


def recording() -> bool:
    """Return whether `set_up` or `use_provider` has begun recording. Costs next to nothing."""
    return _tracer is not None


def use_provider(provider: Any) -> None:
    """Record with an OpenTelemetry tracer provider; None: with what the program sets up, if it does."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("kvstore")


def carried() -> str:
    """Return the traceparent of the span that was made current here; "" for none."""
    return _current.get()


def current() -> str:
    """Return the traceparent of what is being done now; "" for none."""
    own = _current.get()
    if own or _find_tracer() is None:
        return own
    text = ""
    with _contained():
        from opentelemetry import trace

        text = _as_text(trace.get_current_span().get_span_context())
    return text


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Return what a call to the daemon carries; None for nothing."""
    traceparent = current()
    return (("traceparent", traceparent),) if traceparent else None


def _as_text(context: Any) -> str:
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _as_context(traceparent: str) -> Any:
    """Return OpenTelemetry's span context; None when the text is no traceparent."""
    from opentelemetry.trace import SpanContext, TraceFlags

    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    return SpanContext(
        int(match[1], 16),
        int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
    )


class Span:
    """One piece of work. As a context manager it is the current one, and ends with the block.

    Attributes:
        traceparent: names it to others; what was given as parent when nothing is recorded.
    """

    __slots__ = ("_span", "_token", "traceparent")

    def __init__(self, traceparent: str, recorded: Any = None) -> None:
        """Made by `span`."""
        self.traceparent = traceparent
        self._span = recorded
        self._token: Token[str] | None = None

    def set(self, **attributes: Any) -> None:
        """Say more about it, as attributes `kvstore.NAME`."""
        if self._span is not None:
            with _contained():
                self._span.set_attributes({f"kvstore.{name}": v for name, v in attributes.items()})

    def fail(self, why: str) -> None:
        """Mark it as failed."""
        if self._span is not None:
            with _contained():
                from opentelemetry.trace import Status, StatusCode

                self._span.set_status(Status(StatusCode.ERROR, why))

    def adopt(self) -> None:
        """Make it the current one for the rest of this task or thread."""
        if self.traceparent:
            _current.set(self.traceparent)

    def end(self) -> None:
        """End it. Idempotent."""
        recorded, self._span = self._span, None
        if recorded is not None:
            with _contained():
                recorded.end()

    def __enter__(self) -> Self:
        """Begin to be the current one."""
        if self.traceparent:
            self._token = _current.set(self.traceparent)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Be it no more, and end; as failed when an error comes through."""
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        if kind is not None:
            self.fail(f"{kind.__name__}: {error}")
        self.end()


OFF: Final = Span("")


@contextmanager
def using(span: Span) -> Iterator[None]:
    """Make a span current that ends later, by somebody else."""
    if not span.traceparent:
        yield
        return
    token = _current.set(span.traceparent)
    try:
        yield
    finally:
        _current.reset(token)


def span(
    name: str,
    *,
    parent: str = "",
    kind: str = "internal",
    links: Iterable[str] = (),
    **attributes: Any,
) -> Span:
    """Begin a span.

    Args:
        name: of the operation; takes few values.
        parent: traceparent of who asks; "": what is current, if anything is.
        kind: internal, client or server.
        links: traceparents of others that this work is for.
        **attributes: numbers and text, recorded as `kvstore.NAME`.
    """
    parent = parent or _current.get()
    tracer = _find_tracer()
    if tracer is not None:
        with _contained():
            return _start(tracer, name, parent, kind, links, attributes)
    return Span(parent) if parent and trace_id(parent) else OFF


def _start(
    tracer: Any,
    name: str,
    parent: str,
    kind: str,
    links: Iterable[str],
    attributes: dict[str, Any],
) -> Span:
    """Begin a recorded span; raises what OpenTelemetry likes."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    above = _as_context(parent) if parent else None
    within = None
    if above is not None:
        within = trace.set_span_in_context(trace.NonRecordingSpan(above), Context())
    others = [trace.Link(linked) for text in links if (linked := _as_context(text)) is not None]
    recorded = tracer.start_span(
        name,
        context=within,
        kind=trace.SpanKind[kind.upper()],
        links=others,
        attributes={f"kvstore.{key}": value for key, value in attributes.items()},
    )
    return Span(_as_text(recorded.get_span_context()), recorded)


def batch_span(name: str, traceparents: Iterable[str], **attributes: Any) -> Span:
    """Begin the span of work for several: in the trace of the first, linked to all others.

    Nothing is recorded of what nobody traces.
    """
    named = dict.fromkeys(text for text in traceparents if text)
    if not named:
        return OFF
    first, *others = named
    return span(name, parent=first, links=others, **attributes)


def wanted() -> str:
    """Return the exporter that OpenTelemetry's environment variables name; "" for none."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    named = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if named:
        return "" if named == "none" else named
    return "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else ""


def set_up(service: str, version: str) -> None:
    """Record this process's spans as the environment asks for.

    `OTEL_TRACES_EXPORTER` (`otlp`, `console`), `OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`,
    `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` and `OTEL_BSP_*` mean what OpenTelemetry says.

    Args:
        service: name of this service, unless the environment has one.
        version: of it.

    Raises:
        TracingUnavailable: one line says why; nothing is recorded.
    """
    global _provider
    try:
        provider = _new_provider(service, version)
    except TracingUnavailable:
        raise
    except Exception as error:
        # Whatever OpenTelemetry makes of a variable that it does not understand: it raises what
        # it likes, and only here.
        text = " ".join(str(error).split()) or type(error).__name__
        raise TracingUnavailable(f"OpenTelemetry does not accept its settings: {text}") from error
    _provider = provider
    use_provider(provider)


def _new_provider(service: str, version: str) -> Any:
    exporter = _exporter(wanted())
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": version}
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named and not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = service
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _line(recorded: Any) -> str:
    """Return a span as a line of the log."""
    about = json.loads(recorded.to_json(indent=None))
    return log_lines.line("info", f"span: {recorded.name}", event="span", span=about) + "\n"


def _exporter(name: str) -> Any:
    protocol = next(
        (value for key in _PROTOCOLS if (value := os.environ.get(key))), "http/protobuf"
    )
    try:
        if name == "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter(out=sys.stderr, formatter=_line)
        if name != "otlp":
            raise TracingUnavailable(f"OTEL_TRACES_EXPORTER: {name} is not otlp, console or none")
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        elif protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            raise TracingUnavailable(f"OTLP: {protocol} is not http/protobuf or grpc")
        return OTLPSpanExporter()
    except ImportError as error:
        what = "'kvstore-tiers[otel]'"
        if "grpc" in (error.name or ""):
            what += " opentelemetry-exporter-otlp-proto-grpc"
        raise TracingUnavailable(
            f"{error.name or 'opentelemetry'} is not installed: pip install {what}"
        ) from error


def close() -> None:
    """Send what is recorded, for a few seconds at most, and record no more."""
    global _provider
    provider, _provider = _provider, None
    if provider is None:
        return
    use_provider(None)
    last = threading.Thread(target=provider.shutdown, name="otel-shutdown", daemon=True)
    last.start()
    last.join(_CLOSE_SECONDS)
