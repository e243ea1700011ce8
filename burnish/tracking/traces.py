"""Trace rollouts, to files and by OTLP.

A rollout is a trace of OpenTelemetry spans with the conventions for generative AI. Below its root are the generation and each
call of a reward.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import ssl
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from burnish.config.document import recorded
from burnish.config.schema import RunConfig, TracesConfig
from burnish.errors import CorruptError, refusing
from burnish.tracking import rollouts as files
from burnish.tracking.rundir import RUN, RunDirectory, plain, write_atomically
from burnish.tracking.trackers import BackgroundTracker, json_line, json_number

if TYPE_CHECKING:  # the records' module loads torch
    from burnish.records.samples import Rollout

_Attributes = dict[str, Any]
_AT_ONCE, _ROOM = 64, 16  # most traces in a request, most steps whose traces wait for one
_INTERNAL, _ERROR = 1, 2  # codes of OTLP: a span within one process, and a failure
_RETRIED = (429, 502, 503, 504)  # statuses of a collector that may soon take more


class _Span(NamedTuple):
    name: str
    begin: float  # in seconds since 1970
    end: float
    attributes: _Attributes
    error: str | None = None


_Trace = tuple[bytes, Sequence[_Span]]  # its id, and its spans, the first of which is the root


def sampled(kind: files.Kind, step: int, rate: float, count: int) -> set[int]:
    """Return the indices of the rollouts that are traced beside those that are kept longest."""
    rng = random.Random(f"{kind} {step}")  # equal runs trace the same rollouts
    return {i for i in range(count) if rng.random() < rate} if rate else set()


class Traces:
    """A run's traces: of the rollouts that are kept longest, if these are written, and of a share of the others."""

    def __init__(
        self, directory: RunDirectory, settings: TracesConfig, keep_bytes: int, step: int
    ) -> None:
        self._directory, self._settings = directory, settings
        self._thinning = files.Thinning(directory.traces, keep_bytes)
        files.discard_rollouts_after(directory.traces, step)
        self._config = recorded(directory.config) if directory.config.exists() else RunConfig()
        self._run = str(directory.read_environment().get(RUN, directory.root.name))
        service = os.environ.get("OTEL_SERVICE_NAME", "burnish")
        self._resource = _pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES"))
        self._resource |= {"service.name": service, "service.instance.id": self._run}
        self.exporter: BackgroundTracker | None = None
        if settings.endpoint:
            make = partial(_OtlpExporter, endpoint=settings.endpoint, resource=self._resource)
            room = {"log_traces": _ROOM}
            self.exporter = BackgroundTracker("traces", make, directory.root, room=room)

    def take(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float] | None,
        kept: Collection[int],
    ) -> None:
        """Trace a step's rollouts, without `advantages` a validation's."""
        kind: files.Kind = "validation" if advantages is None else "step"
        wanted = sampled(kind, step, self._settings.sample_rate, len(rollouts)) | {*kept}
        traces = []
        for i in sorted(wanted):
            about = {
                "burnish.run": self._directory.root.name,
                "burnish.step": step,
                "burnish.kind": kind,
                "burnish.advantage": advantages and float(advantages[i]),
            }
            name = _digest(self._run) + _digest((kind, step, i))
            traces.append((name, self._spans(rollouts[i], about)))
        if traces and self._settings.local:
            lines = [_line(trace, self._resource) for trace in traces]
            path = files.rollouts_path(self._directory.traces, step, kind)
            write_atomically(path, b"".join(files.compressed(lines)))
            self._thinning.wrote(step, kind)
        if traces and self.exporter is not None:
            self.exporter.tell("log_traces", step, traces)

    def _spans(self, rollout: Rollout, about: _Attributes) -> list[_Span]:
        made = [self._generation(rollout, about["burnish.kind"] == "step")]
        made += self._calls(rollout, made[0].end)
        attributes = about | {
            "burnish.prompt_index": rollout.prompt.index,
            "burnish.sample": rollout.sample,
            "burnish.source": rollout.prompt.source,
            "burnish.reward": float(rollout.reward),
        }
        begin, end = min(span.begin for span in made), max(span.end for span in made)
        failed = "a reward has no value" if rollout.reward_error else None
        return [_span("rollout", begin, end, attributes, failed), *made]

    def _generation(self, rollout: Rollout, trains: bool) -> _Span:
        prompt, completion, config = rollout.prompt, rollout.completion, self._config
        how = config.rollout if trains else config.evaluation
        model = config.model.path or config.run_name
        operation = "chat" if prompt.messages else "text_completion"
        asked, first, last = completion.times or (time.time(),) * 3
        count = len(completion.token_ids)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "burnish",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": config.rollout.max_response_length,
            "gen_ai.request.temperature": how.temperature,
            "gen_ai.request.top_p": how.top_p,
            "gen_ai.request.top_k": how.top_k or None,
            "gen_ai.usage.input_tokens": len(prompt.token_ids),
            "gen_ai.usage.output_tokens": count,
            "gen_ai.response.finish_reasons": [completion.stop_reason],
            "gen_ai.response.time_to_first_chunk": first - asked if completion.times else None,
            "burnish.tokens_per_second": (count - 1) / (last - first) if last > first else None,
            "burnish.weights_version": completion.weights_version,
        }
        if self._settings.redact == "off":
            messages = prompt.messages or [{"role": "user", "content": prompt.text}]
            said = {"role": "assistant", "content": rollout.text}
            attributes["gen_ai.input.messages"] = self._messages(messages)
            ended = completion.stop_reason or ""
            attributes["gen_ai.output.messages"] = self._messages([said], finish_reason=ended)
        return _span(f"{operation} {model}", asked, last, attributes)

    def _messages(self, messages: Sequence[Mapping[str, Any]], **more: str) -> str:
        left, found = self._settings.max_text, []  # characters of all messages
        for message in messages:
            text = _text(message.get("content"))
            parts = [{"type": "text", "content": _cut(text, left)}]
            left = max(0, left - len(text))
            found.append({"role": str(message.get("role")), "parts": parts, **more})
        return json.dumps(found, ensure_ascii=False)

    def _calls(self, rollout: Rollout, otherwise: float) -> Iterator[_Span]:
        limit, is_open = self._settings.max_text, self._settings.redact == "off"
        inputs = {"completion": rollout.text, "answer": rollout.prompt.answer}
        for number, call in enumerate(rollout.calls):
            is_model = number >= len(self._config.reward.functions)
            kind = call.error and call.error.partition(":")[0]
            attributes = {
                "gen_ai.evaluation.name": call.name,
                "gen_ai.evaluation.score.value": call.value,
                "burnish.reward.judge": "model" if is_model else "function",
                "error.type": kind,
            }
            for name, value in {**rollout.prompt.columns, **inputs}.items() if is_open else ():
                attributes[f"burnish.reward.inputs.{name}"] = _cut(_text(value), limit)
            begin = otherwise if call.began is None else call.began
            error = _cut(call.error, limit) if call.error and is_open else kind
            yield _span(f"reward {call.name}", begin, begin + call.seconds, attributes, error)


