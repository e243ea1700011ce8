"""Index a run's rollouts in SQLite, so that pages of millions are found without reading them.

A row of the index has what filters and sorts need, and where the rollout lies: its file, block and line. Texts stay in the files.
A rollout's number orders those of a kind by step, newest first, and within a step by prompt and sample.

Files are indexed newest first, by a thread, and by a request for the files that its page needs. Several viewers may share an index.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError
from burnish.tracking.rollouts import Kind, Row, blocks, named_rollouts, parse_rollout

T = TypeVar("T")

Sort = Literal["place", "reward", "-reward", "length", "-length", "step", "-step"]
"""Orders of rollouts: "place" and "-step" are newest first, "step" is the reverse."""

FORMAT = 1
"""An index of another format is made again."""
_SEQUENCE_BITS, _STEP_BITS, _LINE_BITS = 22, 39, 22
_SEQUENCES = (1 << _SEQUENCE_BITS) - 1
LAST_STEP = (1 << _STEP_BITS) - 1
"""The last step that an index can have."""
_NAN = math.nextafter(-math.inf, 0.0)
# In place of a reward that is NaN, which SQLite cannot hold.
_PAGE_SECONDS, _SEARCH_SECONDS, _COUNT_SECONDS = 0.3, 1.0, 0.15
# How long a page may index, a search may read, and rows may be counted.
_SORTED_AT_ONCE, _SAMPLED, _BINS = 50_000, 50_000, 20
_BLOCKS_HELD, _BUSY_SECONDS, _YIELD_SECONDS = 16, 30.0, 0.002
_LOOK_SECONDS, _LOOK_SHARE, _RECENT_NS = 1.0, 0.05, 2 * 10**9
# Least time between two looks at the directory, most of the time that they may take, and the age of a directory whose time is sure.
_ID = re.compile(r"((?:step|validation)-[0-9]{1,18}(?:\.rest)?):([0-9]{1,12}):([0-9]{1,6})")
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE groups(first INTEGER PRIMARY KEY, files TEXT NOT NULL, rows INTEGER NOT NULL, summary TEXT NOT NULL, problem TEXT);
CREATE TABLE sources(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE rollouts(id INTEGER PRIMARY KEY, place INTEGER NOT NULL, prompt INTEGER NOT NULL,
                      reward REAL NOT NULL, length INTEGER NOT NULL, source INTEGER NOT NULL);
CREATE INDEX by_prompt ON rollouts(prompt);
CREATE INDEX by_source ON rollouts(source);
CREATE INDEX by_reward ON rollouts(reward);
CREATE INDEX by_length ON rollouts(length);
PRAGMA user_version = {FORMAT};
COMMIT;
"""

_log = logging.getLogger("burnish")


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts are wanted, in which order."""

    kind: Kind = "step"
    from_step: int = 0
    to_step: int = LAST_STEP
    prompt: int | None = None
    """The index of a prompt."""
    source: str | None = None
    text: str = ""
    """Is in the prompt or the completion, in either case."""
    min_reward: float | None = None
    max_reward: float | None = None
    """With either, rewards that are NaN are left out."""
    min_length: int | None = None
    max_length: int | None = None
    sort: Sort = "place"

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last number that rollouts of these steps can have."""
        first, last = min(self.to_step, LAST_STEP), min(max(self.from_step, 0), LAST_STEP + 1)
        return _first(self.kind, max(first, -1)), _first(self.kind, last) + _SEQUENCES

    @property
    def column(self) -> str:
        """The column that is sorted by."""
        name = self.sort.removeprefix("-")
        return name if name in ("reward", "length") else "id"

    @property
    def descends(self) -> bool:
        """Whether the column's values fall."""
        return self.sort in ("step", "-reward", "-length")

    @property
    def conditions(self) -> dict[str, Any]:
        """What rows have to fulfil, besides their steps and text."""
        named = {
            "prompt = ?": self.prompt,
            "source = (SELECT id FROM sources WHERE name = ?)": _plain(self.source),
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
            "length >= ?": self.min_length,
            "length <= ?": self.max_length,
        }
        if self.min_reward is not None or self.max_reward is not None:
            named["reward != ?"] = _NAN
        return {name: value for name, value in named.items() if value is not None}


