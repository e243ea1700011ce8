"""W&B and MLflow, really: files and a server on loopback, read back by their own clients.

`make nightly` makes the environment that has them, `.venv-trackers`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.tracker import Record, ServiceContract
from ports import free_port

from burnish.errors import UsageError
from burnish.tracking.trackers import load_tracker

pytestmark = [
    pytest.mark.nightly,
    # What the services' own clients do is theirs.
    pytest.mark.filterwarnings("default"),
]
DECODED = ("reward/mean", "actor/grad_norm", "actor/lr", "actor/pg_loss", "val/mean@1")


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, whose first 7 bytes are W&B's own."""
    place, parts = 7, b""
    while place + 7 <= len(log):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, place)
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


class TestWandb(ServiceContract):
    name = "wandb"

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("wandb", reason="wandb is in .venv-trackers, which make nightly makes")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_PROJECT", "sums")

    def records(self, directory: Path) -> list[Any]:
        """All that is in the run's offline files, which `wandb sync` sends, once W&B's process has written their ends."""
        from wandb.proto.wandb_internal_pb2 import Record as Written

        deadline, found = time.monotonic() + 60, []
        for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
            records: list[Any] = []
            while not (records and records[-1].HasField("exit")):
                assert time.monotonic() < deadline
                records = [Written.FromString(data) for data in leveldb_records(path.read_bytes())]
                time.sleep(0.1)
            found += records
        return found

    def read(self, directory: Path) -> list[tuple[int, dict[str, float]]]:
        runs = {r.run.run_id for r in self.records(directory) if r.HasField("run")}
        assert runs == {directory.name}
        rows = []
        for record in self.records(directory):
            if record.HasField("history"):
                row = {
                    (each.key or "/".join(each.nested_key)): json.loads(each.value_json)
                    for each in record.history.item
                }
                values = {name: float(row[name]) for name in DECODED if name in row}
                rows.append((int(row["_step"]), values))
        return rows

    def sample(self, directory: Path) -> dict[str, object]:
        (path,) = directory.glob("wandb/offline-run-*/files/media/table/rollouts/*.json")
        table = json.loads(path.read_text())
        (row,) = table["data"]
        return dict(zip(table["columns"], row, strict=True))

    def setting(self, directory: Path, name: str) -> str:
        for record in self.records(directory):
            if record.HasField("run"):
                assert record.run.project == "sums"
                found = {each.key: each.value_json for each in record.run.config.update}
                assert json.loads(found["environment"])["git_commit"] == "c0ffee"
                return str(found[name])
        raise AssertionError("no run")

    def artifacts(self, directory: Path) -> list[Any]:
        return [each.artifact for each in self.records(directory) if each.HasField("artifact")]

    def files(self, directory: Path) -> set[str]:
        contents = [each.manifest.contents for each in self.artifacts(directory)]
        return {entry.path for entries in contents for entry in entries if entry.size}

    def checkpoint(self, directory: Path) -> str:
        (found,) = [each for each in self.artifacts(directory) if each.type == "checkpoint"]
        (entry,) = found.manifest.contents
        place = str(json.loads(found.metadata)["place"])
        assert entry.ref == f"file://{place}/weights"
        return place

    def test_a_run_that_would_ask_for_a_key_is_refused_before_it_begins(
        self, tmp_path: Path
    ) -> None:
        """In a process of its own, because W&B keeps what it has read."""
        program = "from burnish.tracking.trackers import load_tracker\nprint(load_tracker('wandb'))"
        given = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        given |= {"HOME": str(tmp_path)}
        for more, fits in (
            ({}, False),
            ({"WANDB_API_KEY": "k" * 40}, True),
            ({"WANDB_MODE": "offline"}, True),
        ):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=given | more,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode == 0) == fits, done.stderr
            assert fits or UsageError.__name__ in done.stderr


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server on loopback over SQLite."""
    pytest.importorskip("mlflow", reason="mlflow is in .venv-trackers, which make nightly makes")
    home, port = tmp_path_factory.mktemp("mlflow"), free_port()
    store = ["--backend-store-uri", f"sqlite:///{home}/mlflow.db"]
    store += ["--artifacts-destination", str(home / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--port", str(port)]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--workers", "1"],
            cwd=home,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert process.poll() is None, (home / "log").read_text()
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


class TestMlflow(ServiceContract):
    name = "mlflow"

    @pytest.fixture(autouse=True)
    def _found(self, mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sums")

    def run(self, directory: Path) -> Any:
        """The only run of this directory."""
        from mlflow import MlflowClient

        client = MlflowClient()
        place = client.get_experiment_by_name("sums").experiment_id
        (run,) = client.search_runs([place], f"tags.`burnish.run` = '{directory.name}'")
        assert run.info.status == "FINISHED"
        return client, run

    def read(self, directory: Path) -> list[tuple[int, dict[str, float]]]:
        client, run = self.run(directory)
        found: Record = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                values = found.setdefault(metric.step, {})
                assert name not in values, "logged twice"
                huge = abs(metric.value) > 1e308
                values[name.replace("_1", "@1")] = metric.value * 10 if huge else metric.value
        return list(found.items())

    def artifact(self, directory: Path, name: str) -> str:
        import mlflow.artifacts

        _, run = self.run(directory)
        return str(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{name}"))

    def sample(self, directory: Path) -> dict[str, object]:
        (row,) = csv.DictReader(io.StringIO(self.artifact(directory, "rollouts/step-00000001.csv")))
        return dict(row)

    def setting(self, directory: Path, name: str) -> str:
        _, run = self.run(directory)
        assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
        return str(run.data.params[name])

    def files(self, directory: Path) -> set[str]:
        client, run = self.run(directory)
        assert self.artifact(directory, "git.diff") == "-old\n+new\n"
        return {each.path for each in client.list_artifacts(run.info.run_id)}

    def checkpoint(self, directory: Path) -> str:
        _, run = self.run(directory)
        return str(run.data.tags["burnish.checkpoint"])

    def test_a_server_that_is_away_costs_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        tracker = self.open(tmp_path)
        for step in range(1, 4):
            tracker.log(step, {})
        tracker.close()
        assert [each.args[1] for each in caplog.records if "lost" in each.message] == [3]
        caplog.clear()


def test_the_services_are_refused_without_their_packages() -> None:
    """By the preflight; a class is found without its package, which is imported with the first tracker."""
    assert load_tracker("mlflow").__name__ == "MlflowTracker"
