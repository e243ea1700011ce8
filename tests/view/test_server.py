"""The page's server, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from view.served import Viewer, viewer

from bench.view_runs import HOSTILE, make_hostile_run, make_run

PATHS = (
    "runs", "metrics", "rollouts", "rollouts/facets", "timeline", "checkpoints", "log", "config", "environment",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "sweep" / "small", steps=60, prompts=4, every=20, tokens=8)
    make_hostile_run(root / "hostile")
    with viewer(root) as found:
        yield found


def test_runs_are_listed_newest_first(served: Viewer) -> None:
    found = served.get("runs")["runs"]
    assert [(row["run"], row["state"], row["kind"], row["step"], row["of"]) for row in found] == [
        ("hostile", "finished", "rl", 1, 1),
        ("sweep/small", "finished", "rl", 60, 60),
    ]
    assert found[1]["validation_name"] == "val/reward"
    assert found[1]["model"] == "made"


def test_every_path_answers(served: Viewer) -> None:
    for path in PATHS:
        assert served.get(path, run="sweep/small")
        served.get(path, run="nowhere", status=200 if path == "runs" else 404)


def test_hostile_texts_come_back_as_they_are(served: Viewer) -> None:
    rows = [row for page in served.pages(run="hostile", limit=5) for row in page["rows"]]
    assert [row["completion"] for row in rows] == [text[:300] for text in HOSTILE]
    assert [row["reward"] for row in rows][:4] == ["NaN", "Infinity", "-Infinity", 0.0]
    for row, text in zip(rows, HOSTILE, strict=True):
        whole = served.get("rollout", run="hostile", id=row["id"])
        assert whole["completion"] == text
        assert whole["tokens"] is None or whole["tokens"]["texts"] == list(HOSTILE[:4])
    reply = served.ask("/api/rollouts?run=hostile")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert json.loads(reply.body)
