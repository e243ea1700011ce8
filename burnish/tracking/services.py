"""Log to services: W&B, MLflow, Trackio and SwanLab, each by its own client and its own environment variables.

`BackgroundTracker` calls them in a thread of its own. Each has the run's configuration, environment and uncommitted changes, and goes on
with the run of the same id after a resume.
"""

from __future__ import annotations

import csv
import io
import math
import netrc
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from burnish.config.document import recorded
from burnish.errors import UsageError
from burnish.tracking.rundir import RUN, RunDirectory
from burnish.tracking.trackers import FileKind, State, sample_table

_PROJECT = "burnish"
# Where the service's own variable names none.
_QUIET_SECONDS = 30.0
# How long W&B may take at the end of the process, beside the time that a run gives its trackers.


class _Described:
    """What services are told of a run."""

    def __init__(self, root: Path) -> None:
        directory = RunDirectory(root)
        self.environment = directory.read_environment()
        self.id = str(self.environment[RUN])
        self.name = root.name
        self.config = recorded(directory.config).model_dump(mode="json")
        files = (directory.config, directory.environment, directory.diff)
        self.files = [path for path in files if path.exists()]


class WandbTracker:
    """Log to W&B. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and so on apply; WANDB_MODE=offline writes below the run's directory."""

    def __init__(self, directory: Path) -> None:
        import wandb

        self._wandb, run = wandb, _Described(directory)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.id,
            name=run.name,
            dir=str(directory),
            config={**run.config, "environment": run.environment},
            resume="allow",
            # Its output would break progress bars, and what it captures is in the log files.
            settings=wandb.Settings(silent=True, console="off", finish_timeout=_QUIET_SECONDS),
        )
        origin = wandb.Artifact(f"run-{run.id}", type="run")
        for path in run.files:
            origin.add_file(str(path))
        self._run.log_artifact(origin)
        self.last_step = self._run.starting_step - 1
        """The last step that the service has; it ignores those up to it."""
        self._code = 0

    @staticmethod
    def require_ready() -> None:
        """Raise `UsageError` if W&B would ask for a key. Asks no service."""
        import wandb

        settings = wandb.setup().settings
        if settings.mode != "online" or settings.api_key or settings.identity_token_file:
            return
        file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        host = urlsplit(settings.base_url).hostname or ""
        if not (file.exists() and netrc.netrc(file).authenticators(host)):
            raise UsageError(
                "tracking.trackers: wandb has no key",
                have=f"nothing in WANDB_API_KEY, and nothing for {host} in {file}",
                do="run `wandb login`, or set WANDB_MODE=offline",
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row of the run's history."""
        self._run.log(dict(values), step=step, commit=True)

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, in the row of the step that is logged next."""
        table = sample_table(rows)
        if table:
            data = [list(row.values()) for row in table]
            content = self._wandb.Table(columns=list(table[0]), data=data)
            self._run.log({f"rollouts/{kind}": content}, step=step, commit=False)

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log an artifact: the report itself, or a reference to a checkpoint, whose metadata say where it is."""
        name, place = PurePath(path).name, {"place": path}
        artifact = self._wandb.Artifact(f"{kind}-{self._run.id}", type=kind, metadata=place)
        if kind == "report":
            artifact.add_file(path)
        elif Path(path).is_dir():
            artifact.add_reference(Path(path).absolute().as_uri(), name=name, checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", name])

    def end(self, state: State) -> None:
        """Note whether the run failed."""
        self._code = 0 if state == "finished" else 1

    def sync(self) -> None:
        """Do nothing: a process of W&B's own writes."""

    def close(self) -> None:
        """Send the rest."""
        self._run.finish(exit_code=self._code)


class MlflowTracker:
    """Log to MLflow, to the server of MLFLOW_TRACKING_URI and the experiment of MLFLOW_EXPERIMENT_NAME.

    An infinity is stored as ±1.8e308, and characters that MLflow refuses in a name as _.
    """

    _TAG, _STEP = "burnish.run", "burnish.step"

    def __init__(self, directory: Path) -> None:
        from mlflow import MlflowClient, entities

        self._client, self._entities, run = MlflowClient(), entities, _Described(directory)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([place], f"tags.`{self._TAG}` = '{run.id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            commit = str(run.environment.get("git_commit"))
            tags = {self._TAG: run.id, "mlflow.source.git.commit": commit}
            self._id = self._client.create_run(place, tags=tags, run_name=run.name).info.run_id
            parameters = [entities.Param(key, value) for key, value in _flat(run.config)]
            for some in _in_batches(parameters, 100):
                self._client.log_batch(self._id, params=some)
        for path in run.files:
            self._client.log_artifact(self._id, str(path))
        self.last_step = int(known[0].data.tags.get(self._STEP, -1)) if known else -1
        """The last step that the service has."""
        self._status = "FINISHED"
        self._metrics: list[Any] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hold a step's metrics until the next request."""
        now = time.time()
        self._metrics += [
            self._entities.Metric(_allowed(name), _bounded(value), int(1000 * now), step)
            for name, value in values.items()
        ]

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, which MLflow shows, as CSV."""
        table = sample_table(rows)
        if table:
            text = io.StringIO()
            writer = csv.DictWriter(text, table[0])
            writer.writeheader()
            writer.writerows(table)
            self._client.log_text(self._id, text.getvalue(), f"rollouts/{kind}-{step:08d}.csv")

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log the report as an artifact, a checkpoint's place as a tag."""
        if kind == "checkpoint":
            self._client.set_tag(self._id, "burnish.checkpoint", path)
        else:
            self._client.log_artifact(self._id, path)

    def end(self, state: State) -> None:
        """Note how the run ended."""
        self._status = {"failed": "FAILED", "stopped": "KILLED"}.get(state, "FINISHED")

    def sync(self) -> None:
        """Send the metrics that are held, with the number of their last step."""
        held, self._metrics = self._metrics, []
        for some in _in_batches(held, 1000):
            tags = [self._entities.RunTag(self._STEP, str(some[-1].step))]
            self._client.log_batch(self._id, metrics=some, tags=tags)

    def close(self) -> None:
        """End the run."""
        self.sync()
        self._client.set_terminated(self._id, self._status)


class TrackioTracker:
    """Log to Trackio, to the project of TRACKIO_PROJECT in TRACKIO_DIR, or to TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

    def __init__(self, directory: Path) -> None:
        import trackio

        self._trackio, run = trackio, _Described(directory)
        self._id = run.id
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=f"{run.name}-{run.id[:8]}",  # by which Trackio knows a run again
            config={**run.config, "environment": run.environment, "run": run.id},
            resume="allow",
            embed=False,
        )
        origin = trackio.Artifact(f"run-{run.id}", type="run")
        for path in run.files:
            origin.add_file(path)
        self._run.log_artifact(origin)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log(dict(values), step=step)

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        table = sample_table(rows)
        if table:
            columns, data = list(table[0]), [list(row.values()) for row in table]
            content = self._trackio.Table(columns=columns, data=data)
            self._run.log({f"rollouts/{kind}": content}, step=step)

    def log_file(self, path: str, kind: FileKind) -> None:
        """Log an artifact: the report itself, or a reference to a checkpoint, whose metadata say where it is."""
        if kind == "checkpoint" and not Path(path).is_dir():  # it has no references to a mirror
            self._run.log({"checkpoint": path}, step=_step(path))
            return
        artifact = self._trackio.Artifact(f"{kind}-{self._id}", type=kind, metadata={"place": path})
        if kind == "report":
            artifact.add_file(path)
        else:
            artifact.add_reference(Path(path).absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=[PurePath(path).stem])

    def sync(self) -> None:
        """Do nothing: a thread of Trackio's own writes."""

    def close(self) -> None:
        """Write the rest."""
        self._run.finish()


class SwanlabTracker:
    """Log to SwanLab. SWANLAB_PROJ_NAME, SWANLAB_WORKSPACE, SWANLAB_MODE and so on apply; other modes than online write below the run's directory."""

    def __init__(self, directory: Path) -> None:
        import swanlab

        self._swanlab, run = swanlab, _Described(directory)
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        self._run = swanlab.init(
            project=settings.project.name or _PROJECT,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(directory / "swanlog"),
            config={**run.config, "environment": run.environment},
            settings=settings,
        )
        self._root, self._state = directory, "success"
        for path in run.files[1:]:  # it writes the configuration itself
            self._save(path)

    @staticmethod
    def require_ready() -> None:
        """Raise `UsageError` if SwanLab would ask for a key. Asks no service."""
        import swanlab

        settings = swanlab.Settings()
        if settings.mode == "online" and not settings.api_key:
            raise UsageError(
                "tracking.trackers: swanlab has no key",
                have="nothing in SWANLAB_API_KEY, and no login",
                do="run `swanlab login`, or set SWANLAB_MODE=offline",
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's scalars."""
        self._run.log(dict(values), step=step)

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        table = sample_table(rows)
        if table:
            data = [[str(value) for value in row.values()] for row in table]
            content = self._swanlab.echarts.Table().add(list(table[0]), data)
            self._run.log({f"rollouts/{kind}": content}, step=step)

    def log_file(self, path: str, kind: FileKind) -> None:
        """Save the report; note where a checkpoint is."""
        if kind == "report":
            self._save(Path(path))
        else:
            self._run.log({"checkpoint": self._swanlab.Text(path)}, step=_step(path))

    def end(self, state: State) -> None:
        """Note how the run ended."""
        self._state = {"failed": "crashed", "stopped": "aborted"}.get(state, "success")

    def sync(self) -> None:
        """Do nothing: a thread of SwanLab's own writes."""

    def close(self) -> None:
        """Send the rest."""
        self._run.finish(state=self._state, error=None if self._state == "success" else self._state)

    def _save(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(self._root), policy="now")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by dotted names, as MLflow's parameters."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:500]


def _step(checkpoint: str) -> int:
    """Return the step of a checkpoint's place."""
    return int(PurePath(checkpoint).name.rpartition("-")[2])


def _in_batches(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _allowed(name: str) -> str:
    return re.sub(r"[^\w.\- :/]", "_", name)


def _bounded(value: float) -> float:
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else float(value)
