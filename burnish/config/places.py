"""Where a run lies on this machine, and where its mirror is, as its configuration says."""

from __future__ import annotations

from pathlib import Path

from burnish.config.schema import RunConfig

WORKPLACE = "runs"
"""Where runs lie whose `output_dir` is a URL."""
CHECKPOINTS = "checkpoints"
"""The directory of steps, below a run's directory as below its mirror."""


def is_remote(place: str) -> bool:
    """Whether a setting names a URL, and not a path."""
    return "://" in place


def run_directory(config: RunConfig) -> Path:
    """The run's directory, on this machine."""
    return Path(WORKPLACE if is_remote(config.output_dir) else config.output_dir) / config.name


def mirror_url(config: RunConfig) -> str | None:
    """The URL of the copy of the run's directory; None where there is to be none."""
    remote = config.output_dir if is_remote(config.output_dir) else config.checkpoint.mirror
    return None if remote is None else f"{remote.rstrip('/')}/{config.name}"
