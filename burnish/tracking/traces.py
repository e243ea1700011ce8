"""Trace rollouts, to files and by OTLP (`burnish.tracking.otlp`).

A rollout is a trace of OpenTelemetry spans with the conventions for generative AI. Below its root are the generation, in a conversation
each turn and each call of the environment with its tools, and each call of a reward.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.document import recorded
from burnish.config.schema import RunConfig, TracesConfig
from burnish.errors import CorruptError, refusing
from burnish.tracking import rollouts as files
from burnish.tracking.rundir import RUN, RunDirectory, plain, write_atomically
from burnish.tracking.span_records import (
    Attributes,
    Trace,
    TraceSpan,
    nanoseconds,
    pairs_of,
    span_id,
)
from burnish.tracking.trackers import BackgroundTracker, json_line, json_number

if TYPE_CHECKING:  # the records' module loads torch
    from burnish.records.samples import Rollout

_OF_ONE_TURN = (
    "gen_ai.usage.",
    "gen_ai.input.",
    "gen_ai.output.",
    "gen_ai.response.",
    "burnish.tokens",
)
_ROOM = 16  # most steps whose traces wait for a request


def sampled(kind: files.Kind, step: int, rate: float, count: int) -> set[int]:
    """Return the indices of the rollouts that are traced beside those that are kept longest."""
    rng = random.Random(f"{kind} {step}")  # equal runs trace the same rollouts
    return {i for i in range(count) if rng.random() < rate} if rate else set()


class Traces:
    """A run's traces: of the rollouts that are kept longest, if these are written, and of a share of the others."""

    def __init__(
        self, directory: RunDirectory, settings: TracesConfig, keep_bytes: int, step: int
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._thinning = files.Thinning(directory.traces, keep_bytes)
        files.discard_rollouts_after(directory.traces, step)
        self._config = recorded(directory.config) if directory.config.exists() else RunConfig()
        self._run = str(directory.read_environment().get(RUN, directory.root.name))
        service = os.environ.get("OTEL_SERVICE_NAME", "burnish")
        self._resource: Attributes = pairs_of(os.environ.get("OTEL_RESOURCE_ATTRIBUTES"))
        self._resource |= {"service.name": service, "service.instance.id": self._run}
        self.exporter: BackgroundTracker | None = None
        if settings.endpoint:
            from burnish.tracking.otlp import OtlpExporter

            make = partial(OtlpExporter, endpoint=settings.endpoint, resource=self._resource)
            room = {"log_traces": _ROOM}
            self.exporter = BackgroundTracker("traces", make, directory.root, room=room)

    def take(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float] | None,
        whole: Collection[int],
    ) -> None:
        """Trace a step's rollouts, without `advantages` a validation's."""
        kind: files.Kind = "validation" if advantages is None else "step"
        wanted = sampled(kind, step, self._settings.sample_rate, len(rollouts)) | {*whole}
        traces = []
        for i in sorted(wanted):
            if rollouts[i].branch:  # the trace of number 0 is that of the conversation
                continue
            about = {
                "burnish.run": self._directory.root.name,
                "burnish.step": step,
                "burnish.kind": kind,
                "burnish.advantage": advantages and float(advantages[i]),
            }
            name = span_id(self._run) + span_id((kind, step, i))
            traces.append((name, self._spans(rollouts[i], about)))
        if traces and self._settings.local:
            lines = [_line(trace, self._resource) for trace in traces]
            path = files.rollouts_path(self._directory.traces, step, kind)
            write_atomically(path, b"".join(files.compressed(lines)))
            self._thinning.wrote(step, kind)
        if traces and self.exporter is not None:
            self.exporter.tell("log_traces", step, traces)

    def _spans(self, rollout: Rollout, about: Attributes) -> list[TraceSpan]:
        generation = self._generation(rollout, about["burnish.kind"] == "step")
        spans = [*self._turns(rollout, generation)] or [generation]
        spans += self._calls(rollout, generation.end)
        attributes = about | {
            "burnish.prompt_index": rollout.prompt.index,
            "burnish.sample": rollout.sample,
            "burnish.source": rollout.prompt.source,
            "burnish.reward": float(rollout.reward),
        }
        begin = min(span.begin for span in spans)
        end = max(span.end for span in spans)
        failed = "a reward has no value" if rollout.reward_error else None
        attributes["burnish.end"] = rollout.end
        return [_span("rollout", begin, end, attributes, failed), *spans]

    def _generation(self, rollout: Rollout, trains: bool) -> TraceSpan:
        prompt = rollout.prompt
        completion = rollout.completion
        config = self._config
        how = config.rollout if trains else config.evaluation
        model = config.model.path or config.run_name
        operation = "chat" if prompt.messages else "text_completion"
        asked, first, last = completion.times or (time.time(),) * 3
        count = completion.count_drawn
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
            answer = {"role": "assistant", "content": rollout.text}
            attributes["gen_ai.input.messages"] = self._messages(messages)
            ended = completion.stop_reason or ""
            attributes["gen_ai.output.messages"] = self._messages([answer], finish_reason=ended)
        return _span(f"{operation} {model}", asked, last, attributes)

    def _turns(self, rollout: Rollout, whole: TraceSpan) -> Iterator[TraceSpan]:
        """Yield the spans of a conversation's turns; `whole` has what they have in common."""
        limit = self._settings.max_text
        is_open = self._settings.redact == "off"
        turns = _by_turn(rollout.conversation)
        asked = whole.attributes.get("gen_ai.input.messages")
        alike = {n: v for n, v in whole.attributes.items() if not n.startswith(_OF_ONE_TURN)}
        place = 0  # of the environment's span
        tools = 0  # of the turn
        if len(turns) != sum(span.kind == "model" for span in rollout.spans):
            turns = []  # an agent's conversation has other branches
        for number, span in enumerate(rollout.spans, start=1):
            said, heard = turns[span.turn] if 0 <= span.turn < len(turns) else ({}, [])
            attributes: Attributes = {"burnish.turn": span.turn}
            name: str = span.kind
            error = span.error
            if span.kind == "model":
                name = whole.name
                attributes |= alike | {"gen_ai.usage.output_tokens": said.get("tokens")}
                if is_open:
                    answer = [{"role": "assistant", "content": said.get("content", "")}]
                    attributes["gen_ai.input.messages"] = None if span.turn else asked
                    attributes["gen_ai.output.messages"] = self._messages(answer)
            elif span.kind == "environment":
                place = number
                tools = 0
                earned = said.get("rewards", {})
                attributes |= {f"burnish.reward.{each}": x for each, x in earned.items()}
            else:
                name = f"execute_tool {span.name}"
                attributes |= {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": span.name,
                }
                calls = said.get("calls", ())
                if is_open and tools < min(len(calls), len(heard)):
                    inputs = _text(calls[tools]["arguments"])
                    attributes["gen_ai.tool.call.arguments"] = _cut(inputs, limit)
                    result = _cut(_text(heard[tools]["content"]), limit)
                    attributes["gen_ai.tool.call.result"] = result
                tools += 1
            if error is not None:
                error = _cut(error, limit) if is_open else f"the {span.kind} failed"
            parent = place if span.kind == "tool" else 0
            made = _span(name, span.began, span.began + span.seconds, attributes, error)
            yield made._replace(parent=parent)

    def _messages(self, messages: Sequence[Mapping[str, Any]], **extra: str) -> str:
        # characters of all messages
        left = self._settings.max_text
        written = []
        for message in messages:
            text = _text(message.get("content"))
            parts = [{"type": "text", "content": _cut(text, left)}]
            left = max(0, left - len(text))
            written.append({"role": str(message.get("role")), "parts": parts, **extra})
        return json.dumps(written, ensure_ascii=False)

    def _calls(self, rollout: Rollout, otherwise: float) -> Iterator[TraceSpan]:
        limit = self._settings.max_text
        is_open = self._settings.redact == "off"
        inputs = {"completion": rollout.text, "answer": rollout.prompt.answer}
        # The first call is that of a conversation's environment, whose spans say more.
        for number, call in enumerate(rollout.calls[1:] if rollout.end else rollout.calls):
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


