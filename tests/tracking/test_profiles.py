"""Profiles of steps: the files load, spans nest rightly, and their seconds are those of timing_s."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.tracking.profiles import profiling
from burnish.tracking.spans import Spans


def load(path: Path) -> list[dict[str, Any]]:
    """The spans of a profile, by their beginnings."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    return sorted(spans, key=lambda each: (each["ts"], -each["dur"]))


def require_nesting(spans: list[dict[str, Any]]) -> None:
    """Each span lies within the one that its path names, and beside all others."""
    for span in spans:
        begin, end, path = span["ts"], span["ts"] + span["dur"], span["args"]["path"]
        outer = path.rpartition("/")[0]
        around = [
            each["args"]["path"]
            for each in spans
            if each is not span and each["ts"] <= begin and end <= each["ts"] + each["dur"]
        ]
        assert outer in ("", *around), (path, around)
        for other in spans:
            apart = other["ts"] >= end or other["ts"] + other["dur"] <= begin
            nested = other["args"]["path"].startswith(path) or path.startswith(
                other["args"]["path"]
            )
            assert apart or nested, (path, other["args"]["path"])


def steps_of(spans: Spans, count: int) -> list[dict[str, float]]:
    lines = []
    for step in range(1, count + 1):
        spans.step = step
        with spans("rollout"):
            for _ in range(2):
                with spans("generate"):
                    torch.ones(100).sum().item()
        with spans("update"):
            torch.ones(100).mean().item()
        lines.append(spans.added({}))
    return lines


def test_chosen_steps_have_files_that_agree_with_the_timing(tmp_path: Path) -> None:
    spans = Spans()
    with profiling(tmp_path / "profiles", 3, spans, [2, 4, 9], with_torch=False):
        lines = steps_of(spans, 5)
    names = [f"step-{step:08d}.rank-3.json.gz" for step in (2, 4)]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == names
    for name, line in zip(names, (lines[1], lines[3]), strict=True):
        found = load(tmp_path / "profiles" / name)
        paths = [each["args"]["path"] for each in found]
        assert paths == ["rollout", "rollout/generate", "rollout/generate", "update"]
        require_nesting(found)
        seconds: defaultdict[str, float] = defaultdict(float)
        for each in found:
            seconds[each["args"]["path"]] += each["dur"] / 1e6
        measured = {
            k.removeprefix("timing_s/").replace(".", "/"): v
            for k, v in line.items()
            if "timing_s" in k
        }
        assert seconds == pytest.approx({k: v for k, v in measured.items() if k != "step"})


def test_a_step_that_raises_is_written_as_well(tmp_path: Path) -> None:
    spans = Spans()
    spans.step = 1

    def fails() -> None:
        with profiling(tmp_path, 0, spans, [1], with_torch=True), spans("update"):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    (span,) = load(tmp_path / "step-00000001.rank-0.json.gz")
    assert span["name"] == "update"
    assert spans.around == spans.ended == []


def test_torch_profiles_the_same_steps(tmp_path: Path) -> None:
    spans = Spans()
    with profiling(tmp_path, 0, spans, [2], with_torch=True):
        steps_of(spans, 3)
    names = ["step-00000002.rank-0.json.gz", "step-00000002.rank-0.torch.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    trace = json.loads(gzip.decompress((tmp_path / names[1]).read_bytes()))
    counts: defaultdict[str, int] = defaultdict(int)
    for event in trace["traceEvents"]:
        counts[event["name"]] += event["ph"] == "X"
    assert counts["rollout/generate"] == 2
    assert counts["update"] == 1
    assert counts["aten::mean"] >= 1


def test_a_disk_that_is_full_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file in the way")
    spans = Spans()
    with profiling(tmp_path / "profiles", 0, spans, [1, 2], with_torch=False):
        steps_of(spans, 2)
    assert [each.levelname for each in caplog.records] == ["WARNING"] * 2
