"""Read rows from local JSON Lines, Parquet, CSV and Arrow files, as memory-mapped Arrow tables.

All but Arrow files are converted in the cache of `datasets`, which processes and runs share. A JSON or CSV row stays a text and is
parsed on access: Arrow would change texts and numbers.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import xxhash
from datasets.packaged_modules.parquet.parquet import Parquet

from burnish.data.columns import READERS, Row, value_at
from burnish.errors import MissingError, UsageError, neighbours, of_setting, refusing
from burnish.files.lease import locked
from burnish.files.strict_json import no_duplicates
from burnish.tracking.progress import Progress

_PARQUET_ROWS = 1024
_JSON_ROWS = 1024
_TEXT = "row"
"""The one column of a table of JSON texts."""
LOOKED_AT = 128
"""Number of first rows in which to look for nested columns. A streamed run begins only if all of them can be read."""
_REASON = 300
_EXCERPT = 60
_CHUNK = 16 << 20
_MEGA = 1e6

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A table of rows with random access, backed by Arrow."""

    table: Any
    """The `datasets.Dataset`."""
    files: tuple[str, ...]
    keys: tuple[str, ...]
    """The columns of JSON and CSV rows; empty for Parquet and Arrow."""
    digest: str
    """Digest of the files' content."""
    is_streamed: bool = False
    """Whether rows are read during training, and so not counted."""
    numbers: npt.NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Their numbers in the files, which grow; None if no row before the last is left out."""
    has_share: bool = field(default=False, kw_only=True)
    """Whether the files' other rows are held out. Those tell what is true of all."""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return self.span(index, index + 1)[0]

    def number(self, index: int) -> int:
        """Return a row's number, the same in every epoch."""
        return index if self.numbers is None else int(self.numbers[index])

    @property
    def end(self) -> int:
        """Return a number above those of all rows."""
        return len(self) if self.numbers is None else int(self.numbers[len(self) - 1]) + 1

    def span(self, start: int, stop: int) -> list[Row]:
        """Return rows start to stop - 1 at once. Raises `UsageError` for unreadable ones."""
        do = "correct or remove them"  # not UTF-8, or a date outside Python's range
        with refusing(f"rows {start} to {stop - 1} of {_listed(self.files)} cannot be read", do=do):
            columns: dict[str, list[Any]] = self.table[start:stop]
        if self.keys:
            return [dict.fromkeys(self.keys) | json.loads(text) for text in columns[_TEXT]]
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, values, strict=True)) for values in rows]

    def contents(self, start: int, stop: int) -> list[str]:
        """Return a text for each of rows start to stop - 1, equal for equal rows."""
        if self.keys:
            return list(self.table[start:stop][_TEXT])
        return [repr(row) for row in self.span(start, min(stop, len(self)))]

    def first(self, count: int | None) -> Rows:
        """Return the first rows; all for None, and if they are streamed."""
        if count is None or self.is_streamed or count >= len(self):
            return self
        return replace(self, table=self.table.select(range(count)))

    def chosen(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return the rows with these numbers, which grow. No row may be left out yet."""
        digest = xxhash.xxh3_128_hexdigest(numbers.tobytes())
        table = self.table.select(numbers)
        return replace(self, table=table, digest=f"{self.digest} {digest}", numbers=numbers)

    @property
    def columns(self) -> list[str]:
        """Names of columns."""
        return list(self.keys or self.table.column_names)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        if not self.keys:
            return list(self.table[name])
        return [json.loads(text).get(name) for text in self.table[_TEXT]]

    def has(self, name: str) -> bool:
        """Return whether there is a column; nested ones, with dots, in the first rows."""
        return name in self.columns or any(
            value_at(row, name) is not None for row in self.beginning
        )

    def has_values(self, name: str) -> bool:
        """Return whether a column has a value in any row; nested and streamed ones, in the first rows."""
        if any(value_at(row, name) is not None for row in self.beginning):
            return True
        if name not in self.columns or self.is_streamed:
            return False
        if not self.keys:
            column = self.table.data.column(name)  # with the rows that are left out
            return bool(column.null_count < len(column))
        return any(json.loads(text).get(name) is not None for text in self.table[_TEXT])

    @property
    def beginning(self) -> Iterable[Row]:
        """The first rows."""
        return self.span(0, min(LOOKED_AT, len(self)))

    def where(self, index: int) -> str:
        """Name a row for an error message."""
        return f"row {self.number(index)} (counted from 0) of {_listed(self.files)}"

    def missing(
        self, names: Sequence[str], setting: str, others: Sequence[str] = ()
    ) -> MissingError:
        """Return the error for rows without any of these columns. `others` may have what they hold."""
        from burnish.data.missing_columns import missing_columns

        return missing_columns(self.columns, _listed(self.files), names, setting, others)


def load_rows(
    paths: Sequence[str], setting: str = "data.train", progress: Progress | None = None
) -> Rows:
    """Read one or more files, folders and glob patterns in the given order.

    A folder stands for its split that suits `setting`, as `burnish.data.splits` chooses it.

    Raises `MissingError` for a path that matches nothing. Raises `UsageError` for no rows, unknown or mixed kinds of file, a
    broken line, and a file that changes during the call.
    """
    progress = progress or Progress(enabled=False)
    files = [file for path in paths for file in matching_files(path, setting)]
    kind = kind_of(files, setting)
    names = tuple(str(file) for file in files)
    with refusing(f"{setting}: {_listed(names)} cannot be read", do="change who may read it"):
        states = _states(files)
        for file in files:
            file.open("rb").close()
    key = xxhash.xxh3_128_hexdigest(repr(states).encode())
    try:
        table, digest, keys = _read(kind, files, setting, key, progress)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"could not convert {_listed(names)} to Arrow: {error}",
            want=f"a cache directory that can be written, {datasets.config.HF_DATASETS_CACHE}",
            do="make room there, or set HF_DATASETS_CACHE to another directory",
        ) from error
    except Exception as error:  # Arrow raises many; `datasets` may take a file for an archive
        raise UsageError(
            f"{setting}: could not read {_listed(names)}",
            have=" ".join(str(error.__cause__ or error).split())[:_REASON],
            want="the same columns with the same types in every file and row",
            do="compare the columns of the files; a column may be null where a row has no value",
        ) from error
    if len(table) == 0 or not (keys or kind in ("parquet", "arrow")):
        raise UsageError(
            f"{setting} has no rows",
            have=_listed(names),
            want="at least one row",
            do=f"correct {setting}",
        )
    if _states(files) != states:
        raise UsageError(
            f"{setting}: {_listed(names)} changed while it was read",
            want="files that nobody writes to",
            do="start again when they are complete",
        )
    return Rows(table, names, tuple(keys), digest)


def _states(files: Sequence[Path]) -> list[list[int]]:
    """Return numbers that change with a file; `cp -p` and `rsync -t` keep only the mtime."""
    stats = map(os.stat, files)
    return [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in stats]


def _arrow_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.arrow"))


def _content(files: Sequence[Path], progress: Progress) -> str:
    digest = xxhash.xxh3_128()
    with progress.phase("reading", sum(file.stat().st_size for file in files) / _MEGA) as bar:
        for file in files:
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    bar.advance(len(chunk) / _MEGA)
    return digest.hexdigest()


def matching_files(path: str, setting: str) -> list[Path]:
    """Return an entry's local files, and warn of those that are left out. Raises `MissingError` for none."""
    if "://" in path:
        raise UsageError(
            f"{setting}: {path} is not a local path",
            want="a local file, directory or pattern",
            do="copy the data to this machine",
        )
    plain = Path(path).expanduser()
    if plain.exists() and not (plain.is_file() or plain.is_dir()):
        raise UsageError(
            f"{setting}: {path} is a pipe, a socket or a device",
            want="a file, which can be read twice",
            do="write the rows to a file",
        )
    files = [plain]
    if not plain.is_file():
        from burnish.data.entries import entry_files

        with of_setting(setting):
            files, notice = entry_files(path, setting)
        if notice:
            _log.warning(notice)
    if not files:
        raise MissingError(
            f"{setting}: nothing to read at {path}",
            have=neighbours(plain),
            want=f"a file, a directory of {', '.join(READERS)} files, or a pattern that matches",
            do=f"correct {setting}",
        )
    return [file.absolute() for file in files]


def kind_of(files: Sequence[PurePath], setting: str) -> str:
    """Return the reader of all files. Raises `UsageError` for several."""
    kinds = {file.suffix: file for file in files}
    for suffix, file in kinds.items():
        if suffix not in READERS:
            raise UsageError(
                f"{setting}: {file} is of an unknown kind",
                have=f"suffix {suffix!r}",
                want=", ".join(READERS),
                do="rename or convert it",
            )
    readers = {READERS[suffix] for suffix in kinds}
    if len(readers) > 1:
        raise UsageError(
            f"{setting} mixes kinds of file",
            have=", ".join(sorted(kinds)),
            want="JSON Lines only, Parquet only, CSV only, or Arrow only",
            do="convert the files of one kind",
        )
    return readers.pop()


def _read(
    kind: str, files: Sequence[Path], setting: str, key: str, progress: Progress
) -> tuple[Any, str, list[str]]:
    """Return the files' `datasets.Dataset`, its digest, and the columns of JSON and CSV rows.

    A power failure may leave zeros in Arrow files, which `datasets` trusts. So they are synced, with a file of their digest and
    `stat` numbers.
    """
    directory = Path(datasets.config.HF_DATASETS_CACHE, "burnish", f"{kind}-{key}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    seal = directory.with_suffix(".digest")
    with locked(seal):
        digest, keys, *states = json.loads(seal.read_text() or '["", []]')
        tables = files if kind == "arrow" else _arrow_files(directory)
        if not digest or states != _states(tables):
            os.truncate(seal, 0)
            if kind != "arrow":
                with progress.phase("converting"):
                    keys = _convert(kind, files, directory, setting)
                tables = _arrow_files(directory)
            digest = _content(tables, progress)
            seal.write_text(json.dumps([digest, keys, *_states(tables)]))
    parts = [datasets.Dataset.from_file(str(table)) for table in tables]
    return datasets.concatenate_datasets(parts), digest, keys


def _convert(kind: str, files: Sequence[Path], directory: Path, setting: str) -> list[str]:
    """Write rows as Arrow files, and sync them. Return the columns of JSON and CSV rows."""
    shutil.rmtree(directory, ignore_errors=True)
    keys: list[str] = []
    if kind == "parquet":
        _convert_parquet(files, directory, setting)
    else:
        keys = _convert_texts(files, directory)
    for table in _arrow_files(directory):
        with table.open("rb") as stream:
            os.fsync(stream.fileno())
    return keys


def _convert_texts(files: Sequence[Path], directory: Path) -> list[str]:
    """Write rows as JSON texts. Return their columns."""
    # In columns of their own, Arrow would fill the keys that a row lacks with nulls.
    schema = pa.schema({_TEXT: pa.large_string()})
    columns = dict[str, None]()
    rows = chain.from_iterable((_csv_rows if f.suffix == ".csv" else _json_rows)(f) for f in files)
    directory.mkdir()
    with (directory / "rows.arrow").open("wb") as sink, pa.ipc.new_stream(sink, schema) as out:
        while part := list(islice(rows, _JSON_ROWS)):
            columns.update(dict.fromkeys(chain.from_iterable(part)))
            texts = [json.dumps(row, ensure_ascii=False) for row in part]
            out.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema))
    return list(columns)


