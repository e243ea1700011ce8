"""The page's server, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from support.runs.rollout_files import row, write
from support.runs.rollouts import made_rollout, table_of

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from view.served import Viewer, viewer

from bench.view_runs import HOSTILE, make_hostile_run, make_run
from burnish.config.schema import TracesConfig
from burnish.files.lease import LEASE, holding_lease
from burnish.records import RewardCall
from burnish.tracking.logs import rank_log
from burnish.tracking.profiles import profiling
from burnish.tracking.rollouts import rollouts_path, write_rollouts
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.spans import Spans
from burnish.tracking.traces import Traces
from burnish.tracking.trackers import JsonlTracker
from burnish.view.server import PAGE

PATHS = (
    "runs", "metrics", "rollouts", "facets", "timeline", "checkpoints", "log", "config", "environment",
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
    assert [
        (each["run"], each["state"], each["kind"], each["step"], each["of"]) for each in found
    ] == [
        ("hostile", "finished", "rl", 1, 1),
        ("sweep/small", "finished", "rl", 60, 60),
    ]
    assert found[1]["validation_name"] == "val/reward"
    assert found[1]["model"] == "made"


def test_every_path_answers(served: Viewer) -> None:
    for path in PATHS:
        assert served.get(path, run="sweep/small")
        served.get(path, run="nowhere", status=200 if path == "runs" else 404)


def test_a_directory_that_is_a_run(served: Viewer) -> None:
    with viewer(served.answers.root / "hostile") as found:
        (run,) = found.get("runs")["runs"]
        assert (run["run"], run["name"]) == ("", "hostile")
        assert found.get("metrics", run="")[""]["last_step"] == 1
        assert len(found.get("rollouts")["rows"]) == len(HOSTILE)


def test_hostile_texts_come_back_as_they_are(served: Viewer) -> None:
    rows = [each for page in served.pages(run="hostile", limit=5) for each in page["rows"]]
    assert [each["completion"] for each in rows] == [text[:300] for text in HOSTILE]
    assert [each["reward"] for each in rows][:4] == ["NaN", "Infinity", "-Infinity", 0.0]
    for each, text in zip(rows, HOSTILE, strict=True):
        whole = served.get("rollout", run="hostile", id=each["id"])
        assert whole["completion"] == text
        assert whole["tokens"] is None or whole["tokens"]["texts"] == list(HOSTILE[:4])
    assert HOSTILE[0] in served.get("metrics", run="hostile")["hostile"]["names"]


def test_every_answer_is_guarded(served: Viewer) -> None:
    for path in (
        "/",
        "/api/runs",
        "/api/nothing",
        "/api/rollouts?run=nowhere",
        "/static/nothing.js",
    ):
        headers = served.ask(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"


def test_only_reading_is_answered(served: Viewer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert served.ask("/api/runs", method).status == 405
    reply = served.ask("/api/runs", "HEAD")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1]x", "10.0.0.1", ""]
)
def test_another_name_for_this_machine_is_refused(served: Viewer, host: str) -> None:
    assert served.ask("/api/runs", headers={"Host": host}).status == 403
    assert served.ask("/api/runs", headers={"Host": f"localhost:{served.port}"}).status == 200


def test_a_token_is_needed_where_there_is_one(served: Viewer) -> None:
    with viewer(served.answers.root, token="secret") as found:
        assert [found.ask(path).status for path in ("/", "/api/runs", "/static/main.js")] == [
            401
        ] * 3
        assert found.ask("/?token=secre").status == 401
        assert found.ask("/api/runs", headers={"Authorization": "Bearer wrong"}).status == 401
        assert found.ask("/api/runs", headers={"Authorization": "Bearer secret"}).status == 200
        opened = found.ask("/?token=secret")
        assert (opened.status, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        given = {"Cookie": cookie.partition(";")[0], "Host": f"any.example:{found.port}"}
        assert found.ask("/api/runs", headers=given).status == 200


def test_nothing_outside_of_the_directory_is_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", make_hostile_run(tmp_path / "outside")
    inside = make_run(root / "inside", steps=2)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("")
    for name in (
        "config.yaml",
        "status.json",
        "metrics.jsonl",
        "git.diff",
        "logs",
        "rollouts",
        "checkpoints",
    ):
        run = make_run(root / f"with-{name}", steps=2)
        place = run / name
        if place.is_dir():
            place.rmdir()
        place.unlink(missing_ok=True)
        place.symlink_to(
            outside if name in ("logs", "rollouts", "checkpoints") else outside / "config.yaml"
        )
    (inside / "logs").mkdir()
    (inside / "logs" / "rank-0.log").symlink_to(outside / "config.yaml")
    with viewer(root) as found:
        for run in (
            "..",
            "../outside",
            str(outside),
            "link",
            "loop",
            "inside/..",
            "inside/../inside",
            "file",
            "x\0",
            "x" * 5000,
            "inside/checkpoints",
        ):
            found.get("environment", run=run, status=404)
        listed = {each["run"]: each for each in found.get("runs")["runs"]}
        assert "link" not in listed
        refused = [name for name, each in listed.items() if each["error"]]
        assert sorted(refused) == ["with-config.yaml", "with-metrics.jsonl", "with-status.json"]
        for path, name in (
            ("config", "config.yaml"), ("metrics", "metrics.jsonl"),
            ("environment", "git.diff"), ("log", "logs"), ("rollouts", "rollouts"), ("checkpoints", "checkpoints"),
        ):  # fmt: skip
            found.get(path, run=f"with-{name}", status=400)
        found.get("log", run="inside", status=400)
        for path in (
            "/static/../server.py",
            "/static/..%2fserver.py",
            "/static/%2e%2e/server.py",
            "/static//etc/passwd",
            "/static/",
        ):
            assert found.ask(path).status == 404


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", steps=2)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with viewer(tmp_path / "runs") as found:
        assert found.get("runs")["runs"][0]["error"]
        found.get("metrics", run="a", status=400)


def test_the_page_is_served(served: Viewer) -> None:
    if not (PAGE / "index.html").exists():
        pytest.skip("the page is not there yet")
    assert b"<html" in served.ask("/").body
    for path in PAGE.iterdir():
        assert served.ask(f"/static/{path.name}").body == path.read_bytes()
    assert served.ask("/static/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("rollouts", "kind", "x"), ("rollouts", "sort", "x"), ("rollouts", "step", "1.5"), ("rollouts", "prompt", 2**70),
        ("rollouts", "min_reward", "nan"), ("rollouts", "limit", "many"), ("rollouts", "cursor", "x"), ("metrics", "points", "x"),
        ("timeline", "step", "1e3"), ("log", "rank", "x"), ("log", "before", "x"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(served: Viewer, path: str, name: str, value: Any) -> None:
    error = served.get(path, run="sweep/small", **{name: value}, status=400)["error"]
    assert error["problem"].startswith(name)


def test_curves(served: Viewer) -> None:
    run = "sweep/small"
    told = served.get("metrics", run=run)[run]
    assert told["last_step"] == 60
    assert told["names"][:2] == ["reward/mean", "response_length/mean"]
    curve = served.get("metrics", run=run, names="reward/mean,nothing")[run]
    assert curve.keys() == {"reward/mean"}
    whole = curve["reward/mean"]
    assert whole["steps"] == list(range(1, 61))
    assert whole["values"] == whole["low"] == whole["high"]
    short = served.get("metrics", run=run, names="reward/mean", points=4, **{"from": 21, "to": 40})[
        run
    ]["reward/mean"]
    assert short["steps"] == [25, 30, 35, 40]
    values = whole["values"][20:25]
    assert short["values"][0] == pytest.approx(sum(values) / 5, rel=1e-5)
    assert (short["low"][0], short["high"][0]) == (min(values), max(values))
    both = served.get("metrics", run=[run, "hostile"], names="reward/mean")
    assert both["hostile"]["reward/mean"]["values"] == [0.5]


def test_the_phases_of_a_step(served: Viewer) -> None:
    found = served.get("timeline", run="sweep/small", step=7)
    assert found["steps"] == list(range(1, 61))
    (rank,) = found["ranks"]
    spans = {each["name"]: each for each in rank["spans"]}
    assert spans.keys() == {"rollout", "rollout/generate", "update"}
    assert spans["rollout/generate"]["depth"] == 1
    assert spans["rollout/generate"]["start"] == spans["rollout"]["start"] == 0
    assert spans["update"]["start"] == spans["rollout"]["seconds"]
    for step in (99, 2**40, -1):
        assert served.get("timeline", run="sweep/small", step=step)["ranks"] == []


def test_the_phases_of_a_profiled_step(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "a", steps=2))
    for rank in (0, 1):
        spans = Spans(clock=iter(range(100)).__next__)
        with profiling(run.profiles, rank, spans, [2], with_torch=False):
            spans.step = 2
            with spans("rollout"), spans("generate"):
                pass
    with viewer(tmp_path) as found:
        ranks = found.get("timeline", run="a", step=2)["ranks"]
        assert [each["rank"] for each in ranks] == [0, 1]
        for each in ranks:
            spans_of = {span["name"]: span for span in each["spans"]}
            assert {name: span["depth"] for name, span in spans_of.items()} == {
                "rollout": 0,
                "rollout/generate": 1,
            }
            assert spans_of["rollout/generate"]["seconds"] == pytest.approx(1, abs=1e-3)
        assert min(span["start"] for each in ranks for span in each["spans"]) == 0
        assert len(found.get("timeline", run="a", step=1)["ranks"]) == 1
        next(run.profiles.iterdir()).write_bytes(b"no gzip")
        found.get("timeline", run="a", step=2, status=400)


def test_the_trace_of_a_rollout(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "a", steps=2))
    calls = (
        RewardCall("exact", 1.0, None, 102.5, 0.25),
        RewardCall("late", None, "TimeoutError: <b>", 102.0, 5.0),
    )
    rollouts = [made_rollout(5, 0), made_rollout(5, 1, error="late", calls=calls)]
    rollouts += [made_rollout(5, 0, reward=0.0)]  # the prompt again
    write_rollouts(run.rollouts, 9, table_of(rollouts), [0.0] * 3)
    with viewer(tmp_path) as found:
        first, again, second = found.get("rollouts", run="a", from_step=9)["rows"]
        assert found.get("rollout", run="a", id=second["id"])["trace"] is None
        Traces(run, TracesConfig(), 10**9, 0).take(9, rollouts, [0.0] * 3, [0, 1, 2])
        told = found.get("rollout", run="a", id=second["id"])["trace"]
        spans = {
            span["name"]: (span["start"], span["seconds"], span["depth"], span["error"])
            for span in told["spans"]
        }
        assert [spans.pop("rollout"), spans.pop("reward exact"), spans.pop("reward late")] == [
            (0, 7, 0, "a reward has no value"),
            (2.5, 0.25, 1, None),
            (2, 5, 1, "TimeoutError: <b>"),
        ]
        assert list(spans.values()) == [(0, 2, 1, None)]  # the generation
        assert told["spans"][0]["attributes"]["burnish.sample"] == 1
        other = found.get("rollout", run="a", id=first["id"])["trace"]["spans"]
        assert other[0]["attributes"]["burnish.sample"] == 0
        other = found.get("rollout", run="a", id=again["id"])
        assert other["trace"]["spans"][0]["attributes"]["burnish.reward"] == other["reward"] == 0
        rollouts_path(run.traces, 9).write_bytes(b"no gzip")
        assert found.get("rollout", run="a", id=second["id"])["trace"]["problem"]


def test_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2)
    (run / "logs").mkdir()
    lines = [f"line {number} \x1b[31m<b>é" for number in range(100)]
    for name, some in (
        ("rank-0.log.2", lines[:30]),
        ("rank-0.log.1", lines[30:60]),
        ("rank-0.log", lines[60:]),
    ):
        (run / "logs" / name).write_text("\n".join(some) + "\n")
    (run / "logs" / "rank-11.log").write_bytes(b"\xff\n")
    (run / "logs" / "other").write_text("x")
    with viewer(tmp_path) as found:
        answer = found.get("log", run="a", rank=11)
        assert [entry["text"] for entry in answer.pop("entries")] == ["\ufffd"]
        assert answer == {"ranks": [0, 11], "before": None, "reason": None, "failure": None}
        assert whole_log(found, lines=7) == lines
        assert whole_log(found, lines=7, text="LINE 5") == [lines[5], *lines[50:60]]
        assert found.get("log", run="a", rank=5)["entries"] == []


def whole_log(found: Viewer, **values: Any) -> list[str]:
    """The texts of all entries, page by page."""
    read: list[str] = []
    before = ""
    while before is not None:
        answer = found.get("log", run="a", before=before, **values)
        read = [entry["text"] for entry in answer["entries"]] + read
        before = answer["before"]
    return read


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2)
    (run / "logs").mkdir()
    lines = [f"{number} " + "x" * 600 for number in range(16_000)]
    (run / "logs" / "rank-0.log").write_text("\n".join(lines) + "\n")
    with viewer(tmp_path) as found:
        assert whole_log(found, lines=10_000) == lines
        assert whole_log(found, text="7 x", level="info") == lines[7::10]
        assert whole_log(found, level="warning") == []
        (run / "logs" / "rank-0.log").write_text("x" * (9 << 20))  # one line, longer than a piece
        assert len(found.get("log", run="a")["entries"][0]["text"]) == 4 << 20


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_is_read_as_it_was_written(tmp_path: Path, form: Literal["text", "json"]) -> None:
    run = RunDirectory(make_run(tmp_path / "a", steps=2))
    spans = Spans()
    written = logging.getLogger("burnish")

    def fails() -> None:
        with rank_log(run.logs / "rank-0.log", 0, spans, form):
            written.info("first\n  and second")
            spans.step = 2
            with spans("update"):
                written.warning("slow")
                print(1 / 0)

    with pytest.raises(ZeroDivisionError):
        fails()
    with (run.logs / "rank-0.log").open("a") as file:
        file.write("of another program\nFatal Python error: Aborted\n\nThread 0x7f:\n  File\n")
    with viewer(tmp_path) as found:
        entries = found.get("log", run="a")["entries"]
        names = ("level", "step", "phase", "text")
        assert [tuple(entry[name] for name in names) for entry in entries] == [
            ("info", None, "", "first"),
            ("debug", 2, "update", "begins"),
            ("warning", 2, "update", "slow"),
            ("critical", 2, "update", "the run ends with an error"),
            ("", None, "", "of another program"),
            ("critical", None, "", "Fatal Python error: Aborted"),
        ]
        assert entries[0]["more"] == "  and second"
        assert entries[3]["more"].startswith("Traceback (most recent call last):\n  File")
        assert entries[3]["more"].endswith("\nZeroDivisionError: division by zero")
        assert entries[-1]["more"] == "\nThread 0x7f:\n  File"
        assert all(datetime.fromisoformat(entry["time"]) for entry in entries[:4])
        levels = {"info": 5, "warning": 3, "error": 2, "critical": 2}
        for level, count in levels.items():
            assert len(found.get("log", run="a", level=level)["entries"]) == count
        assert found.get("log", run="a")["failure"] is None
        run.write_status(2, "failed", {"problem": "x"})
        assert found.get("log", run="a")["failure"] == entries[3]
        with rank_log(run.logs / "rank-0.log", 0, Spans(), form):
            written.info("another start")
        assert found.get("log", run="a")["failure"] is None
        found.get("log", run="a", level="loud", status=400)


def test_configurations_beside_each_other(served: Viewer) -> None:
    found = served.get("config", run=["sweep/small", "hostile"])
    assert found["text"]["hostile"].startswith("name: hostile")
    settings = {each["setting"]: each["values"] for each in found["settings"]}
    assert settings["steps"] == [60, 1]
    assert found["different"] == ["name", "steps"]
    path = served.answers.root / "hostile" / "config.yaml"
    text = path.read_text()
    path.write_text(text + "setting_of_old: 1\n")  # of another version
    different = served.get("config", run=["sweep/small", "hostile"])["different"]
    path.write_text("]")
    served.get("config", run="hostile", status=400)
    path.write_text(text)
    assert "setting_of_old" in different


def test_where_a_run_ran(served: Viewer) -> None:
    found = served.get("environment", run="hostile")
    assert (found["environment"]["trainer"], found["diff"]) == ("rl", None)
    (served.answers.root / "hostile" / "git.diff").write_bytes(b"+ \xff\n")
    assert served.get("environment", run="hostile")["diff"] == "+ \ufffd\n"


def next_event(reply: http.client.HTTPResponse) -> Any:
    while not (line := reply.readline()).startswith(b"data: "):
        assert line
    return json.loads(line[6:])


def test_a_run_that_grows(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "a", steps=3))
    run.write_status(9, "running")
    tracker = JsonlTracker(run.metrics, resume_step=3)
    write(run.rollouts, 3, [row()])
    with viewer(tmp_path) as found, holding_lease(run.checkpoints / LEASE):
        assert found.get("runs")["runs"][0]["state"] == "running"
        assert found.get("metrics", run="a")["a"]["last_step"] == 3
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=30)
        connection.request("GET", "/api/live")
        reply = connection.getresponse()
        assert reply.readline() == b":\n"
        tracker.log(4, {"reward/mean": 0.75, "later": 1.0})
        assert next_event(reply) == {"run": "a"}
        assert found.get("runs")["runs"][0]["reward"] == 0.75
        before = found.get("rollouts", run="a")["newest"]
        assert before == 3
        write(run.rollouts, 4, [row(completion="new")])
        assert found.get("metrics", run="a", names="later")["a"]["later"]["steps"] == [4]
        while not (later := found.get("rollouts", run="a", from_step=before + 1, limit=1))["total"]:
            time.sleep(0.1)
        assert later["rows"][0]["completion"] == "new"
        assert (later["total"], later["newest"]) == (1, 4)
        tracker.close()
        tracker = JsonlTracker(
            run.metrics, resume_step=2
        )  # a start that goes on from an older step
        tracker.log(3, {"reward/mean": 0.25})
        with run.metrics.open("a") as file:
            file.write('{"step": 4, "reward/me')
        assert next_event(reply) == {"run": "a"}
        curves = found.get("metrics", run="a", names="reward/mean,later")["a"]
        assert curves["reward/mean"]["steps"] == [1, 2, 3]
        assert curves["reward/mean"]["values"][-1] == 0.25
        assert curves.get("later", {"steps": []})["steps"] == []
        with run.metrics.open("a") as file:
            file.write(
                'an": 1}\n{broken\n{"step": 5, "text": "x", "nothing": null, "reward/mean": "NaN"}\n'
            )
            file.write(f'{{"step": {10**30}, "huge": 1}}\n{"[" * 100_000}\n')
            file.write('{"step": 5, "text": "x", "nothing": null, "reward/mean": "NaN"}\n')
        told = found.get("metrics", run="a")["a"]
        assert told["last_step"] == 5
        assert "metrics.jsonl" in told["problem"]
        assert found.get("metrics", run="a", names="reward/mean")["a"]["reward/mean"]["values"][
            -2:
        ] == [1.0, "NaN"]
        reply.close()
        connection.close()
        tracker.close()
    with viewer(tmp_path) as found:
        assert found.get("runs")["runs"][0]["error"]


def test_a_run_that_is_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2, prompts=1)
    with viewer(tmp_path) as found:
        assert found.get("rollouts", run="a")["rows"]
        run.rename(tmp_path / ".gone")
        for path in PATHS[1:]:
            found.get(path, run="a", status=404)


def test_checkpoints_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2)
    (run / "checkpoints" / "step-00000002").mkdir()
    (run / "checkpoints" / "pins.json").write_text("[]")
    with viewer(tmp_path) as found:
        told = found.get("checkpoints", run="a")
    (step,) = told["steps"]
    assert (step["step"], step["damaged"], "healthy" in step) == (2, True, False)
    assert told["problem"]


def test_a_listener_that_hangs_up_leaves_nothing(served: Viewer) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert served.get("runs")