def _span(
    name: str, begin: float, end: float, attributes: _Attributes, error: str | None = None
) -> _Span:
    found = {
        plain(key): json_number(value) if isinstance(value, float) else plain(value)
        for key, value in attributes.items()
        if value is not None
    }
    return _Span(plain(name), begin, end, found, plain(error))


def _line(trace: _Trace, resource: _Attributes) -> bytes:
    name, made = trace
    spans = [
        {
            "traceId": name.hex(),
            "spanId": _digest((name, number)).hex(),
            "parentSpanId": _digest((name, 0)).hex() if number else None,
            "name": span.name,
            "startTimeUnixNano": _nanoseconds(span.begin),
            "endTimeUnixNano": _nanoseconds(span.end),
            "attributes": span.attributes,
            "error": span.error,
        }
        for number, span in enumerate(made)
    ]
    return json_line({"resource": resource, "spans": spans}).encode()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _digest(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=8).digest()


def read_traces(path: Path) -> Iterator[_Attributes]:
    """Yield a file's traces. Raises `CorruptError`."""
    for _, text in files.blocks(path):
        with refusing(f"{path} is not a file of traces", CorruptError, do="remove it"):
            found = [json.loads(line) for line in text.splitlines()]
        yield from found


def spans_of(path: Path, row: files.Row) -> list[_Attributes]:
    """Return a rollout's spans, the root first, in seconds from its start; none if it has no trace. Raises `CorruptError`."""
    # A step may draw a prompt of a small data set twice, so rewards are compared too.
    place = {name: row.get(name) for name in ("prompt_index", "sample", "reward", "advantage")}
    for trace in read_traces(path):
        with refusing(f"{path} has a line that is no trace", CorruptError, do="remove it"):
            root = trace["spans"][0]
            if place == {name: root["attributes"].get(f"burnish.{name}") for name in place}:
                return [_shown(each, root["startTimeUnixNano"]) for each in trace["spans"]]
    return []