class RolloutPage(NamedTuple):
    """Some rollouts, by id."""

    rows: list[tuple[str, Row]]
    next: str | None
    """The cursor of the rest; None at the end."""
    total: int | None
    """How many there are, if that is soon known; told with the first page."""
    scanned: float
    """The share of rollouts that were looked at."""


class _Facts(NamedTuple):
    """What the index has of a rollout."""

    prompt: int
    sample: int
    place: int
    reward: float
    length: int
    source: str


class _Candidate(NamedTuple):
    """A rollout that may be wanted; without a place, there was no time to index those after it."""

    number: int
    place: int | None = None
    value: float = 0.0
    """In the column that is sorted by."""


class _Position(NamedTuple):
    """Where a page begins: after a rollout."""

    number: int | None = None
    value: float = 0.0
    examined: int = 0
    """How many rollouts the pages before have looked at."""

    @classmethod
    def of(cls, cursor: str | None) -> Self:
        """Parse a cursor. Raises `UsageError`."""
        if not cursor:
            return cls()
        try:
            number, value, examined = cursor.split(",")
            return cls(_fitting(number), float(value), int(examined))
        except (ValueError, OverflowError) as error:
            raise UsageError("cursor: no page ends there", have=cursor[:80]) from error

    def __str__(self) -> str:
        return "" if self.number is None else f"{self.number},{self.value!r},{self.examined}"


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one step, in one or two files."""

    first: int
    files: dict[bool, tuple[str, str]]
    """Names and marks of the file of the chosen rollouts, and (True) of that of the rest."""

    @property
    def signature(self) -> str:
        """Differs when a file has changed."""
        return json.dumps([self.files.get(False), self.files.get(True)])


class _Block:
    """A block's lines, and whether they can have a text."""

    def __init__(self, data: bytes) -> None:
        self.lines = data.splitlines(keepends=True)
        self._data = data
        self._known = ("", True)

    def may_have(self, needle: str) -> bool:
        """Whether a rollout of the block can contain `needle`, which is folded."""
        if self._known[0] != needle:
            # Lone surrogates and other writers' texts are escaped.
            is_escaped = b"\\u" in self._data or b"\\/" in self._data
            quoted = json.dumps(needle, ensure_ascii=False)[1:-1]
            folded = "" if is_escaped else self._data.decode("utf-8", "replace").casefold()
            self._known = needle, is_escaped or quoted in folded
        return self._known[1]


