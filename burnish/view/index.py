"""Index a run's rollouts in SQLite, so that pages of millions are found without reading them.

A row has the columns for filters and sorts, and the rollout's place: file, block and line. Its number orders rollouts of a kind
by step, newest first, and within a step by prompt and sample.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import sqlite3
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from functools import lru_cache, partial
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError
from burnish.tracking.rollouts import Kind, Row, blocks, named_rollouts, parse_rollout
from burnish.tracking.rundir import plain

T = TypeVar("T")

_Sort = Literal["place", "step", "reward", "-reward", "length", "-length"]
"""Orders of rollouts: "place" is newest first, "step" is the reverse."""
# A rollout's prompt, sample, place, reward, length and source.
_Facts = tuple[int, int, int, float, int, str]
# A rollout's number, its value in the sorted column, and its place. No place: there was no time to index the rest.
_Place = tuple[int, float, int | None]

FORMAT = 2
_SEQUENCE_BITS, _STEP_BITS, _LINE_BITS, _BLOCK_BITS = 22, 39, 22, 40
_SEQUENCES = (1 << _SEQUENCE_BITS) - 1
LAST_STEP = (1 << _STEP_BITS) - 1
"""The last step that an index can have."""
_LAST = (2 << _STEP_BITS << _SEQUENCE_BITS) - 1  # the largest number
_NAN = math.nextafter(-math.inf, 0.0)  # in place of NaN, which SQLite cannot hold
# Most seconds for a page to index, for a search to read, and to count rows.
_PAGE_SECONDS, _SEARCH_SECONDS, _COUNT_SECONDS = 0.1, 1.0, 0.15
_SORTED_AT_ONCE, _BLOCKS_HELD, _BUSY_SECONDS = 50_000, 16, 30.0
# Least seconds between two listings of the directory, their largest share of time, and the age of a reliable directory time.
_LOOK_SECONDS, _LOOK_SHARE, _RECENT_NS = 1.0, 0.05, 2 * 10**9
_ID = re.compile(r"((?:step|validation)-[0-9]{1,18}(?:\.rest)?):([0-9]{1,12}):([0-9]{1,6})")
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
-- Pages of indices are rewritten often, hence few checkpoints and 32 MiB of cache.
PRAGMA wal_autocheckpoint = 16384;
PRAGMA cache_size = -32768;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS groups(first INTEGER PRIMARY KEY, files TEXT NOT NULL, rows INTEGER NOT NULL, problem TEXT);
CREATE TABLE IF NOT EXISTS sources(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS rollouts(id INTEGER PRIMARY KEY, place INTEGER NOT NULL, prompt INTEGER NOT NULL,
                                    reward REAL NOT NULL, length INTEGER NOT NULL, source INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_prompt ON rollouts(prompt);
CREATE INDEX IF NOT EXISTS by_source ON rollouts(source);
CREATE INDEX IF NOT EXISTS by_reward ON rollouts(reward);
CREATE INDEX IF NOT EXISTS by_length ON rollouts(length);
PRAGMA user_version = {FORMAT};
COMMIT
"""

_log = logging.getLogger("burnish")

Integer = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
Number = Annotated[float, Field(ge=-math.inf)]  # not NaN


