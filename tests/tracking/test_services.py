"""W&B, MLflow, Trackio and SwanLab, really: files and a server on loopback, read back by their own clients.

`make nightly` makes the environment that has them, `.venv-trackers`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from contracts.tracker import Record, ServiceContract
from support.ranks.ports import free_port
from support.runs.training_files import make_files
from tracking.test_otlp import traced

from burnish.errors import UsageError
from burnish.tracking.trackers import load_tracker, read_metrics

pytestmark = [
    pytest.mark.nightly,
    # What the services' own clients do is theirs.
    pytest.mark.filterwarnings("default"),
]
DECODED = ("reward/mean", "actor/grad_norm", "actor/lr", "actor/pg_loss", "val/mean@1")


@pytest.fixture(autouse=True)
def _nothing_leaves_the_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked: list[Any] = []
    connect, find = socket.socket.connect, socket.getaddrinfo

    def is_here(host: object) -> bool:
        return host in (None, "", "127.0.0.1", "::1", "localhost")

    def connects(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not is_here(address[0]):
            asked.append(address)
        connect(self, address)

    def finds(host: object, *arguments: Any, **named: Any) -> Any:
        if not is_here(host):
            asked.append(host)
        return find(host, *arguments, **named)

    monkeypatch.setattr(socket.socket, "connect", connects)
    monkeypatch.setattr(socket, "getaddrinfo", finds)
    yield
    assert asked == []


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

    def test_it_takes_traces(
        self, tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mlflow import MlflowClient

        client = MlflowClient()
        place = client.create_experiment("traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-mlflow-experiment-id={place}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # its first request is slow
        traced(tmp_path, mlflow_server, text="fünf")
        found = client.search_traces(locations=[place])
        assert len(found) == 2
        spans = {span.name: span for span in found[0].data.spans}
        assert set(spans) == {"rollout", "text_completion me/tiny", "reward exact", "reward late"}
        assert spans["reward late"].status.status_code.name == "ERROR"
        assert spans["reward exact"].attributes["burnish.reward.inputs.completion"] == "fünf"
        assert spans["reward exact"].parent_id == spans["rollout"].span_id


@pytest.fixture(scope="module")
def trackio_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Trackio writes, which it reads from the environment when it is imported."""
    place = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(place))
        pytest.importorskip(
            "trackio", reason="trackio is in .venv-trackers, which make nightly makes"
        )
        yield place


