"""Read rows from local JSON Lines and Parquet files with `datasets`, as memory-mapped Arrow tables.

Processes and runs share its cache. It changes some columns of JSON files: text that looks like a date becomes a date, "007"
becomes 7 and 7 becomes 7.0 where other rows hold such numbers. These columns are read again as JSON texts, and parsed per row.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import xxhash
from datasets.packaged_modules.json.json import Json, JsonConfig
from datasets.packaged_modules.parquet.parquet import Parquet

from burnish.data.columns import READERS, Row, files_here
from burnish.errors import MissingError, UsageError, neighbours, refusing
from burnish.files.lease import locked
from burnish.files.strict_json import no_duplicates
from burnish.tracking.progress import Progress

_TEMPORAL = ("timestamp", "date", "time", "duration")
_PARQUET_ROWS = 1024
_REASON = 300
_EXCERPT = 60
_CHUNK = 16 << 20
_MEGA = 1e6
_DEEP, _NULL = b"[" * 64, re.compile(rb"\n\s*null")
"""Arrow crashes at thousands of nested lists, and at rows that are null."""
# Newer readers take some column names for logs of coding agents and change the rows.
_JSON_OPTIONS = {
    name: False for name in JsonConfig.__dataclass_fields__ if name == "parse_agent_traces"
}


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A table of rows with random access, backed by Arrow."""

    table: Any
    """The `datasets.Dataset`."""
    files: tuple[str, ...]
    texts: tuple[str, ...]
    """The columns that hold JSON texts."""
    digest: str
    """Of the content of the files."""
    is_streamed: bool = False
    """Whether rows are read as training goes on, and so are not counted."""

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return self.span(index, index + 1)[0]

    def number(self, index: int) -> int:
        """Return a row's number, the same in every epoch."""
        return index

    def span(self, start: int, stop: int) -> list[Row]:
        """Return rows start to stop - 1 at once. Raises `UsageError` for unreadable ones."""
        try:
            columns: dict[str, list[Any]] = self.table[start:stop]
        except (ValueError, OverflowError) as error:  # not UTF-8; a date that Python has not
            files = [Path(file) for file in self.files]
            raise _explained(error, READERS[files[0].suffix], files, "the data") from error
        for name in self.texts:
            columns[name] = [json.loads(text) for text in columns[name]]
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def first(self, count: int | None) -> Rows:
        """Return the first rows; all for None, and if none are read yet."""
        if count is None or self.is_streamed or count >= len(self):
            return self
        return replace(self, table=self.table.select(range(count)))

    @property
    def columns(self) -> list[str]:
        """Their names."""
        return list(self.table.column_names)

    def has(self, name: str) -> bool:
        """Return whether there is a column; dots go into nested ones by schema or first row."""
        if name in self.columns:
            return True
        head, _, rest = name.partition(".")
        if not rest or head not in self.columns:
            return False
        return _has_nested(self.table.features[head], rest) or _has_nested(self[0][head], rest)

    def where(self, index: int) -> str:
        """Name a row for an error message."""
        return f"row {index} (counted from 0) of {_listed(self.files)}"

    def missing(self, names: Sequence[str], setting: str) -> MissingError:
        """Return the error for rows without any of these columns."""
        near = [found for name in names for found in get_close_matches(name, self.columns, n=1)]
        return MissingError(
            f"no column {' or '.join(map(repr, names))} in {_listed(self.files)}",
            have="columns " + ", ".join(self.columns),
            want=f"{setting}: a column that is there",
            do=f"did you mean {near[0]!r}? Set {setting}={near[0]}"
            if near
            else f"name the column in {setting}",
        )


