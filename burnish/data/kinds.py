"""The kinds of file that data come in. Light, so that a configuration can be checked without `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

READERS: Mapping[str, str] = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The reader of `datasets` for every suffix; in a directory, files with other suffixes are passed over."""


def is_data(name: str) -> bool:
    """Whether a file of this name is one of data."""
    return PurePosixPath(name).suffix in READERS