def _shown(span: _Attributes, first: int) -> _Attributes:
    begin, end = span["startTimeUnixNano"], span["endTimeUnixNano"]
    shown = {name: span[name] for name in ("name", "attributes", "error")}
    times = {"start": (begin - first) / 1e9, "seconds": (end - begin) / 1e9}
    return shown | times | {"depth": int(span["parentSpanId"] is not None)}


class _OtlpExporter:
    """Send traces to a collector. OpenTelemetry's variables OTEL_EXPORTER_OTLP_* apply."""

    # OpenTelemetry's own exporter takes ten times the CPU time: it makes a protobuf message for each attribute.

    def __init__(self, directory: Path, *, endpoint: str, resource: _Attributes) -> None:
        path, known = "/v1/traces", os.environ.get
        if endpoint == "env":
            base = known("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
            endpoint = known("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base.rstrip("/") + path
        elif urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + path
        self._timeout = float(_variable("TIMEOUT") or 10)
        self._is_compressed = _variable("COMPRESSION") == "gzip"
        headers = {"Content-Type": "application/x-protobuf", **_pairs(_variable("HEADERS"))}
        headers |= {"Content-Encoding": "gzip"} if self._is_compressed else {}
        self._request = partial(Request, endpoint, headers=headers)
        self._context = None
        if endpoint.startswith("https:"):
            self._context = ssl.create_default_context(cafile=_variable("CERTIFICATE"))
            if certificate := _variable("CLIENT_CERTIFICATE"):
                self._context.load_cert_chain(certificate, _variable("CLIENT_KEY"))
        self._resource = resource
        self._held: list[_Trace] = []

    def log_traces(self, step: int, traces: Sequence[_Trace]) -> None:
        """Hold a step's traces until `sync`."""
        self._held += traces

    def sync(self) -> None:
        """Send held traces."""
        held, self._held = self._held, []
        for start in range(0, len(held), _AT_ONCE):
            self._send(protobuf(held[start : start + _AT_ONCE], self._resource))

    def _send(self, body: bytes) -> None:
        """Send a request, retried until the time-out if the collector is away or busy. Raises `OSError`."""
        request = self._request(data=gzip.compress(body) if self._is_compressed else body)
        deadline, pause = time.monotonic() + self._timeout, 0.5
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
    found = (os.environ.get(f"OTEL_EXPORTER_OTLP_{of}{name}") for of in ("TRACES_", ""))
    return next(filter(None, found), None)


def _pairs(text: str | None) -> dict[str, str]:
    pairs = (each.partition("=") for each in (text or "").split(",") if "=" in each)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def protobuf(traces: Sequence[_Trace], resource: _Attributes) -> bytes:
    """Return an OTLP request with these traces."""
    # The numbers are field numbers of opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
    spans = [
        _field(2, _span_message(name, number, span))
        for name, made in traces
        for number, span in enumerate(made)
    ]
    scope_spans = _field(1, _field(1, b"burnish")) + b"".join(spans)
    return _field(1, _field(1, _attributes(1, resource)) + _field(2, scope_spans))


def _span_message(trace: bytes, number: int, span: _Span) -> bytes:
    parts = [_field(1, trace), _field(2, _digest((trace, number))), _field(5, span.name.encode())]
    if number:
        parts.append(_field(4, _digest((trace, 0))))
    begin, end = _nanoseconds(span.begin), _nanoseconds(span.end)
    parts.append(_number(6, _INTERNAL) + struct.pack("<BqBq", 7 << 3 | 1, begin, 8 << 3 | 1, end))
    if span.error is not None:
        parts.append(_field(15, _field(2, span.error.encode()) + _number(3, _ERROR)))
    return b"".join(parts) + _attributes(9, span.attributes)


def _attributes(field: int, attributes: _Attributes) -> bytes:
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