def load_rows(
    paths: Sequence[str], setting: str = "data.train", progress: Progress | None = None
) -> Rows:
    """Read one or more files, directories and glob patterns in the given order, each sorted by name.

    A directory stands for its direct .jsonl, .json and .parquet files.

    Raises `MissingError` for a path that matches nothing. Raises `UsageError` for no rows, other or several kinds of file, a
    broken line, and a file that changes meanwhile.
    """
    progress = progress or Progress(enabled=False)
    files = [file for path in paths for file in matching_files(path, setting)]
    kind = kind_of(files, setting)
    names = tuple(str(file) for file in files)
    with refusing(f"{setting}: {_listed(names)} cannot be read", do="see that you may read it"):
        states, is_blank = _states(files), all(map(_is_blank, files))
    if is_blank:
        raise _empty(names, setting)
    key = xxhash.xxh3_128_hexdigest(repr(states).encode())
    try:
        table, digest, texts = _read(kind, files, setting, key, progress)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"could not convert {_listed(names)} to Arrow: {error}",
            want=f"a cache directory that can be written, {datasets.config.HF_DATASETS_CACHE}",
            do="make room there, or set HF_DATASETS_CACHE to another directory",
        ) from error
    except Exception as error:  # of Arrow, or of the archive that `datasets` takes the file for
        raise _explained(error, kind, files, setting) from error
    if len(table) == 0:
        raise _empty(names, setting)
    if texts:
        with progress.phase("parsing"):
            table = _with_json_texts(table, files, texts)
        digest = f"{digest} {states}"
    if _states(files) != states:
        raise UsageError(
            f"{setting}: {_listed(names)} changed while it was read",
            want="files that nobody writes to",
            do="start again when they are whole",
        )
    return Rows(table, names, tuple(texts), digest)


