"""Files of runs that are no files: pipes, sockets, devices, directories, and links to what belongs to others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.nightly import by_day

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from support.runs.rollout_files import row, write
from view.served import viewer

from burnish.checkpoint.tools.listing import listed_steps
from burnish.cli.main import main
from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.files.lease import LEASE, holding_lease, is_held
from burnish.files.storage import LOCAL, open_regular
from burnish.tracking.report import write_report
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import read_metrics
from burnish.view.runs import settings_of

FILES = (
    "checkpoints/.lease", "metrics.jsonl", "config.yaml", "status.json", "environment.json", "git.diff",
    "logs/rank-0.log", "profiles/step-00000001.rank-0.json.gz", "traces/step-00000001.jsonl.gz",
    "rollouts/step-00000001.jsonl.gz", "checkpoints/pins.json",
)  # fmt: skip
PATHS = ("runs", "metrics", "rollouts", "facets", "timeline", "checkpoints", "log", "config", "environment")  # fmt: skip


def make(path: Path) -> Path:
    run = RunDirectory(path)
    run.write_environment({"run": "a"})
    run.write_status(2, "finished")
    run.config.write_text(dump_yaml(RunConfig(name=path.name, steps=2)))
    run.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.75}\n')
    for each in (run.checkpoints, run.logs, run.profiles, run.traces, run.rollouts):
        each.mkdir()
    write(run.rollouts, 1, [row(1, 0)])
    return path


def a_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a socket": a_socket,
    "a directory": Path.mkdir,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a link to a pipe": lambda path: (
        os.mkfifo(path.with_name(f"{path.name}-pipe")),
        path.symlink_to(f"{path.name}-pipe"),
    ),
}


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)


@pytest.mark.parametrize("kind", by_day(KINDS, ["a pipe", "an endless device"]))
def test_the_viewer_waits_for_none_and_shows_the_other_runs(kind: str, tmp_path: Path) -> None:
    make(tmp_path / "good")
    for number, name in enumerate(FILES):
        replace(make(tmp_path / f"bad-{number}") / name, kind)
    with viewer(tmp_path) as found:
        listed = {each["run"]: each for each in found.get("runs")["runs"]}
        assert listed["good"]["error"] is None
        assert listed["good"]["reward"] == 0.75
        for number, name in enumerate(FILES):
            for path in PATHS:
                reply = found.ask(f"/api/{path}?run=bad-{number}")
                assert reply.status < 500, (name, path, reply.body)
        assert found.get("rollouts", run="good")["total"] == 1


@pytest.mark.parametrize("kind", by_day(KINDS, ["a pipe", "an endless device"]))
def test_lists_of_runs_name_it_and_have_the_others(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "good")
    for number, name in enumerate(FILES[:4]):
        replace(make(tmp_path / f"bad-{number}") / name, kind)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {Path(each["run"]).name: each for each in json.loads(capsys.readouterr().out)["runs"]}
    assert rows["good"]["state"] == "finished"
    assert rows["good"]["last"]["reward/mean"] == {"value": 0.75, "step": 2}
    assert set(rows) == {"good", "bad-0", "bad-1", "bad-2", "bad-3"}
    if "link" not in kind:  # a link to nothing is no file
        assert all(rows[f"bad-{number}"]["state"] != "finished" for number in (1, 3))
    for pair in ("good", "bad-1"), ("bad-2", "good"):
        code = main(["runs", "compare", *(str(tmp_path / each) for each in pair)])
        assert "Traceback" not in capsys.readouterr().err
        assert code in (0, 1, 3, 5)


@pytest.mark.parametrize("kind", by_day(KINDS, ["a pipe", "an endless device"]))
def test_no_reader_waits(kind: str, tmp_path: Path) -> None:
    run = RunDirectory(make(tmp_path / "run"))
    lease = run.checkpoints / LEASE
    for path in (run.metrics, run.status, run.config, lease):
        replace(path, kind)
    with pytest.raises(OSError):  # noqa: PT011 - of the system
        open_regular(run.metrics)
    assert not is_held(lease)
    with pytest.raises(BurnishError), holding_lease(lease):
        pass
    assert listed_steps(run.checkpoints, LOCAL) == ([], None)
    for read in (read_metrics, lambda path: run.read_status(), lambda path: settings_of(run.root)):
        try:
            read(run.metrics)
        except (OSError, BurnishError):
            continue
    try:
        write_report(run.root)
    except (OSError, BurnishError):
        assert not run.report.exists()


def contents(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def test_the_viewer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    make(tmp_path / "root" / "run")
    before = contents(tmp_path)
    with viewer(tmp_path / "root") as found:
        for path in PATHS:
            found.get(path, run="run")
        assert found.get("rollouts", run="run", sort="reward")["total"] == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "status.json", "git.diff", "logs", "profiles", "rollouts", "checkpoints"])  # fmt: skip
def test_nothing_outside_is_shown_by_a_link(name: str, tmp_path: Path) -> None:
    other = make(tmp_path / "outside")
    (other / "logs" / "rank-0.log").write_text("a line outside\n")
    (other / "git.diff").write_text("a line outside")
    run = make(tmp_path / "root" / "run")
    place = run / name
    if place.is_dir():
        for each in place.iterdir():
            each.unlink()
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(other / name)
    with viewer(tmp_path / "root") as found:
        shown = b"".join(found.ask(f"/api/{path}?run=run").body for path in PATHS)
        assert b"a line outside" not in shown
        assert b"leads out of" in shown


def test_a_directory_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "good")
    closed = make(tmp_path / "closed")
    scan = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {Path(each["run"]).name: each for each in json.loads(capsys.readouterr().out)["runs"]}
    assert set(rows) == {"good", "closed"}