def _convert_parquet(files: Sequence[Path], directory: Path, setting: str) -> None:
    _require_alike(files, setting)
    named: Any = {"data_files": {"train": [glob.escape(str(file)) for file in files]}}
    level = datasets.logging.get_verbosity()
    bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        builder: Any = Parquet(**named, hash=directory.name, batch_size=_PARQUET_ROWS)
        builder.download_and_prepare(str(directory))
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _fits(source: Any, target: Any) -> bool:
    """Return whether type `target` keeps all values of `source`."""
    source, target = (t.value_type if pa.types.is_dictionary(t) else t for t in (source, target))
    names = [str(t).removeprefix("large_").removesuffix("_view") for t in (source, target)]
    if pa.types.is_null(source) or names[0] == names[1]:
        return True
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        fields = {f.name: f.type for f in target}
        return all(f.name in fields and _fits(f.type, fields[f.name]) for f in source)
    if hasattr(source, "value_type") and hasattr(target, "value_type"):  # lists
        return _fits(source.value_type, target.value_type)
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        return bool(source.bit_width <= target.bit_width)
    return bool(pa.types.is_integer(source) and pa.types.is_integer(target))


def _require_alike(files: Sequence[Path], setting: str) -> None:
    """Refuse broken files, and columns whose types `datasets` would convert to the first file's."""
    wanted: dict[str, Any] | None = None
    for file in files:
        do = "write it again, or correct its suffix"
        with refusing(f"{file} is not a complete Parquet file", do=do):
            columns = {field.name: field.type for field in pa.parquet.read_schema(file)}
        wanted = columns if wanted is None else wanted
        for name, type_ in columns.items():
            if name not in wanted or not _fits(type_, wanted[name]):
                raise UsageError(
                    f"{setting}: the columns of {file} are not those of {files[0]}",
                    have=f"{type_} in {name!r}",
                    want=str(wanted.get(name, "no such column")),
                    do="write all files with the same columns and types",
                )


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} files, {names[0]} to {names[-1]}"


