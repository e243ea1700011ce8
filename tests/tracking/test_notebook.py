"""What a notebook shows of a run: curves while it trains, and its result."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.models.chat_templates import HYBRID, tokenizer_of
from support.models.tiny import save_tiny

import burnish
from burnish.tracking.curves import Curves
from burnish.tracking.notebook import html_of
from burnish.tracking.trackers import JsonlTracker, read_metrics

ROOT = Path(__file__).parents[2]


def log(directory: Path, rows: list[dict[str, float]]) -> Path:
    directory.mkdir(exist_ok=True)
    tracker = JsonlTracker(directory / "metrics.jsonl", resume_step=None)
    for step, row in enumerate(rows, start=1):
        tracker.log(step, row)
    tracker.close()
    return directory / "metrics.jsonl"


def logged(directory: Path, rows: list[dict[str, float]]) -> Curves:
    return Curves(log(directory, rows)).refresh()


def test_a_curve_goes_through_every_value(tmp_path: Path) -> None:
    values = [0.25, float("nan"), 0.75, 0.5]
    html = html_of(
        logged(tmp_path, [{"reward/mean": v} for v in values]), "a <b> run", ["step <4>"]
    )
    (points,) = re.findall("points='([^']*)'", html)
    xs, ys = zip(*(map(float, point.split(",")) for point in points.split()), strict=True)
    width, height = xs[-1], max(ys)
    assert [x / width * 3 for x in xs] == pytest.approx([0, 2, 3], abs=0.01)
    assert [0.75 - y / height * 0.5 for y in ys] == pytest.approx([0.25, 0.75, 0.5], abs=0.01)
    assert "a &lt;b&gt; run" in html
    assert "step &lt;4&gt;" in html


@pytest.mark.parametrize("rows", [[], [{"reward/mean": float("nan")}], [{"perf/time": 1.0}]])
def test_without_values_there_is_no_curve(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    html = html_of(logged(tmp_path, rows), "run")
    assert "<svg" not in html
    assert "run" in html


def test_a_result_names_steps_numbers_and_model(tmp_path: Path) -> None:
    log(tmp_path, [{"reward/mean": 0.5}, {"reward/mean": 0.75, "val/reward": 1.0}])
    result = burnish.Result(tmp_path)
    for shown in (repr(result), result._repr_html_()):
        assert "2 steps" in shown
        assert "reward/mean 0.75" in shown
        assert "val/reward 1" in shown
        assert str(tmp_path) in shown


@pytest.mark.nightly
def test_the_example_runs_and_shows_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(HYBRID)
    save_tiny(tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(tmp_path / "model")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=40", "steps=2").replace('"n": 8', '"n": 2')
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    rows = read_metrics(tmp_path / "runs" / "notebook" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) == 2
    assert all(html.count("<svg") == 2 for html in shown)
