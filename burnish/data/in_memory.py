"""Keep data sets of the `datasets` library, given from Python, as folders in the cache, so that every start and process finds them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import datasets
import pyarrow as pa
import xxhash

from burnish.data.splits import usual_split
from burnish.errors import UsageError
from burnish.files.cache import cache_root

_BATCH = 1_000


def stored(value: Any, setting: str) -> Any:
    """Return a folder's path for a `Dataset`, or for the split of a `DatasetDict` that suits `setting`; other values as they are.

    Raises `MissingError` without the split, and `UsageError` for data that can be read only once.
    """
    if isinstance(value, list | tuple):
        return [stored(entry, setting) for entry in value]
    if isinstance(value, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError(
            f"{setting} is a {type(value).__name__}, whose rows can be read only in order",
            want="a Dataset, or files",
            do="give its files or its id, and set data.streaming for data that fit no disk",
        )
    if isinstance(value, datasets.DatasetDict):
        value = value[usual_split(value, setting)]
    if not isinstance(value, datasets.Dataset):
        return value
    root = cache_root() / "datasets"
    folder = root / _digest(value)
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(dir=root))
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            value.save_to_disk(temporary / folder.name)
        finally:
            if shown:
                datasets.enable_progress_bars()
        if not folder.exists():
            os.rename(temporary / folder.name, folder)
        shutil.rmtree(temporary)
    return str(folder)


def with_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which paths replace data sets."""
    with_paths = dict(settings)
    for name in ("train", "validation"):
        if f"data.{name}" in with_paths:
            with_paths[f"data.{name}"] = stored(with_paths[f"data.{name}"], f"data.{name}")
        data = with_paths.get("data")
        if isinstance(data, Mapping) and name in data:
            with_paths["data"] = {**data, name: stored(data[name], f"data.{name}")}
    return with_paths


def _digest(rows: datasets.Dataset) -> str:
    """Hash columns, types and rows, whatever the object went through."""
    digest = xxhash.xxh3_128(repr(rows.features).encode())
    for table in rows.with_format("arrow").iter(_BATCH):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table.combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()