class RolloutIndex:
    """The index at `path` of a directory of rollouts. Threads may share it.

    Raises `BurnishError` when the index can neither be used nor made again.
    """

    def __init__(self, directory: Path, path: Path) -> None:
        self._directory, self._path = directory, path
        self._lock, self._looking = threading.RLock(), threading.Lock()
        self._listed: dict[int, _Group] = {}
        self._pending: list[int] = []
        self._changed_at, self._next_look = -1, 0.0
        self._thread: threading.Thread | None = None
        self._requests, self._is_closed = 0, False
        self._block = lru_cache(_BLOCKS_HELD)(self._read_block)
        self._facets: dict[Kind, tuple[object, dict[str, Any]]] = {}
        try:
            self._database = self._opened()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # no place for one
                raise
            self._remove()
            self._database = self._opened()

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
        """Return up to `limit` rollouts after a cursor, in about a second at most, whatever is indexed."""
        return self._asked(lambda: self._page(wanted, _Position.of(cursor), limit))

    def row(self, identity: str) -> Row:
        """Return one rollout as its file has it. Raises `MissingError`, and `CorruptError` for a damaged file."""
        match = _ID.fullmatch(identity)
        if match is None:
            raise MissingError(
                f"{identity[:80]!r} is no rollout's id", want="an id from a list of rollouts"
            )
        path = self._directory / f"{match[1]}.jsonl.gz"
        try:
            line = self._block(path, _mark(path), int(match[2])).lines[int(match[3])]
        except (FileNotFoundError, IndexError) as error:
            raise MissingError(
                f"the rollout {identity} is not there any more",
                have="what tracking.rollouts_keep_gb has room for, as the last start of the run wrote it",
                do="choose one that is listed",
            ) from error
        return parse_rollout(line, f"{path}, in the block at byte {match[2]},")

    def facets(self, kind: Kind | None = None) -> dict[str, Any]:
        """Return what there is to filter by: steps, sources, and how rewards and lengths are distributed.

        Distributions of many rollouts come from a sample of steps.
        """
        self._look()
        return self._asked(lambda: self._found_facets(kind or self.kind()))

    def kind(self) -> Kind:
        """Return the kind of rollouts that there are; "step" if both."""
        self._look()
        kinds = {_kind_and_step(first)[0] for first in self._listed}
        return "validation" if kinds == {"validation"} else "step"

    def _look(self) -> None:
        """See which files are there, unless that was just done; start the thread if some are not indexed."""
        with self._looking:
            begun = time.monotonic()
            if begun < self._next_look:
                return
            try:
                changed = self._directory.stat().st_mtime_ns
            except FileNotFoundError:
                changed = 0
            if changed != self._changed_at or time.time_ns() - changed < _RECENT_NS:
                self._asked(self._list)
                self._changed_at = changed
            took = time.monotonic() - begun
            self._next_look = begun + max(_LOOK_SECONDS, took / _LOOK_SHARE)
            if self._pending and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def _list(self) -> None:
        found: dict[int, dict[bool, tuple[str, str]]] = {}
        for kind, step, is_rest, path in named_rollouts(self._directory):
            with suppress(FileNotFoundError):
                if step <= LAST_STEP:
                    found.setdefault(_first(kind, step), {})[is_rest] = (path.name, _mark(path))
        listed = {first: _Group(first, files) for first, files in found.items()}
        with self._lock:
            known = dict(self._database.execute("SELECT first, files FROM groups"))
            if gone := known.keys() - listed.keys():
                with self._writing():
                    for first in gone:
                        self._drop(first)
            self._listed = listed
            self._pending = sorted(f for f, g in listed.items() if known.get(f) != g.signature)

    def _work(self) -> None:
        """Index everything, newest first, whenever no request waits. For the thread."""
        try:
            while self._pending and not self._is_closed:
                if self._requests:
                    time.sleep(_YIELD_SECONDS)
                else:
                    self._asked(self._index_next, is_request=False)
        except BurnishError as error:
            _log.warning("%s", error)

    def _index_next(self) -> None:
        with suppress(IndexError):  # a request was faster
            self._index(self._pending[0])

    def _index(self, first: int) -> None:
        """Put a group into the index, unless another viewer has."""
        if (group := self._listed.get(first)) is not None:
            with self._lock:
                query = "SELECT count(*) FROM groups WHERE first = ? AND files = ?"
                (is_there,) = self._database.execute(query, (first, group.signature)).fetchone()
            if not is_there:
                rows, problem = self._read(group)
                with self._lock, self._writing():
                    self._drop(first)
                    self._insert(group, rows, problem)
        with self._lock:
            place = bisect_left(self._pending, first)
            if self._pending[place : place + 1] == [first] and self._listed.get(first) == group:
                del self._pending[place]

    def _drop(self, first: int) -> None:
        ids = (first, first + _SEQUENCES)
        self._database.execute("DELETE FROM rollouts WHERE id BETWEEN ? AND ?", ids)
        self._database.execute("DELETE FROM groups WHERE first = ?", (first,))

    def _insert(self, group: _Group, rows: list[_Facts], problem: str | None) -> None:
        sources, numbers = Counter(row.source for row in rows), {}
        for name in sources:
            self._database.execute("INSERT OR IGNORE INTO sources(name) VALUES (?)", (name,))
            found = self._database.execute("SELECT id FROM sources WHERE name = ?", (name,))
            (numbers[name],) = found.fetchone()
        rewards = [row.reward for row in rows if math.isfinite(row.reward) and row.reward != _NAN]
        ranges: dict[str, list[float]] = {"reward": rewards, "length": [r.length for r in rows]}
        summary = {name: [min(each), max(each)] for name, each in ranges.items() if each}
        rows.sort()
        self._database.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?)",
            (
                (
                    group.first + i,
                    row.place,
                    row.prompt,
                    row.reward,
                    row.length,
                    numbers[row.source],
                )
                for i, row in enumerate(rows)
            ),
        )
        text = json.dumps({**summary, "sources": sources})
        whole = (group.first, group.signature, len(rows), text, problem)
        self._database.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?)", whole)

    def _read(self, group: _Group) -> tuple[list[_Facts], str | None]:
        """Return the facts of a group's rollouts, and what is wrong with one of its files."""
        found: list[_Facts] = []
        problem = None
        for is_rest, (name, _) in group.files.items():
            path = self._directory / name
            try:
                for start, text in blocks(path):
                    for number, line in enumerate(text.splitlines(keepends=True)):
                        place = is_rest << 62 | start << _LINE_BITS | number
                        try:
                            found.append(_facts(line, place, f"{path}, at byte {start},"))
                        except CorruptError as error:
                            problem = error.problem
            except FileNotFoundError:  # removed, as old ones are
                continue
            except CorruptError as error:
                problem = error.problem
            except OSError as error:
                problem = f"{path} cannot be read: {error.strerror}"
        return found[: _SEQUENCES + 1], problem

    def _page(self, wanted: RolloutFilter, position: _Position, limit: int) -> RolloutPage:
        self._look()
        deadline = time.monotonic() + (_SEARCH_SECONDS if wanted.text else _PAGE_SECONDS)
        needle, is_first = wanted.text.casefold(), position.number is None
        found: list[tuple[str, Row]] = []
        in_span = self._rows(*wanted.span)
        following: _Position | None = None
        with closing(self._candidates(wanted, position, in_span, deadline)) as candidates:
            for each in candidates:
                if each.place is None:
                    following = _Position(each.number, each.value, position.examined)
                    break
                if len(found) == limit or (needle and time.monotonic() > deadline):
                    following = position
                    break
                position = _Position(each.number, each.value, position.examined + 1)
                if (row := self._matching(each.number, each.place, needle)) is not None:
                    found.append(row)
        total = self._count(wanted, in_span) if is_first and not needle else None
        share = 1.0 if following is None else min(1.0, position.examined / max(1, in_span))
        return RolloutPage(found, None if following is None else str(following), total, share)

    def _candidates(
        self, wanted: RolloutFilter, after: _Position, in_span: int, deadline: float
    ) -> Generator[_Candidate]:
        """Yield rollouts that fulfil all but the text, in order; index what they are among while there is time."""
        (low, high), descends = wanted.span, wanted.descends
        if wanted.column != "id":
            while (first := self._next_pending(low, high)) is not None:
                if time.monotonic() > deadline:
                    break
                self._index(first)
            yield from self._selected(wanted, low, high, after, in_span)
            return
        if after.number is not None:
            low, high = (low, after.number - 1) if descends else (after.number + 1, high)
        while True:
            # What is indexed before a group that is not can be told; the rest has to wait for it.
            first = self._next_pending(low, high, from_end=descends)
            if first is None:
                yield from self._selected(wanted, low, high, None, in_span)
                return
            if descends:
                yield from self._selected(wanted, first + _SEQUENCES + 1, high, None, in_span)
                high = first + _SEQUENCES
            else:
                yield from self._selected(wanted, low, first - 1, None, in_span)
                low = first
            if time.monotonic() > deadline:
                yield _Candidate(high + 1 if descends else low - 1)
                return
            self._index(first)

    def _next_pending(self, low: int, high: int, *, from_end: bool = False) -> int | None:
        """Return the first group with numbers in a range that is not indexed; the last one `from_end`."""
        with self._lock:
            start = bisect_right(self._pending, low - _SEQUENCES - 1)
            stop = bisect_right(self._pending, high)
            return self._pending[stop - 1 if from_end else start] if start < stop else None

    def _selected(
        self, wanted: RolloutFilter, low: int, high: int, after: _Position | None, in_span: int
    ) -> Iterator[_Candidate]:
        column, way = wanted.column, "DESC" if wanted.descends else "ASC"
        beyond = "<" if wanted.descends else ">"
        index = "NOT INDEXED"
        if wanted.prompt is not None:
            index = "INDEXED BY by_prompt"
        elif column == "id" and wanted.source is not None:
            index = "INDEXED BY by_source"
        elif column != "id" and in_span > _SORTED_AT_ONCE:
            index = f"INDEXED BY by_{column}"
        parts: list[dict[str, Any]] = [{}]
        if after is not None and after.number is not None:
            same = {f"{column} = ?": after.value, f"id {beyond} ?": after.number}
            parts = [same, {f"{column} {beyond} ?": after.value}]
        for part in parts:
            where = {"id >= ?": low, "id <= ?": high, **wanted.conditions, **part}
            query = f"SELECT id, place, {column} FROM rollouts {index} WHERE {' AND '.join(where)}"
            with closing(self._reader()) as reader:
                order = f" ORDER BY {column} {way}, id {way}"
                yield from map(_Candidate._make, reader.execute(query + order, [*where.values()]))

    def _matching(self, number: int, place: int, needle: str) -> tuple[str, Row] | None:
        """Return a rollout and its id, if its text contains `needle`; None also if it is gone."""
        first = number & ~_SEQUENCES
        start, line = place >> _LINE_BITS & (1 << 40) - 1, place & (1 << _LINE_BITS) - 1
        try:
            name, mark = self._listed[first].files[bool(place >> 62)]
            block = self._block(self._directory / name, mark, start)
            if not block.may_have(needle):
                return None
            row = parse_rollout(block.lines[line], name)
        except (KeyError, IndexError, OSError, CorruptError):  # it changed since it was indexed
            return None
        texts = (str(row["prompt"]), str(row["completion"]))
        if needle and not any(needle in text.casefold() for text in texts):
            return None
        kind, step = _kind_and_step(number)
        return f"{name.removesuffix('.jsonl.gz')}:{start}:{line}", {
            **row,
            "kind": kind,
            "step": step,
        }

    def _read_block(self, path: Path, mark: str, start: int) -> _Block:
        with closing(blocks(path, start)) as found:
            for _, data in found:
                return _Block(data)
        raise IndexError(start)

    def _rows(self, low: int, high: int) -> int:
        with closing(self._reader()) as reader:
            query = "SELECT coalesce(sum(rows), 0) FROM groups WHERE first BETWEEN ? AND ?"
            return int(reader.execute(query, (low, high)).fetchone()[0])

    def _count(self, wanted: RolloutFilter, in_span: int) -> int | None:
        """Return how many rows fulfil everything; None if that takes long, or if not all are indexed."""
        low, high = wanted.span
        if self._next_pending(low, high) is not None:
            return None
        if not (conditions := wanted.conditions):
            return in_span
        where = {"id >= ?": low, "id <= ?": high, **conditions}
        deadline = time.monotonic() + _COUNT_SECONDS
        with closing(self._reader()) as reader:
            reader.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            try:
                query = f"SELECT count(*) FROM rollouts WHERE {' AND '.join(where)}"
                return int(reader.execute(query, [*where.values()]).fetchone()[0])
            except sqlite3.OperationalError:
                return None

    def _found_facets(self, kind: Kind) -> dict[str, Any]:
        state = (self._changed_at, len(self._pending))
        if kind in self._facets and self._facets[kind][0] == state:
            return self._facets[kind][1]
        steps: dict[Kind, list[int]] = {"step": [], "validation": []}
        for first in sorted(self._listed, reverse=True):
            of, step = _kind_and_step(first)
            steps[of].append(step)
        trained = steps["step"]
        low, high = RolloutFilter(kind).span
        with closing(self._reader()) as reader:
            query = "SELECT first, rows, summary, problem FROM groups WHERE first BETWEEN ? AND ?"
            groups = reader.execute(query, (low, high)).fetchall()
            summaries = [json.loads(summary) for *_, summary, _ in groups]
            sources = sum((Counter(each["sources"]) for each in summaries), Counter[str]())
            rows = sum(count for _, count, *_ in groups)
            sampled = groups[:: -(-rows // _SAMPLED) or 1]
            values: list[tuple[float, int]] = []
            for first, *_ in sampled:
                query = "SELECT reward, length FROM rollouts WHERE id BETWEEN ? AND ?"
                values += reader.execute(query, (first, first + _SEQUENCES))
        ranges = {
            name: [each[name] for each in summaries if name in each]
            for name in ("reward", "length")
        }
        columns = {"reward": [v for v, _ in values], "length": [float(v) for _, v in values]}
        found = {
            "kind": kind,
            "steps": [trained[0], trained[-1], len(trained)] if trained else None,
            "validations": steps["validation"],
            "sources": sources.most_common(),
            **{name: _distribution(ranges[name], columns[name], rows) for name in ranges},
            "rows": rows,
            "indexed": round(1 - len(self._pending) / max(1, len(self._listed)), 4),
            "problems": [problem for *_, problem in groups if problem],
        }
        self._facets[kind] = (state, found)
        return found

    def _asked(self, call: Callable[[], T], *, is_request: bool = True) -> T:
        """Call; while requests are answered the thread waits. A broken index is made again, once."""
        with self._lock:
            self._requests += is_request
        try:
            try:
                return call()
            except sqlite3.DatabaseError as error:
                _log.warning("%s is made again: %s", self._path, error)
                with self._lock:
                    self._database.close()
                    self._remove()
                    self._database = self._opened()
                    self._list()
                return call()
        except (sqlite3.Error, OSError) as error:
            raise BurnishError(
                f"the index {self._path} cannot be used",
                have=error,
                do="make room there, or let BURNISH_CACHE name a directory that can be written",
            ) from error
        finally:
            with self._lock:
                self._requests -= is_request

    def _opened(self) -> sqlite3.Connection:
        database = self._connection()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            database.close()
            self._remove()
            database = self._connection()
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with suppress(sqlite3.OperationalError):  # another viewer makes it
            if database.execute("PRAGMA user_version").fetchone() == (0,):
                database.executescript(_SCHEMA)
        return database

    def _connection(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _reader(self) -> sqlite3.Connection:
        reader = self._connection()
        reader.execute("PRAGMA query_only = 1")
        return reader

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _first(kind: Kind, step: int) -> int:
    """Return the first number of a step's rollouts."""
    return ((kind == "validation") << _STEP_BITS | LAST_STEP - step) << _SEQUENCE_BITS


def _kind_and_step(number: int) -> tuple[Kind, int]:
    is_validation, later = divmod(number >> _SEQUENCE_BITS, 1 << _STEP_BITS)
    return ("validation" if is_validation else "step"), LAST_STEP - later


def _mark(path: Path) -> str:
    state = path.stat()
    return f"{state.st_size}:{state.st_mtime_ns}"


def _facts(line: bytes, place: int, where: str) -> _Facts:
    row = parse_rollout(line, where)
    try:
        prompt, sample = _fitting(row["prompt_index"]), _fitting(row.get("sample") or 0)
        length, reward = _fitting(row.get("length") or 0), float(row["reward"])
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{where} has a rollout whose numbers are none", have=error) from error
    source = _plain(str(row.get("source") or "")) or ""
    return _Facts(prompt, sample, place, _NAN if math.isnan(reward) else reward, length, source)


def _fitting(value: Any) -> int:
    """Return an integer that SQLite can hold. Raises `ValueError`, `TypeError` or `OverflowError`."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"{str(number)[:40]} is too large a number")
    return number


def _plain(text: str | None) -> str | None:
    """Return text that SQLite can hold: lone surrogates are escaped."""
    return text and text.encode("utf-8", "backslashreplace").decode()


def _distribution(ranges: list[list[float]], values: list[float], rows: int) -> list[Any] | None:
    """Return lowest and highest value and a histogram between them, in rollouts."""
    if not ranges:
        return None
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    finite = [value for value in values if low <= value <= high]
    width = (high - low) / _BINS or 1.0
    if not math.isfinite(width):
        return [low, high, None]
    bins = Counter(min(_BINS - 1, int((value - low) / width)) for value in finite)
    scale = rows / len(values) if values else 1.0
    return [low, high, [round(bins[number] * scale) for number in range(_BINS)]]
