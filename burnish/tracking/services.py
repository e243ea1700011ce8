"""Log to W&B, MLflow, Trackio and SwanLab, with their clients and environment variables; a resumed run continues."""

from __future__ import annotations

import csv
import io
import math
import netrc
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from burnish.config.document import dotted, recorded
from burnish.errors import UsageError
from burnish.tracking.rollouts import sample_table
from burnish.tracking.rundir import RUN, RunDirectory
from burnish.tracking.trackers import FileKind, State, Tracker

_PROJECT = "burnish"  # if the service's own variable names none


class _Service(Tracker):
    """The common part of services: a run's description, tables, and how the run ended."""

    def __init__(self, directory: Path) -> None:
        run = RunDirectory(directory)
        self._environment = run.read_environment()
        self._id = str(self._environment[RUN])
        self._name = directory.name
        self._config = recorded(run.config).model_dump(mode="json")
        self._described = {**self._config, "environment": self._environment}
        files = (run.config, run.environment, run.diff)
        self._files = [path for path in files if path.exists()]
        self._state: State = "finished"
        self._run: Any = None  # the service's own object

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if table := sample_table(rows):
            data = [list(row.values()) for row in table]
            self._log_table(step, f"rollouts/{kind}", list(table[0]), data)

    @abstractmethod
    def _log_table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        """Log rows of samples under a name."""

    def end(self, state: State) -> None:
        self._state = state