class RolloutFilter(BaseModel, frozen=True):
    """Which rollouts to return, in which order."""

    kind: Kind = "step"
    from_step: Integer = 0
    to_step: Integer = LAST_STEP
    prompt: Integer | None = None
    source: str | None = None
    text: str = ""
    min_reward: Number | None = None
    max_reward: Number | None = None
    """Either limit leaves out rewards that are NaN."""
    min_length: Integer | None = None
    max_length: Integer | None = None
    sort: _Sort = "place"

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last number that rollouts of these steps can have."""
        last, first = max(-1, min(self.to_step, LAST_STEP)), max(0, self.from_step)
        return _first(self.kind, last), _first(self.kind, min(first, LAST_STEP + 1)) + _SEQUENCES

    @property
    def column(self) -> str:
        """The column to sort by."""
        name = self.sort.removeprefix("-")
        return name if name in ("reward", "length") else "id"

    @property
    def descends(self) -> bool:
        """Whether the column's values descend."""
        return self.sort in ("step", "-reward", "-length")

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions on rows, besides those on step and text."""
        by_reward = self.min_reward is not None or self.max_reward is not None
        named = {
            "prompt = ?": self.prompt,
            "source = (SELECT id FROM sources WHERE name = ?)": self.source and plain(self.source),
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
            "reward != ?": _NAN if by_reward else None,
            "length >= ?": self.min_length,
            "length <= ?": self.max_length,
        }
        return {name: value for name, value in named.items() if value is not None}


class RolloutPage(NamedTuple):
    """A page of rollouts, by id."""

    rows: list[tuple[str, Row]]
    next: str | None
    """The cursor of the rest; None at the end."""
    total: int | None
    """How many rollouts match: with the first page, if they can be counted quickly."""


class RolloutIndex:
    """The index at `path` of a directory of rollouts, for all threads. Raises `BurnishError` if it can neither be used nor rebuilt."""

    def __init__(self, directory: Path, path: Path) -> None:
        self._directory, self._path = directory, path
        self._lock, self._looking, self._indexing = (threading.RLock() for _ in range(3))
        # By a step's first number: names and marks of its files, that with chosen rollouts and that with the rest, as JSON.
        self._listed: dict[int, str] = {}
        self._pending: list[int] = []  # first numbers of steps that are not indexed
        self._changed_at, self._next_look = -1, 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._block = lru_cache(_BLOCKS_HELD)(self._read_block)
        self._open()

    def close(self) -> None:
        """Stop the thread and close the index."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._database.close()

    def page(
        self, wanted: RolloutFilter, cursor: str | None = None, limit: int = 50
    ) -> RolloutPage:
        """Return up to `limit` rollouts after a cursor, in about a second at most."""
        return self._reopening(partial(self._page, wanted, cursor, limit))

    def row(self, identity: str) -> Row:
        """Return one rollout as its file has it. Raises `MissingError`, and `CorruptError` for a damaged file."""
        match = _ID.fullmatch(identity)
        try:
            if match is None:
                raise IndexError
            path = self._directory / f"{match[1]}.jsonl.gz"
            line = self._block(path, _mark(path), int(match[2]))[int(match[3])]
        except (FileNotFoundError, IndexError) as error:
            problem = f"there is no rollout {identity[:80]!r}, or not any more"
            raise MissingError(problem, do="choose one that is listed") from error
        return parse_rollout(line, f"{path}, in the block at byte {match[2]},")

    def facets(self, kind: Kind | None = None) -> dict[str, Any]:
        """Return the values to filter by, the indexed share of steps, and problems with files."""
        return self._reopening(partial(self._found_facets, kind or self.kind()))

    def kind(self) -> Kind:
        """Return the kind of the rollouts; "step" if there are both."""
        self._reopening(self._look)
        kinds = {_kind_and_step(first)[0] for first in self._listed}
        return "validation" if kinds == {"validation"} else "step"

    def _look(self) -> None:
        """List the files, unless that was just done; start the thread if some are not indexed."""
        with self._looking:
            begun = time.monotonic()
            if begun < self._next_look:
                return
            if not self._path.exists() or self._path.stat().st_ino != self._inode:
                self._open_again()  # another viewer has rebuilt it
            changed = self._directory.stat().st_mtime_ns if self._directory.exists() else 0
            if changed != self._changed_at or time.time_ns() - changed < _RECENT_NS:
                self._list()
                self._changed_at = changed
            took = time.monotonic() - begun
            self._next_look = begun + max(_LOOK_SECONDS, took / _LOOK_SHARE)
            if self._pending and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def _list(self) -> None:
        found: dict[int, list[tuple[str, str] | None]] = {}
        for kind, step, is_rest, path in named_rollouts(self._directory):
            with suppress(FileNotFoundError):
                if step <= LAST_STEP:
                    both = found.setdefault(_first(kind, step), [None, None])
                    both[is_rest] = (path.name, _mark(path))
        listed = {first: json.dumps(both) for first, both in found.items()}
        with self._lock, self._database:
            known = dict(self._database.execute("SELECT first, files FROM groups"))
            for first in known.keys() - listed.keys():
                self._drop(first)
            self._listed = listed
            self._pending = sorted(first for first in listed if known.get(first) != listed[first])

    def _work(self) -> None:
        try:
            while not self._is_closed and (first := self._next_pending()) is not None:
                self._reopening(partial(self._index, first))
        except BurnishError as error:
            _log.warning("%s", error)

    def _index(self, first: int) -> None:
        with self._indexing:
            files = self._listed.get(first)
            with self._lock:
                query = "SELECT 1 FROM groups WHERE first = ? AND files = ?"
                is_there = self._database.execute(query, (first, files)).fetchone()
            if files is not None and not is_there:
                rows, problem = self._read(files)
                with self._lock, self._database:
                    self._drop(first)
                    self._insert(first, files, rows, problem)
            with self._lock:
                if first in self._pending and self._listed.get(first) == files:
                    self._pending.remove(first)

    def _drop(self, first: int) -> None:
        ids = (first, first + _SEQUENCES)
        self._database.execute("DELETE FROM rollouts WHERE id BETWEEN ? AND ?", ids)
        self._database.execute("DELETE FROM groups WHERE first = ?", (first,))

    def _insert(self, first: int, files: str, rows: list[_Facts], problem: str | None) -> None:
        names = {(row[5],) for row in rows}
        self._database.executemany("INSERT OR IGNORE INTO sources(name) VALUES (?)", names)
        numbers = dict(self._database.execute("SELECT name, id FROM sources"))
        rows.sort()
        self._database.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?)",
            (
                (first + i, place, prompt, reward, length, numbers[source])
                for i, (prompt, _, place, reward, length, source) in enumerate(rows)
            ),
        )
        group = (first, files, len(rows), problem)
        self._database.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", group)

    def _read(self, files: str) -> tuple[list[_Facts], str | None]:
        found: list[_Facts] = []
        problem = None
        for is_rest, file in enumerate(json.loads(files)):
            path = self._directory / file[0] if file else None
            try:
                for start, text in blocks(path) if path else ():
                    for number, line in enumerate(text.splitlines(keepends=True)):
                        place = (is_rest << _BLOCK_BITS | start) << _LINE_BITS | number
                        try:
                            found.append(_facts(line, place, f"{path}, at byte {start},"))
                        except CorruptError as error:
                            problem = error.problem
            except CorruptError as error:
                problem = error.problem
            except OSError as error:
                if not isinstance(error, FileNotFoundError):  # a run removes old files
                    problem = f"{path} cannot be read: {error.strerror}"
        return found[: _SEQUENCES + 1], problem

    def _page(self, wanted: RolloutFilter, cursor: str | None, limit: int) -> RolloutPage:
        self._look()
        begun, needle, after = time.monotonic(), wanted.text.casefold(), _parsed(cursor)
        found: list[tuple[str, Row]] = []
        following: str | None = None
        with closing(self._candidates(wanted, after, begun + _PAGE_SECONDS)) as candidates:
            for each in candidates:
                is_late = needle and time.monotonic() > begun + _SEARCH_SECONDS
                if each[2] is None or len(found) == limit or (after and is_late):
                    number, value, _ = each if each[2] is None or after is None else after
                    following = f"{number},{value!r}"
                    break
                after = each
                if (row := self._matching(each, needle)) is not None:
                    found.append(row)
        total = self._count(wanted) if not (cursor or needle) else None
        return RolloutPage(found, following, total)

    def _candidates(
        self, wanted: RolloutFilter, after: _Place | None, deadline: float
    ) -> Generator[_Place]:
        """Yield rollouts that fulfil all conditions but the text, in order; first index steps in their range while there is time."""
        (low, high), descends, by_step = wanted.span, wanted.descends, wanted.column == "id"
        if after is not None and by_step:
            low, high = (low, after[0] - 1) if descends else (after[0] + 1, high)
            after = None
        while (first := self._next_pending(low, high, descends)) is not None:
            self._index(first)
            if time.monotonic() > deadline:
                break
        first = self._next_pending(low, high, descends)
        if first is None or not by_step:
            yield from self._selected(wanted, low, high, after)
        # Rollouts before the first step that is not indexed are known; the others have to wait for it.
        elif descends:
            yield from self._selected(wanted, first + _SEQUENCES + 1, high)
            yield first + _SEQUENCES + 1, 0.0, None
        else:
            yield from self._selected(wanted, low, first - 1)
            yield first - 1, 0.0, None

    def _next_pending(self, low: int = 0, high: int = _LAST, from_end: bool = False) -> int | None:
        """Return the first number of the first step in a range that is not indexed; `from_end`, of the last."""
        with self._lock:
            start = bisect_right(self._pending, low - _SEQUENCES - 1)
            stop = bisect_right(self._pending, high)
            return self._pending[stop - 1 if from_end else start] if start < stop else None

    def _selected(
        self, wanted: RolloutFilter, low: int, high: int, after: _Place | None = None
    ) -> Iterator[_Place]:
        column = wanted.column
        way, beyond = ("DESC", "<") if wanted.descends else ("ASC", ">")
        index = "NOT INDEXED"
        if wanted.prompt is not None:
            index = "INDEXED BY by_prompt"
        elif column == "id" and wanted.source is not None:
            index = "INDEXED BY by_source"
        elif column != "id" and self._rows(wanted) > _SORTED_AT_ONCE:
            index = f"INDEXED BY by_{column}"
        parts: list[dict[str, Any]] = [{}]
        if after is not None:
            same = {f"{column} = ?": after[1], f"id {beyond} ?": after[0]}
            parts = [same, {f"{column} {beyond} ?": after[1]}]
        for part in parts:
            where = {"id >= ?": low, "id <= ?": high, **wanted.conditions, **part}
            query = f"SELECT id, {column}, place FROM rollouts {index} WHERE {' AND '.join(where)}"
            order = f" ORDER BY {column} {way}, id {way}"
            with closing(self._connection()) as reader:
                yield from reader.execute(query + order, [*where.values()])

    def _matching(self, each: _Place, needle: str) -> tuple[str, Row] | None:
        """Return a rollout and its id, if its text contains `needle`; None also if it is gone."""
        number, _, place = each
        rest_and_start, line = divmod(place or 0, 1 << _LINE_BITS)
        is_rest, start = divmod(rest_and_start, 1 << _BLOCK_BITS)
        try:
            name, mark = json.loads(self._listed[number & ~_SEQUENCES])[is_rest]
            row = parse_rollout(self._block(self._directory / name, mark, start)[line], name)
        except (KeyError, IndexError, TypeError, OSError, CorruptError):  # the file has changed
            return None
        texts = (str(row["prompt"]), str(row["completion"]))
        if needle and not any(needle in text.casefold() for text in texts):
            return None
        row["kind"], row["step"] = _kind_and_step(number)
        return f"{name.removesuffix('.jsonl.gz')}:{start}:{line}", row

    def _read_block(self, path: Path, mark: str, start: int) -> list[bytes]:
        with closing(blocks(path, start)) as found:
            for _, data in found:
                return data.splitlines(keepends=True)
        raise IndexError(start)

    def _rows(self, wanted: RolloutFilter) -> int:
        with closing(self._connection()) as reader:
            query = "SELECT coalesce(sum(rows), 0) FROM groups WHERE first BETWEEN ? AND ?"
            return int(reader.execute(query, wanted.span).fetchone()[0])

    def _count(self, wanted: RolloutFilter) -> int | None:
        """Return how many rows fulfil everything; None if that takes long, or if not all are indexed."""
        low, high = wanted.span
        if self._next_pending(low, high) is not None:
            return None
        if not wanted.conditions:
            return self._rows(wanted)
        where = {"id >= ?": low, "id <= ?": high, **wanted.conditions}
        deadline = time.monotonic() + _COUNT_SECONDS
        with closing(self._connection()) as reader, suppress(sqlite3.OperationalError):
            reader.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            query = f"SELECT count(*) FROM rollouts WHERE {' AND '.join(where)}"
            return int(reader.execute(query, [*where.values()]).fetchone()[0])
        return None

    def _found_facets(self, kind: Kind) -> dict[str, Any]:
        self._look()
        pending = len(self._pending)  # read first: the thread may index more meanwhile
        every = [_kind_and_step(first) for first in sorted(self._listed, reverse=True)]
        trained = [step for of, step in every if of == "step"]
        span = RolloutFilter(kind=kind).span
        used = "SELECT 1 FROM rollouts INDEXED BY by_source WHERE source = sources.id AND id BETWEEN ? AND ?"
        sources = f"SELECT name FROM sources WHERE EXISTS ({used}) ORDER BY name"
        wrong = "SELECT problem FROM groups WHERE problem NOT NULL AND first BETWEEN ? AND ?"
        with closing(self._connection()) as reader:
            return {
                "kind": kind,
                "steps": [trained[0], trained[-1], len(trained)] if trained else None,
                "validations": [step for of, step in every if of == "validation"],
                "sources": [name for (name,) in reader.execute(sources, span)],
                "indexed": round(1 - pending / max(1, len(self._listed)), 4),
                "problems": [problem for (problem,) in reader.execute(wrong, span)],
            }

    def _reopening(self, call: Callable[[], T]) -> T:
        try:
            try:
                return call()
            except sqlite3.DatabaseError as error:
                _log.warning("%s is opened again: %s", self._path, error)
                with self._lock:
                    if not isinstance(error, sqlite3.OperationalError):
                        self._remove()
                    self._open_again()
                return call()
        except (sqlite3.Error, OSError) as error:
            do = "make room there, or let BURNISH_CACHE name a directory that can be written"
            problem = f"the index {self._path} cannot be used"
            raise BurnishError(problem, have=error, do=do) from error

    def _open_again(self) -> None:
        with self._lock:
            self._database.close()
            self._open()
            self._list()

    def _open(self) -> None:
        database = self._connection()
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError:  # no place for a database
            raise
        except sqlite3.DatabaseError:  # not a database
            version = -1
        if version not in (0, FORMAT):
            database.close()
            self._remove()
            database = self._connection()
        database.executescript(_SCHEMA)
        self._database, self._inode = database, self._path.stat().st_ino

    def _connection(self) -> sqlite3.Connection:
        # SQLite follows links, and writes into whatever they lead to.
        for path in (self._path, *self._beside()):
            with suppress(FileNotFoundError):
                state = path.lstat()
                if not S_ISREG(state.st_mode) or state.st_nlink > 1:
                    raise OSError(errno.EINVAL, "a link, or not a regular file", str(path))
        return sqlite3.connect(self._path, _BUSY_SECONDS, 0, "IMMEDIATE", check_same_thread=False)

    def _remove(self) -> None:
        for path in (self._path, *self._beside()):
            path.unlink(missing_ok=True)

    def _beside(self) -> list[Path]:
        """Return the files that SQLite keeps beside the index."""
        return [
            self._path.with_name(f"{self._path.name}-{each}") for each in ("wal", "shm", "journal")
        ]


