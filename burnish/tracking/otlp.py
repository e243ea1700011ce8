"""Send traces to a collector by OTLP over HTTP."""

from __future__ import annotations

import gzip
import os
import ssl
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from burnish.tracking.span_records import (
    Attributes,
    Trace,
    TraceSpan,
    nanoseconds,
    pairs_of,
    span_id,
)

_AT_ONCE = 64
"""Most traces in a request."""
# Codes of OTLP: a span within one process, and a failure.
_INTERNAL = 1
_ERROR = 2
_RETRIED = (429, 502, 503, 504)
"""Statuses of a collector that may soon take more."""


class OtlpExporter:
    """Send traces to a collector. OpenTelemetry's variables OTEL_EXPORTER_OTLP_* apply."""

    # OpenTelemetry's own exporter takes ten times the CPU time: it makes a protobuf message for each attribute.

    def __init__(self, directory: Path, *, endpoint: str, resource: Attributes) -> None:
        path = "/v1/traces"
        known = os.environ.get
        if endpoint == "env":
            base = known("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
            endpoint = known("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base.rstrip("/") + path
        elif urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + path
        self._timeout = float(_variable("TIMEOUT") or 10)
        self._is_compressed = _variable("COMPRESSION") == "gzip"
        headers = {"Content-Type": "application/x-protobuf", **pairs_of(_variable("HEADERS"))}
        headers |= {"Content-Encoding": "gzip"} if self._is_compressed else {}
        self._request = partial(Request, endpoint, headers=headers)
        self._context = None
        if endpoint.startswith("https:"):
            self._context = ssl.create_default_context(cafile=_variable("CERTIFICATE"))
            if certificate := _variable("CLIENT_CERTIFICATE"):
                self._context.load_cert_chain(certificate, _variable("CLIENT_KEY"))
        self._resource = resource
        self._waiting: list[Trace] = []

    def log_traces(self, step: int, traces: Sequence[Trace]) -> None:
        """Hold a step's traces until `sync`."""
        self._waiting += traces

    def sync(self) -> None:
        """Send held traces."""
        traces = self._waiting
        self._waiting = []
        for start in range(0, len(traces), _AT_ONCE):
            self._send(protobuf(traces[start : start + _AT_ONCE], self._resource))

    def _send(self, body: bytes) -> None:
        """Send a request, retried until the time-out if the collector is away or busy. Raises `OSError`."""
        request = self._request(data=gzip.compress(body) if self._is_compressed else body)
        deadline = time.monotonic() + self._timeout
        pause = 0.5
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                urlopen(request, timeout=left, context=self._context).close()
                return
            except OSError as error:
                is_retried = getattr(error, "code", 503) in _RETRIED
                if not is_retried or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause *= 2


def _variable(name: str) -> str | None:
    values = (os.environ.get(f"OTEL_EXPORTER_OTLP_{of}{name}") for of in ("TRACES_", ""))
    return next(filter(None, values), None)


def protobuf(traces: Sequence[Trace], resource: Attributes) -> bytes:
    """Return an OTLP request with these traces."""
    # The numbers are field numbers of opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
    spans = [
        _field(2, _span_message(name, number, span))
        for name, spans_of_trace in traces
        for number, span in enumerate(spans_of_trace)
    ]
    scope_spans = _field(1, _field(1, b"burnish")) + b"".join(spans)
    return _field(1, _field(1, _attributes(1, resource)) + _field(2, scope_spans))


def _span_message(trace: bytes, number: int, span: TraceSpan) -> bytes:
    parts = [_field(1, trace), _field(2, span_id((trace, number))), _field(5, span.name.encode())]
    if number:
        parts.append(_field(4, span_id((trace, span.parent))))
    begin = nanoseconds(span.begin)
    end = nanoseconds(span.end)
    parts.append(_number(6, _INTERNAL) + struct.pack("<BqBq", 7 << 3 | 1, begin, 8 << 3 | 1, end))
    if span.error is not None:
        parts.append(_field(15, _field(2, span.error.encode()) + _number(3, _ERROR)))
    return b"".join(parts) + _attributes(9, span.attributes)


def _attributes(field: int, attributes: Attributes) -> bytes:
    pairs = ((_field(1, n.encode()), _field(2, _any(value))) for n, value in attributes.items())
    return b"".join(_field(field, name + value) for name, value in pairs)


def _any(value: Any) -> bytes:
    if isinstance(value, str):
        return _field(1, value.encode())
    if isinstance(value, int):
        return _number(3, value)
    if isinstance(value, list):
        return _field(5, b"".join(_field(1, _any(each)) for each in value))
    return b"\x21" + struct.pack("<d", value)


def _number(field: int, value: int) -> bytes:
    return bytes((field << 3,)) + _varint(value & (1 << 64) - 1)


def _field(field: int, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes((field << 3 | 2, size)) + content
    return bytes((field << 3 | 2,)) + _varint(size) + content


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    return bytes((value & 127 | 128,)) + _varint(value >> 7)