def _states(files: Sequence[Path]) -> list[list[int]]:
    """Return what differs after any change of a file; `cp -p` and `rsync -t` keep the mtime alone."""
    found = map(os.stat, files)
    return [[each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for each in found]


def _arrow_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.arrow"))


def _content(files: Sequence[Path], progress: Progress) -> str:
    digest = xxhash.xxh3_128()
    with progress.phase("reading", sum(file.stat().st_size for file in files) / _MEGA) as bar:
        for file in files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            for chunk in _chunks(file):
                digest.update(chunk)
                bar.advance(len(chunk) / _MEGA)
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def matching_files(path: str, setting: str) -> list[Path]:
    """Return an entry's local files. Raises `MissingError` for none."""
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
    found = sorted(file.absolute() for file in files_here(path) if file.is_file())
    if not found:
        raise MissingError(
            f"{setting}: nothing to read at {path}",
            have=neighbours(plain),
            want="a file, a directory of .jsonl, .json or .parquet files, or a pattern that matches",
            do=f"correct {setting}",
        )
    return found


def kind_of(files: Sequence[PurePath], setting: str) -> str:
    """Return the reader of files. Raises `UsageError` unless all have the same."""
    kinds = {file.suffix: file for file in files}
    for suffix, file in kinds.items():
        if suffix not in READERS:
            raise UsageError(
                f"{setting}: {file} is of no known kind",
                have=f"suffix {suffix!r}",
                want=", ".join(READERS),
                do="rename or convert it",
            )
    readers = {READERS[suffix] for suffix in kinds}
    if len(readers) > 1:
        raise UsageError(
            f"{setting} mixes kinds of file",
            have=", ".join(sorted(kinds)),
            want="JSON Lines only, or Parquet only",
            do="convert the files of one kind",
        )
    return readers.pop()


def _read(
    kind: str, files: Sequence[Path], setting: str, key: str, progress: Progress
) -> tuple[Any, str, list[str]]:
    """Return the files' `datasets.Dataset`, a digest of its content, and the columns to read as JSON texts.

    A power failure may leave zeros in Arrow files, which `datasets` trusts. So they are synced, and their digest and what `stat`
    says lie beside them.
    """
    named: Any = {"data_files": {"train": [glob.escape(str(file)) for file in files]}, "hash": key}
    with _quiet_datasets():
        make: Any = partial(ExactJson, **named, **_JSON_OPTIONS)
        if kind == "parquet":
            make = partial(Parquet, **named, batch_size=_PARQUET_ROWS)
        directory = Path(make().cache_dir)
        directory.parent.mkdir(parents=True, exist_ok=True)
        seal = directory.with_suffix(".digest")
        with locked(seal):
            builder = make()  # knows what another process has converted meanwhile
            digest, texts, *states = json.loads(seal.read_text() or '["", []]')
            if not digest or states != _states(_arrow_files(directory)):
                shutil.rmtree(directory, ignore_errors=True)
                os.truncate(seal, 0)
                for file in files:
                    _require_rows(file, kind)
                if kind == "parquet":
                    _require_alike(files, setting)
                with progress.phase("converting"):
                    builder.download_and_prepare()
                if kind == "json":
                    texts = builder.inexact(files)
                digest = _content(_arrow_files(directory), progress)
                seal.write_text(json.dumps([digest, texts, *_states(_arrow_files(directory))]))
        return builder.as_dataset(split="train"), digest, texts


class ExactJson(Json):
    """Leave columns empty whose type changes between parts of the files, and note them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._changed, self._doubtful = set[str](), set[str]()

    def inexact(self, files: Sequence[Path]) -> list[str]:
        """Return the columns that Arrow holds differently from JSON."""
        with suppress(UsageError):  # not one row per line
            for row in chain.from_iterable(map(_json_rows, files)) if self._doubtful else ():
                self._changed |= {n for n in self._doubtful - self._changed if _has_int(row.get(n))}
        features = self.info.features
        found = self._changed | {name for name in features if _is_changed(features[name])}
        return [*filter(found.__contains__, features), *sorted(found - features.keys())]

    def _cast_table(self, pa_table: Any, json_field_paths: Any = ()) -> Any:
        if self.info.features is not None:
            kept, schema = {}, self.info.features.arrow_schema
            for name, column in zip(pa_table.column_names, pa_table.columns, strict=True):
                if name in schema.names and _fits(column.type, schema.field(name).type):
                    kept[name] = column
                    self._doubtful |= {name} if _has_whole_floats(column) else set()
                else:
                    self._changed.add(name)
            count = len(pa_table)
            arrays = [kept.get(each.name, pa.nulls(count, each.type)) for each in schema]
            pa_table = pa.table(arrays, schema.names)
        return super()._cast_table(pa_table, json_field_paths)


def _fits(found: Any, want: Any) -> bool:
    """Return whether values of an Arrow type stay as they are in another."""
    found, want = (t.value_type if pa.types.is_dictionary(t) else t for t in (found, want))
    names = [str(t).removeprefix("large_").removesuffix("_view") for t in (found, want)]
    if pa.types.is_null(found) or names[0] == names[1]:
        return True
    if pa.types.is_struct(found) and pa.types.is_struct(want):
        fields = {each.name: each.type for each in want}
        return all(each.name in fields and _fits(each.type, fields[each.name]) for each in found)
    if hasattr(found, "value_type") and hasattr(want, "value_type"):  # lists
        return _fits(found.value_type, want.value_type)
    if pa.types.is_floating(found) and pa.types.is_floating(want):
        return bool(found.bit_width <= want.bit_width)
    return pa.types.is_integer(found) and pa.types.is_integer(want)


def _has_whole_floats(column: Any) -> bool:
    """Return whether there are numbers that JSON may have without a point."""
    if isinstance(column, pa.ChunkedArray):
        return any(map(_has_whole_floats, column.chunks))
    if pa.types.is_floating(column.type):
        return bool(pc.any(pc.equal(column, pc.floor(column))).as_py())
    parts = column.flatten() if pa.types.is_nested(column.type) else []
    return any(map(_has_whole_floats, parts if isinstance(parts, list) else [parts]))


def _has_int(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_int, value.values() if isinstance(value, dict) else value))
    return type(value) is int


def _require_alike(files: Sequence[Path], setting: str) -> None:
    """Refuse Parquet files of other types than the first, which `datasets` would convert."""
    first = pa.parquet.read_schema(files[0])
    wanted = {field.name: field.type for field in first}
    for file in files[1:]:
        for field in pa.parquet.read_schema(file):
            if field.name not in wanted or not _fits(field.type, wanted[field.name]):
                raise UsageError(
                    f"{setting}: the columns of {file} are not those of {files[0]}",
                    have=f"{field.type} in {field.name!r}",
                    want=str(wanted.get(field.name, "no such column")),
                    do="write all files with the same columns and types",
                )


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    level, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _is_blank(file: Path) -> bool:
    with file.open("rb") as stream:
        return not any(line.strip() for line in stream)


def _empty(names: Sequence[str], setting: str) -> UsageError:
    return UsageError(
        f"{setting} has no rows",
        have=_listed(names),
        want="at least one row",
        do=f"correct {setting}",
    )


def _explained(error: Exception, kind: str, files: Sequence[Path], setting: str) -> UsageError:
    if "corresponds to no data" in str(error):
        return _empty([str(file) for file in files], setting)
    if kind == "json":
        try:
            for file in files:
                _require_readable(file)
        except UsageError as broken:
            return broken
    cause = error.__cause__ or error
    return UsageError(
        f"{setting}: could not read {_listed([str(file) for file in files])}",
        have=" ".join(str(cause).split())[:_REASON],
        want="the same columns with the same types in every file and row",
        do="compare the columns of the files; a column may be null where a row has no value",
    )


def _require_readable(file: Path) -> None:
    for _ in _json_rows(file, strict=True):
        pass


def _require_rows(file: Path, kind: str) -> None:
    """Refuse what crashes Arrow, and zeros of a power failure, which `datasets` reads for minutes."""
    with file.open("rb") as stream:
        beginning = stream.read(3)
    if kind == "parquet" and beginning != b"PAR":
        raise UsageError(
            f"{file} is no Parquet file",
            have=f"{beginning!r} at its beginning",
            want="PAR1",
            do="write it again, or give it the suffix of what it is",
        )
    if kind == "json" and (
        beginning.startswith(b"\0")
        or any(_DEEP in c or _NULL.search(b"\n" + c) for c in _chunks(file))
    ):
        _require_readable(file)


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} files, {names[0]} to {names[-1]}"


def _has_nested(value: Any, path: str) -> bool:
    head, _, rest = path.partition(".")
    found = isinstance(value, dict) and head in value
    return found and (not rest or _has_nested(value[head], rest))


def _is_changed(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_is_changed, feature.values()))
    if isinstance(feature, datasets.Value):
        return str(feature.dtype).startswith(_TEMPORAL)
    if type(feature).__name__ == "Json":
        return True
    inner = getattr(feature, "feature", None)
    return inner is not None and _is_changed(inner)


def _with_json_texts(table: Any, files: Sequence[Path], columns: Sequence[str]) -> Any:
    texts: dict[str, list[str]] = {name: [] for name in columns}
    for file in files:
        for row in _json_rows(file):
            for name in columns:
                texts[name].append(json.dumps(row.get(name)))
    found = datasets.Dataset.from_dict(texts)
    others = [name for name in table.column_names if name not in texts]
    if not others:
        return found
    both = datasets.concatenate_datasets([table.select_columns(others), found], axis=1)
    return both.select_columns(list(dict.fromkeys([*table.column_names, *columns])))


def _json_rows(file: Path, *, strict: bool = False) -> Iterator[Mapping[str, Any]]:
    with file.open("rb") as stream:
        beginning = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if beginning.startswith(b"["):
            yield from parsed(stream.read(), f"{file}, line", 1, list, strict)
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield parsed(line, f"{file}, line", number, dict, strict)


def parsed(line: bytes, name: str, number: int, kind: type = dict, strict: bool = False) -> Any:
    """Parse a line, named by `name` and `number`. Raises `UsageError`.

    `strict` finds what Arrow refuses and Python does not.
    """
    try:
        value = json.loads(
            line.rstrip().decode("utf-8-sig"), object_pairs_hook=no_duplicates if strict else None
        )
        if strict:
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
        problem = "half of a surrogate pair, which is no character"
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