def _first(kind: Kind, step: int) -> int:
    return ((kind == "validation") << _STEP_BITS | LAST_STEP - step) << _SEQUENCE_BITS


def _kind_and_step(number: int) -> tuple[Kind, int]:
    is_validation, later = divmod(number >> _SEQUENCE_BITS, 1 << _STEP_BITS)
    return ("validation" if is_validation else "step"), LAST_STEP - later


def _mark(path: Path) -> str:
    """Return a text that changes with the file. Raises `FileNotFoundError`, also for a link or a pipe."""
    state = path.lstat()
    if not S_ISREG(state.st_mode):
        raise FileNotFoundError(path)
    return f"{state.st_size}:{state.st_mtime_ns}"


def _parsed(cursor: str | None) -> _Place | None:
    if not cursor:
        return None
    try:
        number, value = cursor.split(",")
        return _fitting(number), float(value), None
    except (ValueError, OverflowError) as error:
        do = "begin at the first page"
        raise UsageError("cursor: it is not the end of a page", have=cursor[:80], do=do) from error


def _facts(line: bytes, place: int, where: str) -> _Facts:
    row = parse_rollout(line, where)
    try:
        prompt, sample = _fitting(row["prompt_index"]), _fitting(row.get("sample") or 0)
        length, reward = _fitting(row.get("length") or 0), float(row["reward"])
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{where} has a rollout with invalid numbers"
        raise CorruptError(problem, have=error, do="move the file away") from error
    source = plain(str(row.get("source") or ""))
    return prompt, sample, place, _NAN if math.isnan(reward) else reward, length, source


def _fitting(value: Any) -> int:
    """Return an integer that SQLite can hold. Raises `ValueError`, `TypeError` or `OverflowError`."""
    number = int(value)
    number.to_bytes(8, signed=True)
    return number