class _WithArtifacts(_Service):
    """W&B and Trackio, which has the same interface."""

    def _begin(self, module: Any, **settings: Any) -> None:
        self._module = module
        self._run = module.init(config=self._described, resume="allow", **settings)
        origin = module.Artifact(f"run-{self._id}", type="run")
        for path in self._files:
            origin.add_file(str(path))
        self._run.log_artifact(origin)

    def _log_table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        self._run.log({name: self._module.Table(columns=columns, data=data)}, step=step)

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log an artifact; a checkpoint's metadata say where it is."""
        artifact = self._module.Artifact(f"{kind}-{self._id}", type=kind, metadata={"place": path})
        if kind == "report":
            artifact.add_file(path)
        elif Path(path).is_dir():
            artifact.add_reference(Path(path).absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", PurePath(path).name])


class WandbTracker(_WithArtifacts):
    """Log to W&B. WANDB_PROJECT, WANDB_MODE and so on apply; WANDB_MODE=offline writes below the run's directory."""

    def __init__(self, directory: Path) -> None:
        import wandb

        super().__init__(directory)
        self._begin(
            wandb,
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self._id,
            name=self._name,
            dir=str(directory),
            # W&B's output would break progress bars, and log files have what it captures.
            settings=wandb.Settings(silent=True, console="off", finish_timeout=30.0),
        )
        self.last_step = self._run.starting_step - 1  # W&B ignores steps up to it

    @staticmethod
    def require_ready() -> None:
        """Raise `UsageError` if W&B would ask for a key. Sends nothing."""
        import wandb

        settings = wandb.setup().settings
        if settings.mode != "online" or settings.api_key or settings.identity_token_file:
            return
        file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        host = urlsplit(settings.base_url).hostname or ""
        if not (file.exists() and netrc.netrc(file).authenticators(host)):
            raise _without_key("wandb", f"nothing for {host} in {file}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row of the run's history."""
        self._run.log(dict(values), step=step, commit=True)  # with the step's tables

    def close(self) -> None:
        """Send the rest, and whether the run failed."""
        self._run.finish(exit_code=int(self._state != "finished"))


class MlflowTracker(_Service):
    """Log to MLflow, to MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. An infinity is stored as ±1.8e308."""

    _TAG = "burnish.run"
    _STEP = "burnish.step"

    def __init__(self, directory: Path) -> None:
        from mlflow import MlflowClient, entities

        super().__init__(directory)
        self._client = MlflowClient()
        self._entities = entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs(
            [place], f"tags.`{self._TAG}` = '{self._id}'", max_results=1
        )
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            commit = str(self._environment.get("git_commit"))
            tags = {self._TAG: self._id, "mlflow.source.git.commit": commit}
            created = self._client.create_run(place, tags=tags, run_name=self._name)
            self._run = created.info.run_id
            parameters = [entities.Param(key, str(v)[:500]) for key, v in dotted(self._config)]
            for start in range(0, len(parameters), 100):
                self._client.log_batch(self._run, params=parameters[start : start + 100])
        for path in self._files:
            self._client.log_artifact(self._run, str(path))
        self.last_step = int(known[0].data.tags.get(self._STEP, -1)) if known else -1
        self._metrics: list[Any] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hold a step's metrics until the next request."""
        now = int(1000 * time.time())
        most = sys.float_info.max
        for name, value in values.items():
            bounded = math.copysign(most, value) if math.isinf(value) else float(value)
            key = re.sub(r"[^\w.\- :/]", "_", name)
            self._metrics.append(self._entities.Metric(key, bounded, now, step))

    def _log_table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([columns, *data])
        self._client.log_text(self._run, text.getvalue(), f"{name}-{step:08d}.csv")

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log the report as an artifact, a checkpoint's place as a tag."""
        if kind == "checkpoint":
            self._client.set_tag(self._run, "burnish.checkpoint", path)
        else:
            self._client.log_artifact(self._run, path)

    def sync(self) -> None:
        """Send the held metrics, with the number of their last step."""
        metrics = self._metrics
        self._metrics = []
        for start in range(0, len(metrics), 1000):
            part = metrics[start : start + 1000]
            tags = [self._entities.RunTag(self._STEP, str(part[-1].step))]
            self._client.log_batch(self._run, metrics=part, tags=tags)

    def close(self) -> None:
        """End the run."""
        self.sync()
        status = {"failed": "FAILED", "stopped": "KILLED"}.get(self._state, "FINISHED")
        self._client.set_terminated(self._run, status)


class TrackioTracker(_WithArtifacts):
    """Log to Trackio, to the project of TRACKIO_PROJECT in TRACKIO_DIR, or to TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

    def __init__(self, directory: Path) -> None:
        import trackio

        super().__init__(directory)
        self._begin(
            trackio,
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=f"{self._name}-{self._id[:8]}",  # Trackio recognizes a run by it
            embed=False,
        )

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log an artifact, or the place, as a text, of a checkpoint that only a mirror has."""
        if kind == "report" or Path(path).is_dir():
            super().log_file(path, kind)
        else:  # Trackio has no references to a mirror
            self._run.log({"checkpoint": path}, step=_step(path))

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()


class SwanlabTracker(_Service):
    """Log to SwanLab. SWANLAB_PROJ_NAME, SWANLAB_MODE and so on apply; other modes than online write below the run's directory."""

    def __init__(self, directory: Path) -> None:
        import swanlab

        super().__init__(directory)
        self._swanlab = swanlab
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        self._run = swanlab.init(
            project=settings.project.name or _PROJECT,
            name=self._name,
            id=self._id,
            resume="allow",
            log_dir=str(directory / "swanlog"),
            config=self._described,
            settings=settings,
        )
        self._root = directory
        for path in self._files[1:]:  # SwanLab writes the configuration itself
            self._save(path)

    @staticmethod
    def require_ready() -> None:
        """Raise `UsageError` if SwanLab would ask for a key. Sends nothing."""
        import swanlab

        settings = swanlab.Settings()
        if settings.mode == "online" and not settings.api_key:
            raise _without_key("swanlab", "no login")

    def _log_table(self, step: int, name: str, columns: list[str], data: list[list[Any]]) -> None:
        texts = [[str(value) for value in row] for row in data]
        self._run.log({name: self._swanlab.echarts.Table().add(columns, texts)}, step=step)

    def log_file(self, path: str, kind: FileKind) -> None:
        """Save the report; note where a checkpoint is."""
        if kind == "report":
            self._save(Path(path))
        else:
            self._run.log({"checkpoint": self._swanlab.Text(path)}, step=_step(path))

    def close(self) -> None:
        """Send the rest, and how the run ended."""
        state = {"failed": "crashed", "stopped": "aborted"}.get(self._state, "success")
        self._run.finish(state=state, error=None if state == "success" else state)

    def _save(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(self._root), policy="now")


def _without_key(name: str, have: str) -> UsageError:
    return UsageError(
        f"tracking.trackers: {name} has no key",
        have=f"nothing in {name.upper()}_API_KEY, and {have}",
        do=f"run `{name} login`, or set {name.upper()}_MODE=offline",
    )


def _step(checkpoint: str) -> int:
    return int(PurePath(checkpoint).name.rpartition("-")[2])