def _csv_rows(file: Path) -> Iterator[Row]:
    want = "a name for each column, and quotes around values with commas or ends of lines"
    with refusing(f"{file} cannot be read as CSV", want=want, do="correct it"):
        parse = pa.csv.ParseOptions(newlines_in_values=True)
        options = pa.csv.ReadOptions(block_size=_CHUNK), parse
        with pa.csv.open_csv(file, *options) as beginning:
            types = no_duplicates([(name, pa.string()) for name in beginning.schema.names])
        with pa.csv.open_csv(file, *options, pa.csv.ConvertOptions(column_types=types)) as batches:
            for batch in batches:
                yield from batch.to_pylist()


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as stream:
        beginning = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if beginning.startswith(b"["):
            for number, row in enumerate(parsed(stream.read(), f"{file}, line", 1, list)):
                yield parsed(json.dumps(row).encode(), f"{file}, row", number)
        elif not beginning.startswith(b"\0"):  # a power failure may leave zeros and no end of line
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield parsed(line, f"{file}, line", number)
        else:
            parsed(beginning, f"{file}, line", 1)


def parsed(line: bytes, name: str, number: int, kind: type = dict) -> Any:
    """Parse a line, named by `name` and `number`. Raises `UsageError`."""
    try:
        value = json.loads(line.rstrip().decode("utf-8-sig"), object_pairs_hook=no_duplicates)
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, kind):
            return value
        problem = f"a JSON {type(value).__name__}"
    except json.JSONDecodeError as error:
        number += error.lineno - 1
        problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start + 1}"
    except UnicodeEncodeError:
        problem = "half of a surrogate pair, which is not a character"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # a repeated key, or an integer of too many digits
        problem = str(error).partition(";")[0]
    start = line.decode("utf-8", "replace").strip()[:_EXCERPT]
    raise UsageError(
        f"{name} {number} is broken: {problem}",
        have=f"a line that starts {start!r}",
        want="one JSON object on every line",
        do="correct or remove the line",
    )
