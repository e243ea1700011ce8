"""Traces by OTLP to a collector on loopback, which OpenTelemetry's own messages parse.

`make nightly` makes the environment that has them, `.venv-trackers`.
"""

from __future__ import annotations

import gzip
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.ranks.ports import free_port
from support.runs.rollouts import made_rollout, made_talk
from tracking.test_traces import EXACT, HOSTILE, LATE, run_directory

from burnish.config.schema import TracesConfig
from burnish.records import Rollout
from burnish.tracking.rollouts import rollouts_path
from burnish.tracking.traces import Traces, read_traces


def attributes(holder: dict[str, Any]) -> dict[str, Any]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, held),) = value.items()
        if kind == "arrayValue":
            return [plain(each) for each in held["values"]]
        return int(held) if kind == "intValue" else held

    return {each["key"]: plain(each["value"]) for each in holder["attributes"]}


MISSING = "OpenTelemetry's messages are in .venv-trackers, which make nightly makes"


class Collector:
    """An OTLP collector: what it was sent. It answers with `status`, or once with the first of `before`, once `may_answer` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[Message] = []
        self.status, self.may_answer = 200, threading.Event()
        self.before: list[int] = []
        self.may_answer.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.may_answer.wait(60)
                status = collector.before.pop(0) if collector.before else collector.status
                if self.path == "/v1/traces" and status == 200:
                    collector.bodies.append(body)
                    collector.headers.append(self.headers)
                with suppress(BrokenPipeError):  # it has waited long enough
                    self.send_response(status if self.path == "/v1/traces" else 404)
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What it was sent, as JSON."""
        name = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
        service = pytest.importorskip(name, reason=MISSING)
        from google.protobuf.json_format import MessageToDict

        return [
            MessageToDict(service.ExportTraceServiceRequest.FromString(body))
            for body in self.bodies
        ]

    def spans(self) -> list[dict[str, Any]]:
        """All spans, in the order of their coming."""
        return [
            span
            for request in self.requests
            for resource in request["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.may_answer.set()
    made.server.shutdown()
    made.server.server_close()


def traced(
    root: Path,
    endpoint: str,
    steps: range = range(1, 2),
    *,
    text: str = "4",
    patience: float = 60,
    more: Sequence[Rollout] = (),
) -> None:
    traces = Traces(run_directory(root), TracesConfig(endpoint=endpoint), 10**9, 0)
    for step in steps:
        rollouts = [made_rollout(index=i, text=text, calls=(EXACT, LATE)) for i in range(2)]
        rollouts += more
        traces.take(step, rollouts, [0.5] * len(rollouts), range(len(rollouts)))
        traces.exporter.log(step, {})  # as a run tells each tracker
    traces.exporter.finish("finished", time.monotonic() + patience)
    traces.exporter.close()


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["4", HOSTILE])
def test_the_collector_gets_what_the_file_has(
    tmp_path: Path, collector: Collector, text: str
) -> None:
    import base64

    traced(tmp_path, collector.url, text=text, more=[made_talk(calls=(EXACT,))])
    sent = collector.spans()
    stored = [
        span
        for trace in read_traces(rollouts_path(tmp_path / "traces", 1))
        for span in trace["spans"]
    ]
    assert len(sent) == len(stored) == 16
    for mine, theirs in zip(sent, stored, strict=True):
        assert base64.b64decode(mine["traceId"]).hex() == theirs["traceId"]
        assert base64.b64decode(mine["spanId"]).hex() == theirs["spanId"]
        parent = base64.b64decode(mine.get("parentSpanId", "")).hex()
        assert parent == (theirs["parentSpanId"] or "")
        assert attributes(mine) == theirs["attributes"]
        for name in ("name", "startTimeUnixNano", "endTimeUnixNano"):
            assert mine[name] == str(theirs[name])
        status = mine.get("status", {})
        assert ("code" in status) == (theirs["error"] is not None)
        assert status.get("message") == theirs["error"]
    resource = attributes(collector.requests[0]["resourceSpans"][0]["resource"])
    assert resource["service.name"] == "burnish"
    assert resource["service.instance.id"] == "abc"


@pytest.mark.nightly
def test_the_attributes_are_the_conventions_own(tmp_path: Path, collector: Collector) -> None:
    known = pytest.importorskip(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes", reason=MISSING
    )
    names = {value for value in vars(known).values() if isinstance(value, str)}
    traced(tmp_path, collector.url, more=[made_talk(calls=(EXACT,))])
    used = {name for span in collector.spans() for name in attributes(span)}
    assert {name for name in used if name.startswith("gen_ai.")} <= names
    assert len({name for name in used if name.startswith("gen_ai.")}) > 10
    assert all(name.startswith(("gen_ai.", "burnish.", "error.type")) for name in used)


@pytest.mark.nightly
def test_the_variables_of_opentelemetry_count(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
    traced(tmp_path, "env")
    assert len(collector.spans()) == 8
    assert collector.headers[0]["api-key"] == "secret"
    resource = attributes(collector.requests[0]["resourceSpans"][0]["resource"])
    assert (resource["service.name"], resource["team"]) == ("mine", "blue")


@pytest.mark.nightly
def test_a_step_that_is_made_again_is_not_sent_again(tmp_path: Path, collector: Collector) -> None:
    traced(tmp_path, collector.url, range(1, 4))
    traced(tmp_path, collector.url, range(3, 5))
    steps = [attributes(span).get("burnish.step") for span in collector.spans()]
    assert [step for step in steps if step] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.nightly
def test_a_collector_that_hangs_stops_nothing_and_its_loss_is_counted(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.may_answer.clear()
    traced(tmp_path, collector.url, range(1, 31), patience=1)
    said = [each.args for each in caplog.records if each.name == "burnish"]
    assert len(said) == 2, "one warning, and the number"
    assert said[-1][1] == 30
    assert len(list((tmp_path / "traces").iterdir())) == 30


@pytest.mark.parametrize("status", [400, None])
def test_a_collector_that_refuses_or_is_away_costs_one_warning(
    tmp_path: Path,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector.status = status or 200
    url = collector.url if status else f"http://127.0.0.1:{free_port()}"
    traced(tmp_path, url, range(1, 4))
    warned = [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert {each.name for each in warned} == {"burnish"}
    assert len(warned) == 2
    assert warned[-1].args[1] == 3
    assert collector.bodies == []


def test_a_collector_that_is_busy_is_asked_again(tmp_path: Path, collector: Collector) -> None:
    collector.before = [503, 429]
    traced(tmp_path, collector.url)
    assert len(collector.bodies) == 1


@pytest.mark.nightly
def test_a_certificate_of_ones_own_is_trusted_if_it_is_named(
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "own.pem"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
    collector.server.socket = context.wrap_socket(collector.server.socket, server_side=True)
    url = collector.url.replace("http://127.0.0.1", "https://localhost")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    traced(tmp_path / "refused", url)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert collector.bodies == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", str(tmp_path / "own.pem"))
    traced(tmp_path / "trusted", url)
    assert len(collector.bodies) == 1
