"""Places that arguments name: local paths and URLs."""

from __future__ import annotations

from pathlib import Path, PurePath

from burnish.checkpoint.destinations.remote_steps import RemotePath
from burnish.files.urls import Url, is_url
from burnish.tracking.rundir import LATEST


def place(text: str) -> PurePath:
    """Return a local path or a URL, without `latest` at its end. Raises `UsageError`."""
    path = RemotePath.of(Url.parse(text)) if is_url(text) else Path(text)
    return path.parent if path.name == LATEST else path
