"""Columns of JSON files that Arrow's reader changes, as the files have them.

It makes dates of strings that look like dates, and `datasets` takes the strings of a column for JSON texts where
other rows of it hold numbers: "007" becomes 7. An answer to compare with has to stay what it is. Such columns are read again,
kept as JSON texts, and parsed when a row is asked for. Left out: all other columns, which stay on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from burnish.data.peek import row_of

_TEMPORAL = ("timestamp", "date", "time", "duration")


def changed_columns(features: Mapping[str, Any]) -> list[str]:
    """The columns of a table read from JSON whose values are not those of the file."""
    return [name for name, feature in features.items() if _is_changed(feature)]


def _is_changed(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_is_changed, feature.values()))
    if isinstance(feature, datasets.Value):
        return str(feature.dtype).startswith(_TEMPORAL)
    if type(feature).__name__ == "Json":
        return True
    inner = getattr(feature, "feature", None)
    return inner is not None and _is_changed(inner)


def as_texts(table: Any, files: Sequence[Path], columns: Sequence[str]) -> Any:
    """The `datasets.Dataset` with these columns as the JSON text of each value, in their old places."""
    texts: dict[str, list[str]] = {name: [] for name in columns}
    for file in files:
        for row in _rows(file):
            for name in columns:
                texts[name].append(json.dumps(row.get(name)))
    found = datasets.Dataset.from_dict(texts)
    others = [name for name in table.column_names if name not in texts]
    if not others:
        return found
    both = datasets.concatenate_datasets([table.select_columns(others), found], axis=1)
    return both.select_columns(table.column_names)


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of JSON Lines, or of a file that is one list of rows."""
    with file.open("rb") as stream:
        beginning = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if beginning.startswith(b"["):
            yield from json.loads(file.read_text("utf-8-sig"))
            return
        stream.seek(0)
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield row_of(line, file, number)
