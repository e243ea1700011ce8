"""Traces of rollouts in files: what spans say, which rollouts have them, texts of any kind. By OTLP: test_otlp.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs.rollouts import made_rollout, made_talk, table_of

from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig, TracesConfig
from burnish.records import RewardCall, Rollout
from burnish.tracking.rollouts import rollouts_path, write_rollouts
from burnish.tracking.rundir import RUN, RunDirectory
from burnish.tracking.traces import Traces, read_traces
from burnish.tracking.traces import spans_of as shown_spans

EXACT = RewardCall("exact", 1.0, None, 102.5, 0.25)
LATE = RewardCall("late", None, "TimeoutError: 2+2=4 (mine.py:3)", 102.0, 5.0)
JUDGE = RewardCall("judge", 0.5, None, 103.0, 1.0)
FUNCTIONS = [{"function": "exact_match"}, {"function": "mine.py:late"}]


def run_directory(root: Path) -> RunDirectory:
    run = RunDirectory(root)
    root.mkdir(parents=True, exist_ok=True)
    run.config.write_text(
        dump_yaml(
            RunConfig.model_validate(
                {"model": {"path": "me/tiny"}, "reward": {"functions": FUNCTIONS}}
            )
        )
    )
    run.write_environment({RUN: "abc"})
    return run


def spans_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return list(trace["spans"])


def written(
    root: Path, rollouts: list[Rollout], step: int = 3, *, due: bool = True, **settings: Any
) -> list[list[dict[str, Any]]]:
    """The spans of each trace that a step leaves."""
    traces = Traces(run_directory(root), TracesConfig(**settings), 10**9, 0)
    advantages = [0.5] * len(rollouts)
    kept = write_rollouts(root / "rollouts", step, table_of(rollouts), advantages) if due else {}
    traces.take(step, rollouts, advantages, kept)
    path = rollouts_path(root / "traces", step)
    return [spans_of(each) for each in read_traces(path)] if path.exists() else []


def test_a_conversation_has_a_span_of_each_turn_and_call(tmp_path: Path) -> None:
    (spans,) = written(tmp_path, [made_talk(calls=(EXACT,))])
    names = [span["name"] for span in spans]
    chat = "text_completion me/tiny"
    turn = ["environment", "execute_tool multiply", chat, "environment"]
    assert names == ["rollout", "environment", chat, *turn, "reward exact"]
    root, _, first, answer, tool, second, last, exact = spans
    assert tool["parentSpanId"] == answer["spanId"]
    assert {span["parentSpanId"] for span in spans[1:] if span is not tool} == {root["spanId"]}
    assert (tool["startTimeUnixNano"], tool["endTimeUnixNano"]) == (
        101_250_000_000,
        101_375_000_000,
    )
    assert tool["error"] == "Error: no b"
    assert answer["error"] is None
    assert tool["attributes"] == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "multiply",
        "gen_ai.tool.call.arguments": '{"a": 3}',
        "gen_ai.tool.call.result": "Error: no b",
        "burnish.turn": 0,
    }
    assert [s["attributes"]["gen_ai.usage.output_tokens"] for s in (first, second)] == [5, 2]
    assert "gen_ai.input.messages" in first["attributes"]
    assert "gen_ai.input.messages" not in second["attributes"]
    assert answer["attributes"] == {"burnish.turn": 0, "burnish.reward.called": 0.25}
    assert last["attributes"] == {"burnish.turn": 1, "burnish.reward.right": 1.0}
    assert exact["attributes"]["burnish.reward.judge"] == "function"
    assert root["attributes"]["burnish.end"] == "done"
    (hidden,) = written(tmp_path / "hidden", [made_talk(calls=(EXACT,))], redact="texts")
    assert hidden[4]["error"]
    assert not {"no b", "12"} & {*json.dumps(hidden).split('"')}
    (path,) = [each for each in (tmp_path / "traces").iterdir() if each.name.startswith("step")]
    row = {"prompt_index": 0, "sample": 0, "reward": 1.0, "advantage": 0.5}
    assert [each["depth"] for each in shown_spans(path, row)] == [0, 1, 1, 1, 2, 1, 1, 1]


def test_a_trace_has_the_generation_and_each_call(tmp_path: Path) -> None:
    rollout = made_rollout(calls=(EXACT, LATE, JUDGE), error="late: TimeoutError")
    ((root, generation, exact, late, judge),) = written(tmp_path, [rollout])
    names = ["rollout", "text_completion me/tiny", "reward exact", "reward late", "reward judge"]
    spans = (root, generation, exact, late, judge)
    assert [span["name"] for span in spans] == names
    assert {span["parentSpanId"] for span in spans[1:]} == {root["spanId"]}
    assert root["parentSpanId"] is None
    assert len({span["spanId"] for span in spans}) == 5
    assert {span["traceId"] for span in spans} == {root["traceId"]}
    assert (len(root["traceId"]), len(root["spanId"])) == (32, 16)
    times = [(s["startTimeUnixNano"] / 1e9, s["endTimeUnixNano"] / 1e9) for s in spans]
    assert times == [(100, 107), (100, 102), (102.5, 102.75), (102, 107), (103, 104)]
    assert root["attributes"] == {
        "burnish.run": tmp_path.name,
        "burnish.step": 3,
        "burnish.kind": "step",
        "burnish.prompt_index": 0,
        "burnish.sample": 0,
        "burnish.source": "sums",
        "burnish.reward": 1.0,
        "burnish.advantage": 0.5,
    }
    assert generation["attributes"] == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "burnish",
        "gen_ai.request.model": "me/tiny",
        "gen_ai.request.max_tokens": RunConfig().rollout.max_response_length,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.5,
        "burnish.tokens_per_second": pytest.approx(2 / 1.5),
        "burnish.weights_version": 7,
        "gen_ai.input.messages": generation["attributes"]["gen_ai.input.messages"],
        "gen_ai.output.messages": generation["attributes"]["gen_ai.output.messages"],
    }
    text = [{"type": "text", "content": "2+2="}]
    asked = json.loads(generation["attributes"]["gen_ai.input.messages"])
    assert asked == [{"role": "user", "parts": text}]
    (said,) = json.loads(generation["attributes"]["gen_ai.output.messages"])
    assert (said["role"], said["finish_reason"]) == ("assistant", "stop")
    assert exact["attributes"] == {
        "gen_ai.evaluation.name": "exact",
        "gen_ai.evaluation.score.value": 1.0,
        "burnish.reward.judge": "function",
        "burnish.reward.inputs.answer": "4",
        "burnish.reward.inputs.completion": "4",
    }
    assert late["error"] == LATE.error
    assert late["attributes"]["error.type"] == "TimeoutError"
    assert root["error"]
    assert exact["error"] is None
    assert judge["attributes"]["burnish.reward.judge"] == "model"


def test_the_rollouts_that_are_kept_longest_are_traced_where_they_are_written(
    tmp_path: Path,
) -> None:
    rollouts = [made_rollout(index=i, reward=i / 100) for i in range(100)]
    found = written(tmp_path / "a", rollouts)
    places = [spans[0]["attributes"]["burnish.prompt_index"] for spans in found]
    assert len(found) == 16
    assert {0, 1, 2, 3, 96, 97, 98, 99} < set(places)
    assert written(tmp_path / "b", rollouts, due=False) == []
    assert written(tmp_path / "c", rollouts, local=False) == []


def test_a_share_of_all_others_is_the_same_in_equal_runs(tmp_path: Path) -> None:
    rollouts = [made_rollout(index=i // 2, sample=i % 2) for i in range(1000)]

    def sampled(root: Path, rate: float) -> set[tuple[int, int]]:
        found = written(root, rollouts, due=False, sample_rate=rate)
        roots = [spans[0]["attributes"] for spans in found]
        return {(each["burnish.prompt_index"], each["burnish.sample"]) for each in roots}

    few, same = sampled(tmp_path / "a", 0.1), sampled(tmp_path / "b", 0.1)
    assert few == same
    assert 60 < len(few) < 140
    assert few < sampled(tmp_path / "c", 0.3)
    assert len(sampled(tmp_path / "d", 1.0)) == 1000


def test_the_same_prompt_twice_in_a_step_makes_two_traces(tmp_path: Path) -> None:
    found = written(tmp_path, [made_rollout(), made_rollout()])
    assert len({spans[0]["traceId"] for spans in found}) == 2


HOSTILE = '</script>\ud800\x00\u202e"\n{"resourceSpans": []}\x1b[2J'


def test_hostile_texts_come_back_as_they_are_where_utf_8_can_hold_them(tmp_path: Path) -> None:
    rollout = made_rollout(text=HOSTILE, prompt=HOSTILE, calls=(EXACT,))
    ((_, generation, exact),) = written(tmp_path, [rollout])
    wanted = HOSTILE.replace("\ud800", "\\ud800")
    (said,) = json.loads(generation["attributes"]["gen_ai.output.messages"])
    assert said["parts"][0]["content"] == HOSTILE
    assert exact["attributes"]["burnish.reward.inputs.completion"] == wanted


def test_long_texts_are_cut(tmp_path: Path) -> None:
    rollout = made_rollout(text="x" * 5000, calls=(EXACT,))
    ((_, generation, exact),) = written(tmp_path, [rollout], max_text=100)
    (said,) = json.loads(generation["attributes"]["gen_ai.output.messages"])
    for text in (
        said["parts"][0]["content"],
        exact["attributes"]["burnish.reward.inputs.completion"],
    ):
        assert text.startswith("x" * 100 + "…")
        assert len(text) < 150


def test_redacted_traces_have_no_text(tmp_path: Path) -> None:
    rollout = made_rollout(text="SECRET", prompt="SECRET", calls=(EXACT, LATE))
    written(tmp_path, [rollout], redact="texts")
    ((_, generation, _, late),) = (
        spans_of(each) for each in read_traces(rollouts_path(tmp_path / "traces", 3))
    )
    held = json.dumps(list(read_traces(rollouts_path(tmp_path / "traces", 3))))
    assert "SECRET" not in held
    assert "2+2" not in held
    assert generation["attributes"]["gen_ai.usage.output_tokens"] == 3
    assert late["error"] == "TimeoutError"


def test_a_resumed_run_makes_later_traces_again_and_old_ones_make_room(tmp_path: Path) -> None:
    run = run_directory(tmp_path)
    traces = Traces(run, TracesConfig(), 10**9, 0)
    for step in (1, 2, 3):
        traces.take(step, [made_rollout(index=step)], [0.5], [0])
    traces.take(3, [made_rollout()], None, [0])
    Traces(run, TracesConfig(), 10**9, 2)
    assert sorted(path.name for path in run.traces.iterdir()) == [
        "step-00000001.jsonl.gz",
        "step-00000002.jsonl.gz",
    ]
    traces = Traces(run, TracesConfig(), 1, 2)
    traces.take(3, [made_rollout()], [0.5], [0])
    assert sorted(path.name for path in run.traces.iterdir()) == [
        "step-00000001.jsonl.gz",
        "step-00000003.jsonl.gz",
    ]