def _by_turn(record: Sequence[Mapping[str, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return each message of the model in a conversation's record, with those that followed."""
    turns: list[tuple[Any, list[Any]]] = []
    for message in record:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    return turns


def _span(
    name: str, begin: float, end: float, attributes: Attributes, error: str | None = None
) -> TraceSpan:
    known = {
        plain(key): json_number(value) if isinstance(value, float) else plain(value)
        for key, value in attributes.items()
        if value is not None
    }
    return TraceSpan(plain(name), begin, end, known, plain(error))


def _line(trace: Trace, resource: Attributes) -> bytes:
    name, spans_of_trace = trace
    spans = [
        {
            "traceId": name.hex(),
            "spanId": span_id((name, number)).hex(),
            "parentSpanId": span_id((name, span.parent)).hex() if number else None,
            "name": span.name,
            "startTimeUnixNano": nanoseconds(span.begin),
            "endTimeUnixNano": nanoseconds(span.end),
            "attributes": span.attributes,
            "error": span.error,
        }
        for number, span in enumerate(spans_of_trace)
    ]
    return json_line({"resource": resource, "spans": spans}).encode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def read_traces(path: Path) -> Iterator[Attributes]:
    """Yield a file's traces. Raises `CorruptError`."""
    for _, text in files.blocks(path):
        with refusing(f"{path} is not a file of traces", CorruptError, do="remove it"):
            traces = [json.loads(line) for line in text.splitlines()]
        yield from traces


def spans_of(path: Path, row: files.Row) -> list[Attributes]:
    """Return a rollout's spans, the root first, in seconds from its start; none if it has no trace. Raises `CorruptError`."""
    # A step may draw a prompt of a small data set twice, so rewards are compared too.
    place = {name: row.get(name) for name in ("prompt_index", "sample", "reward", "advantage")}
    for trace in read_traces(path):
        with refusing(f"{path} has a line that is no trace", CorruptError, do="remove it"):
            root = trace["spans"][0]
            if place == {name: root["attributes"].get(f"burnish.{name}") for name in place}:
                return [*_shown(trace["spans"], root["startTimeUnixNano"])]
    return []


def _shown(spans: Sequence[Attributes], first: int) -> Iterator[Attributes]:
    depths: dict[Any, int] = {}
    for span in spans:
        begin = span["startTimeUnixNano"]
        end = span["endTimeUnixNano"]
        depths[span["spanId"]] = depth = depths.get(span["parentSpanId"], -1) + 1
        shown = {name: span[name] for name in ("name", "attributes", "error")}
        times = {"start": (begin - first) / 1e9, "seconds": (end - begin) / 1e9}
        yield shown | times | {"depth": depth}
