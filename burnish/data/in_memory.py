"""Keep rows that Python gives in the cache, so that every start and process finds them.

They are a list of rows, lists by column, a table of pandas, polars or Arrow, or a data set of `datasets`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import xxhash

from burnish.config.schema import DataConfig
from burnish.data.splits import usual_split
from burnish.errors import UsageError
from burnish.files.cache import cache_root

_BATCH = 1_000
_TABLES = (
    ("pandas", "DataFrame", ("to_dict", "records")),
    ("polars", "DataFrame", ("to_dicts",)),
    ("pyarrow", "Table", ("to_pylist",)),
)
"""By library, its table, and the method that returns rows, with its arguments."""


def stored(value: Any, setting: str) -> Any:
    """Return the path of a file with the rows of a list or table, or of a folder with a `Dataset`; other values as they are.

    A `DatasetDict` stands for its split that suits `setting`. Raises `MissingError` without the split, and `UsageError` for rows that are
    not JSON, and for data that can be read only once.
    """
    if isinstance(value, list | tuple):
        if value and all(isinstance(row, Mapping) for row in value):
            return _stored_rows(value, setting)
        return [stored(entry, setting) for entry in value]
    table = _rows_of_table(value)
    if table is not None:
        return _stored_rows(table, setting)
    if type(value) is dict:
        return _stored_rows(_rows_of_columns(value, setting), setting)
    datasets = sys.modules.get("datasets")  # without it, no value is a data set
    if datasets is None:
        return value
    if isinstance(value, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise UsageError(
            f"{setting} is a {type(value).__name__}, whose rows can be read only in order",
            want="a Dataset, or files",
            do="give its files or its id, and set data.streaming for data that fit no disk",
        )
    if isinstance(value, datasets.DatasetDict):
        value = value[usual_split(value, setting)]
    return _stored_data_set(value) if isinstance(value, datasets.Dataset) else value


def _rows_of_columns(columns: Mapping[str, Any], setting: str) -> Sequence[Mapping[str, Any]]:
    lengths = {name: len(values) for name, values in columns.items() if _is_list(values)}
    if len(lengths) < len(columns) or len(set(lengths.values())) != 1:
        raise UsageError(
            f"{setting} is a mapping, and no table",
            have=", ".join(f"{name}: {lengths.get(name, 'no list')}" for name in columns),
            want="lists of the same length, by column",
            do="correct the columns, or give a list with one mapping for each row",
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _rows_of_table(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the rows of a table of a library that is loaded; without it, no value is such a table."""
    for module, name, method in _TABLES:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, name)):
            if module == "pandas":  # its missing values are NaN, NaT and NA
                value = value.astype(object).where(value.notna(), None)
            rows: Sequence[Mapping[str, Any]] = getattr(value, method[0])(*method[1:])
            return rows
    return None


def _stored_rows(rows: Sequence[Mapping[str, Any]], setting: str) -> str:
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(_as_json(row))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"row {number} (counted from 0) of {setting} is not JSON: {error}",
                have=f"{', '.join(map(str, filter(partial(_is_foreign, row), row)))} in it",
                want="rows of texts, numbers, lists and mappings",
                do="convert such values first",
            ) from error
    text = "".join(f"{line}\n" for line in lines).encode()
    path = _root() / f"rows-from-python-{xxhash.xxh3_128_hexdigest(text)}.jsonl"
    if not path.exists():
        folder = Path(mkdtemp(dir=path.parent))
        (folder / path.name).write_bytes(text)
        os.replace(folder / path.name, path)
        folder.rmdir()
    return str(path)


def _as_json(value: Any) -> str:
    """Write a value as JSON, arrays and numbers of numpy too. Raises `TypeError` and `ValueError`."""
    return json.dumps(value, allow_nan=False, default=_of_array)


def _of_array(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an object of the type {type(value).__name__}")


def _is_foreign(row: Mapping[str, Any], column: str) -> bool:
    try:
        _as_json(row[column])
    except (TypeError, ValueError):
        return True
    return False


def _stored_data_set(rows: Any) -> str:
    datasets = sys.modules["datasets"]
    folder = _root() / _digest(rows)
    if not folder.exists():
        temporary = Path(mkdtemp(dir=folder.parent))
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            rows.save_to_disk(temporary / folder.name)
        finally:
            if shown:
                datasets.enable_progress_bars()
        if not folder.exists():
            os.rename(temporary / folder.name, folder)
        shutil.rmtree(temporary)
    return str(folder)


def _root() -> Path:
    root = cache_root() / "datasets"
    root.mkdir(parents=True, exist_ok=True)
    return root


def with_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which paths replace rows. `data` that is no section stands for `data.train`."""
    with_paths = dict(settings)
    for name in ("data.train", "data.validation"):
        if name in with_paths:
            with_paths[name] = stored(with_paths[name], name)
    data = with_paths.get("data")
    if isinstance(data, Mapping) and not _is_table(data):
        names = ("train", "validation")
        kept = {name: stored(data[name], f"data.{name}") for name in names if name in data}
        with_paths["data"] = {**data, **kept}
    elif data is not None:
        with_paths["data"] = {"train": stored(data, "data.train")}
    return with_paths


def _is_table(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has columns rather than the section's settings."""
    return (
        bool(data)
        and not data.keys() & DataConfig.model_fields
        and all(map(_is_list, data.values()))
    )


def _digest(rows: Any) -> str:
    """Hash columns, types and rows, whatever the object went through."""
    import pyarrow as pa

    digest = xxhash.xxh3_128(repr(rows.features).encode())
    for table in rows.with_format("arrow").iter(_BATCH):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table.combine_chunks())
        digest.update(sink.getvalue())
    return digest.hexdigest()
