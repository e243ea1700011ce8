"""Read the columns of a data file's first rows, without `datasets` and torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from burnish.data.columns import READERS
from burnish.errors import UsageError

Columns = dict[str, Any]
"""A key for every column; the columns inside it as another such mapping, empty where there are none."""

_ROWS = 16
_BYTES = 16 << 20
# So much is read: the first rows, and on to these bytes for a column that they lack. `datasets` takes the columns
# of JSON Lines from the first 10 MB.
_EXCERPT = 60


def has_column(columns: Columns, name: str) -> bool:
    """Tell whether there is such a column, dots going into nested ones."""
    if name in columns:
        return True
    head, _, rest = name.partition(".")
    return bool(rest) and has_column(columns.get(head, {}), rest)


def columns_of(file: Path, enough: Callable[[Columns], bool]) -> Columns | None:
    """Return the columns of a local JSON Lines or Parquet file; None where only the whole file would tell.

    Reads the first rows of JSON Lines, and further ones until the columns are `enough`. Raises
    `UsageError` for a file that is not what its suffix says, naming a broken line.
    """
    if file.suffix not in READERS:
        raise UsageError(
            f"{file} is of no known kind",
            have=f"suffix {file.suffix!r}",
            want=", ".join(READERS),
            do="rename or convert it",
        )
    if READERS[file.suffix] == "parquet":
        return _of_parquet(file)
    columns: Columns = {}
    try:
        for number, row in enumerate(_rows(file), start=1):
            _add(columns, row)
            if number >= _ROWS and enough(columns):
                break
    except UsageError:
        if _is_one_document(file):
            return None
        raise
    return columns


def row_of(line: bytes, file: Path, number: int) -> dict[str, Any]:
    """Parse line `number` of a file. Raises `UsageError`, naming both, unless it is a JSON object."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if isinstance(value, dict):
            return value
        problem = f"a JSON {type(value).__name__}"
    except json.JSONDecodeError as error:
        problem = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start + 1}"
    start = line.decode("utf-8", "replace").strip()[:_EXCERPT]
    raise UsageError(
        f"{file}, line {number} is broken: {problem}",
        have=f"a line that starts {start!r}",
        want="one JSON object on every line",
        do="correct or remove the line",
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    done = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield row_of(line, file, number)
            done += len(line)
            if done > _BYTES:
                return


def _is_one_document(file: Path) -> bool:
    """Tell whether a file is one JSON value over several lines, or too large to say."""
    if file.stat().st_size > _BYTES:
        with file.open("rb") as stream:
            return stream.read(64).lstrip()[:1] == b"["
    try:
        json.loads(file.read_bytes())
    except ValueError:
        return False
    return True


def _add(columns: Columns, row: dict[str, Any]) -> None:
    for name, value in row.items():
        inner = columns.setdefault(name, {})
        if isinstance(value, dict):
            _add(inner, value)


def _of_parquet(file: Path) -> Columns:
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{file} cannot be read as Parquet",
            have=" ".join(str(error).split()),
            want="a Parquet file",
            do="get the file again, or give it the suffix of what it is",
        ) from error

    def inner(kind: Any) -> Columns:
        if not pyarrow.types.is_struct(kind):
            return {}
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return {field.name: inner(field.type) for field in fields}

    return {field.name: inner(field.type) for field in schema}