class TestTrackio(ServiceContract):
    name = "trackio"

    @pytest.fixture(autouse=True)
    def _local(self, trackio_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACKIO_PROJECT", "sums")
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            monkeypatch.delenv(name, raising=False)

    def rows(self, directory: Path) -> list[dict[str, Any]]:
        """All rows of the only run of this directory, from the database."""
        from trackio.sqlite_storage import SQLiteStorage

        records = SQLiteStorage.get_run_records("sums")
        wanted = f"{directory.name}-{directory.name[:8]}"
        (run,) = [each for each in records if each["name"] == wanted]
        found: list[dict[str, Any]] = SQLiteStorage.get_logs("sums", wanted, run_id=run["id"])
        return found

    def read(self, directory: Path) -> list[tuple[int, dict[str, float]]]:
        rows = self.rows(directory)
        return [(row["step"], {k: row[k] for k in DECODED if k in row}) for row in rows]

    def sample(self, directory: Path) -> dict[str, object]:
        (table,) = [row["rollouts/step"] for row in self.rows(directory) if "rollouts/step" in row]
        (row,) = table["_value"]
        return dict(row)

    def setting(self, directory: Path, name: str) -> str:
        from trackio.sqlite_storage import SQLiteStorage

        found = SQLiteStorage.get_run_config("sums", f"{directory.name}-{directory.name[:8]}")
        assert found["environment"]["git_commit"] == "c0ffee"
        return str(found[name])

    def artifact(self, directory: Path, kind: str) -> dict[str, Any]:
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, Any] = SQLiteStorage.get_artifact_manifest(
            "sums", f"{kind}-{directory.name}", "latest"
        )
        return found

    def files(self, directory: Path) -> set[str]:
        kinds = [self.artifact(directory, kind)["manifest"] for kind in ("run", "report")]
        return {entry["path"] for manifest in kinds for entry in manifest}

    def checkpoint(self, directory: Path) -> str:
        found = self.artifact(directory, "checkpoint")
        (entry,) = found["manifest"]
        assert entry["ref"] == f"file://{found['metadata']['place']}/weights"
        return str(found["metadata"]["place"])

    def test_a_checkpoint_on_a_mirror_is_noted(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        tracker.tell("log_file", "s3://bucket/run/checkpoints/step-00000007", "checkpoint")
        tracker.close()
        (row,) = self.rows(tmp_path)
        assert (row["step"], row["checkpoint"]) == (7, "s3://bucket/run/checkpoints/step-00000007")


class TestSwanlab(ServiceContract):
    name = "swanlab"

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip(
            "swanlab", reason="swanlab is in .venv-trackers, which make nightly makes"
        )
        monkeypatch.setenv("SWANLAB_MODE", "offline")
        monkeypatch.setenv("SWANLAB_PROJ_NAME", "sums")

    def records(self, directory: Path) -> list[Any]:
        """All that is in the run's files, which `swanlab sync` sends."""
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record as Written

        found = []
        for path in sorted(directory.glob("swanlog/*/*.swanlab")):
            found += [Written.FromString(data) for data in leveldb_records(path.read_bytes())]
        ids = {record.start.id for record in found if record.HasField("start")}
        assert ids == {directory.name}
        return found

    def read(self, directory: Path) -> list[tuple[int, dict[str, float]]]:
        found: list[tuple[int, dict[str, float]]] = []
        for record in self.records(directory):
            if record.HasField("scalar"):
                if not found or found[-1][0] != record.scalar.step:
                    found.append((record.scalar.step, {}))
                assert record.scalar.key not in found[-1][1], "logged twice"
                found[-1][1][record.scalar.key] = record.scalar.value.number
        return found

    def sample(self, directory: Path) -> dict[str, object]:
        (path,) = directory.glob("swanlog/*/media/echarts/*.json")
        (row,) = json.loads(path.read_text())["rowData"]
        return dict(row)

    def setting(self, directory: Path, name: str) -> str:
        (path,) = directory.glob("swanlog/*/files/config.yaml")
        held = yaml.safe_load(path.read_text())
        assert held["environment"]["value"]["git_commit"] == "c0ffee"
        return str(held[name]["value"])

    def files(self, directory: Path) -> set[str]:
        saved = [each.save.source_path for each in self.records(directory) if each.HasField("save")]
        return {Path(path).name for path in saved}

    def checkpoint(self, directory: Path) -> str:
        (path,) = directory.glob("swanlog/*/media/text/*.txt")
        return path.read_text()

    def test_a_run_that_would_ask_for_a_key_is_refused_before_it_begins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
        monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
        for mode, key, fits in (("online", "", False), ("online", "k", True), ("local", "", True)):
            monkeypatch.setenv("SWANLAB_MODE", mode)
            if key:
                monkeypatch.setenv("SWANLAB_API_KEY", key)
            else:
                monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
            if fits:
                assert load_tracker("swanlab").__name__ == "SwanlabTracker"
            else:
                with pytest.raises(UsageError):
                    load_tracker("swanlab")


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_one_run_gives_all_its_numbers_to_all_services(
    tmp_path: Path, trackio_place: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """MLflow straight into a store, without a server."""
    for package in ("mlflow", "swanlab", "wandb"):
        pytest.importorskip(package, reason="it is in .venv-trackers, which make nightly makes")
    places = {"file": f"file://{tmp_path}/mlruns", "sqlite": f"sqlite:///{tmp_path}/mlflow.db"}
    project = f"all-{store}"
    environ = {
        "MLFLOW_TRACKING_URI": places[store],
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_EXPERIMENT_NAME": project,
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "SWANLAB_PROJ_NAME": project,
        "TRACKIO_DIR": str(trackio_place),
        "TRACKIO_PROJECT": project,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    root = make_files(tmp_path)
    rewards = "reward.functions=[{function: 'rewards.py:letters'}, {function: 'rewards.py:same'}]"
    names = "tracking.trackers=[tensorboard,wandb,mlflow,trackio,swanlab]"
    settings = ["steps=3", "evaluation.every=1", "algorithm.advantage=gae", rewards, names]
    command = [sys.executable, "-m", "burnish", "rl", "rl.yaml", *settings]
    # A process of its own, forked from no other: clients keep what they have read of the environment.
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "lost" not in ended.stderr
    run = root / "runs" / "run"
    wanted = {
        (int(row["step"]), name): value
        for row in read_metrics(run / "metrics.jsonl")
        for name, value in row.items()
        if name != "step"
    }
    assert len({name for _, name in wanted}) > 40
    for service, found in everything(run, project, places[store]).items():
        assert wanted.keys() - found.keys() == set(), service
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-6), service


def everything(run: Path, project: str, uri: str) -> dict[str, dict[tuple[int, str], float]]:
    """All numbers of a run's services, by step and name."""
    from mlflow import MlflowClient
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record as Scalars
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, dict[tuple[int, str], float]] = defaultdict(dict)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        found["tensorboard"] |= {(e.step, name): e.value for e in events.Scalars(name)}
    for record in TestWandb().records(run):
        if record.HasField("history"):
            row = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json)
                for each in record.history.item
            }
            found["wandb"] |= {(int(row["_step"]), name): value for name, value in row.items()}
    client = MlflowClient(uri)
    place = client.get_experiment_by_name(project).experiment_id
    (stored,) = client.search_runs([place])
    for name in stored.data.metrics:
        for each in client.get_metric_history(stored.info.run_id, name):
            found["mlflow"][each.step, re.sub(r"_(\d+)$", r"@\1", name)] = each.value
    (known,) = SQLiteStorage.get_run_records(project)
    for row in SQLiteStorage.get_logs(project, known["name"], run_id=known["id"]):
        found["trackio"] |= {(row["step"], name): value for name, value in row.items()}
    for path in run.glob("swanlog/*/*.swanlab"):
        for data in leveldb_records(path.read_bytes()):
            record = Scalars.FromString(data)
            if record.HasField("scalar"):
                number = record.scalar.value.number
                found["swanlab"][record.scalar.step, record.scalar.key] = number
    return found


def test_the_services_are_refused_without_their_packages() -> None:
    """By the preflight; a class is found without its package, which is imported with the first tracker."""
    assert load_tracker("mlflow").__name__ == "MlflowTracker"
