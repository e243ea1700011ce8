"""Locate a run's files, and describe its machine and versions.

```
runs/NAME/
  config.yaml  environment.json  status.json  metrics.jsonl  tensorboard/
  rollouts/{step,validation}-00000010[.rest].jsonl.gz  checkpoints/  report.html
  hub.json  kept/tensors.safetensors  profiles/step-00000010.rank-0.json.gz  traces/{step,validation}-00000010.jsonl.gz  git.diff  logs/rank-0.log
  evaluations/1/{config.yaml,metrics.jsonl,rollouts/,...}
```
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from burnish.files.durable import write_durably
from burnish.files.storage import LOCAL, open_regular
from burnish.files.strict_json import parse_object
from burnish.redaction import redacted
from burnish.version import __version__

_DIFF_BYTES = 1 << 20  # most of a diff that is kept
_OBJECT_BYTES = 1 << 24  # most of a file of one JSON object that is read

CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""The directory of steps, in a run's directory and in its mirror, and the name of the newest step."""
RUN = "run"
START = "start"
TRAINER = "trainer"
DIRECTORY = "directory"
PARAMETERS = "parameters"
ADAPTED = "adapter_parameters"
"""Keys of environment.json: the ids of the run and of this start, the run's command, the working directory, and the numbers of the model and of its adapter."""
STATUS = "status.json"
STEPS = "steps"
STATE = "state"
ENDED = "ended"
REASON = "reason"
"""The file with the run's total steps, its state (running, finished, stopped or failed), the time of its end and why it failed, and the keys of these."""


class RunDirectory:
    """The paths of one run under `root` (`runs/NAME`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.status = root / STATUS
        self.environment = root / "environment.json"
        """Versions, device, host, git commit and command line of the last start."""
        self.diff = root / "git.diff"
        """Changes in the working directory since its git commit; missing if there are none."""
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.rollouts = root / "rollouts"
        self.logs = root / "logs"
        self.traces = root / "traces"
        self.profiles = root / "profiles"
        self.checkpoints = root / CHECKPOINTS
        self.kept = root / "kept" / "tensors.safetensors"
        """The tensors beside a composite's language model, which every step gets. The run's directory is no model, so not there."""
        self.servers = root / "servers"
        self.report = root / "report.html"

    @property
    def begun(self) -> bool:
        """Whether a run has logged metrics. A run that failed before has nothing to protect."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write the result of `environment()`."""
        write_atomically(self.environment, json.dumps(environment, indent=2) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """Return what `write_environment` wrote; empty without the file. Raises `CorruptError`."""
        return _read_object(self.environment)

    def write_status(
        self, steps: int | None, state: str, reason: Mapping[str, Any] | None = None
    ) -> None:
        """Write the run's total steps (None: not known yet), its state, and why it failed."""
        ended = None if state == "running" else datetime.now(UTC).isoformat(timespec="seconds")
        status = {STEPS: steps, STATE: state, ENDED: ended, REASON: reason}
        write_atomically(self.status, json.dumps(status) + "\n")

    def read_status(self) -> dict[str, Any]:
        """Return what `write_status` wrote; empty without the file. Raises `CorruptError`."""
        return _read_object(self.status)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with open_regular(path) as file:
        return parse_object(file.read(_OBJECT_BYTES), str(path))


def parameters_text(count: int, adapted: int = 0) -> str:
    """Return how many parameters a model has, and how many its run trains, if not all."""
    share = f"{adapted:,} ({adapted / count:.2%}) trained of " if adapted else ""
    return f"{share}{count:,} parameters"


def environment(device: str, world: int = 1) -> dict[str, Any]:
    """Describe versions, machine and command; no environment variables, which may hold secrets. A commit with changes ends in `-dirty`."""
    commit = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "burnish": __version__,
        **{package: version(package) for package in ("torch", "transformers")},
        "device": device,
        "processes": world,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git_commit": commit.decode().strip() or None,
        DIRECTORY: os.getcwd(),
        "command": [redacted(each) for each in sys.orig_argv],
    }


def git_diff() -> bytes:
    """Return the uncommitted changes to tracked files, at most 1 MiB of them, without credentials; empty without git."""
    changes = _git("diff", "HEAD", "--no-ext-diff", "--no-color")[:_DIFF_BYTES]
    return redacted(changes.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _git(*arguments: str) -> bytes:
    command = ("git", *arguments)
    try:
        return subprocess.run(command, capture_output=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def plain(value: Any) -> Any:
    r"""Return a text that UTF-8 can hold, where lone surrogates are \udXXX; any other value as it is."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode()


def write_atomically(path: Path, content: str | bytes) -> None:
    r"""Write `content` to `path`, whole or not at all; text is UTF-8, lone surrogates become `\udXXX`. Raises `OSError`."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(LOCAL, path, data)


def discard_leftovers(directory: Path) -> None:
    """Remove half-written files of killed writers from `directory`, which may be missing."""
    if directory.is_dir():
        for path in directory.iterdir():
            if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
                path.unlink(missing_ok=True)
