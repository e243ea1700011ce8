"""Index the newest rollouts of a run in memory, so that the page can filter and sort them.

Older steps are read when a page comes to them. Nothing is written.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from burnish.errors import CorruptError, MissingError, UsageError
from burnish.tracking.rollouts import MARGIN, Kind, Row, blocks, named_rollouts, parse_rollout
from burnish.tracking.rundir import plain

NEWEST_STEPS = 400
"""Steps that are read in advance, and that an order by reward, length or margin covers."""
LAST_STEP = 10**18 - 1
"""The last step that can be named."""

_Sort = Literal["place", "step", "reward", "-reward", "length", "-length", "margin", "-margin"]
"""Orders of rollouts: "place" is newest first, "step" is the reverse."""
_Position = tuple[float, int, int, int, int, int, int]
"""A rollout's value in the sorted column, or 0, and its place: the first fields of an `IndexedRow`."""

_STEPS_KEPT = 2 * NEWEST_STEPS
_BLOCKS_KEPT = 16
_LISTS_KEPT = 4
# In place of NaN, which has no order.
_NAN = math.nextafter(-math.inf, 0.0)
# Above the number of any prompt that can be asked for.
_BEYOND = 1 << 62
# Most seconds to read steps for an order by reward or length, and to search.
_PAGE_SECONDS = 0.1
_SEARCH_SECONDS = 1.0
# Least seconds between two listings of the directory, and their largest share of time.
_LOOK_SECONDS = 1.0
_LOOK_SHARE = 0.05
_ID = re.compile(r"((?:step|validation)-[0-9]{1,18}(?:\.rest)?):([0-9]{1,12}):([0-9]{1,6})")

Integer = Annotated[int, Field(gt=-_BEYOND, lt=_BEYOND)]
Number = Annotated[float, Field(ge=-math.inf)]  # not NaN


class IndexedRow(NamedTuple):
    """What the index knows of a rollout. Rows sort by place: newest step first, then prompt and sample."""

    later: int
    """Minus the step."""
    prompt: int
    sample: int
    is_rest: int
    """1 if it is in the file with the rest."""
    start: int
    """The offset of its block."""
    line: int
    """Its line in the block."""
    reward: float
    length: int
    source: str
    margin: float
    """See `burnish.tracking.rollouts.MARGIN`; 0 without one."""


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
    def column(self) -> str | None:
        """The column to sort by; None for the order of places."""
        name = self.sort.removeprefix("-")
        return name if name in ("reward", "length", "margin") else None

    @property
    def descends(self) -> bool:
        """Whether the order of the column, or of places, is reversed."""
        return self.sort in ("step", "-reward", "-length", "-margin")

    def position(self, row: IndexedRow) -> _Position:
        """Return what the order compares."""
        value = getattr(row, self.column) if self.column else 0.0
        return (value, *row[:6])

    def select(self, rows: list[IndexedRow]) -> list[IndexedRow]:
        """Return the rows that fulfil all conditions but those on step and text."""
        if (prompt := self.prompt) is not None:
            rows = [row for row in rows if row.prompt == prompt]
        if self.source is not None:
            source = plain(self.source)
            rows = [row for row in rows if row.source == source]
        if self.min_reward is not None or self.max_reward is not None:
            least = -math.inf if self.min_reward is None else self.min_reward
            most = math.inf if self.max_reward is None else self.max_reward
            rows = [row for row in rows if least <= row.reward <= most and row.reward != _NAN]
        if self.min_length is not None or self.max_length is not None:
            shortest = -math.inf if self.min_length is None else self.min_length
            longest = math.inf if self.max_length is None else self.max_length
            rows = [row for row in rows if shortest <= row.length <= longest]
        return rows


class RolloutPage(NamedTuple):
    """A page of rollouts, by id."""

    rows: list[tuple[str, Row]]
    next: str | None
    """The cursor of the rest; None at the end."""
    total: int | None
    """How many rollouts match in the steps that were read: with the first page, if the newest ones were."""
    unread: int
    """How many steps `total` and an order by reward or length leave out."""
    newest: int | None
    """The newest step, by which a page notices later ones."""


class _StepFiles(NamedTuple):
    """The files of a step. A changed file has another mark."""

    step: int
    both: tuple[tuple[str, str] | None, tuple[str, str] | None]
    """Name and mark of that with the chosen rollouts, and of that with the rest."""


class _Step(NamedTuple):
    rows: list[IndexedRow]
    """By place."""
    problem: str | None


_Candidates = Iterator[tuple[_Position, IndexedRow | None]]
"""Rows with their positions. A position alone is between two steps."""


class RolloutIndex:
    """An index of a directory of rollouts, for all threads of a viewer.

    A thread reads the newest steps. Pages in the order of places go through all steps, however many there are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        # By step, the newest first.
        self._listed: dict[Kind, dict[int, _StepFiles]] = {"step": {}, "validation": {}}
        self._steps: dict[_StepFiles, _Step] = {}
        # What the thread is to read, as keys, the most urgent first.
        self._wanted: dict[_StepFiles, None] = {}
        self._next_look = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._block = lru_cache(_BLOCKS_KEPT)(self._read_block)
        # More of a list, and a list that is looked at again, need no new order.
        self._ordered = lru_cache(_LISTS_KEPT)(self._order)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()

    def page(
        self, wanted: RolloutFilter, cursor: str | None = None, limit: int = 50
    ) -> RolloutPage:
        """Return up to `limit` rollouts after a cursor, in about a second at most."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        after = _parse_cursor(cursor)
        self._list_files()
        listed = self._listed[wanted.kind].items()
        steps = {
            step: files for step, files in listed if wanted.from_step <= step <= wanted.to_step
        }
        self._read_soon(steps)
        candidates = self._sorted if wanted.column else self._walk
        needle = wanted.text.casefold()
        page_rows: list[tuple[str, Row]] = []
        last = after
        following = None
        for position, row in candidates(wanted, steps, after):
            if row is None:
                last = position
            is_full = len(page_rows) == limit
            # A page goes on until it has got somewhere, however late it is.
            is_late = last != after and time.monotonic() > deadline
            if is_full or (is_late and (needle or row is None)):
                following = last
                break
            if row is not None:
                last = position
                match = self._match(wanted.kind, steps[-row.later], row, needle)
                page_rows += [match] if match else []
        total = None if cursor or needle else self._count(wanted, steps)
        unread = sum(files not in self._steps for files in steps.values())
        rest = following and ",".join(map(repr, following))
        return RolloutPage(page_rows, rest, total, unread, max(steps, default=None))

    def history(
        self, kind: Kind, prompt: int, between: tuple[int, int], limit: int
    ) -> tuple[list[tuple[int, list[tuple[str, Row]]]], int | None, int]:
        """Return a prompt's rollouts by id for each step, newest first, of up to `limit` steps; the last step of the rest, and their count.

        Takes about a second at most.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        self._list_files()
        first, last = between
        listed = {
            step: files for step, files in self._listed[kind].items() if first <= step <= last
        }
        self._read_soon(listed)
        wanted = RolloutFilter(kind=kind, prompt=prompt)
        history: list[tuple[int, list[tuple[str, Row]]]] = []
        for number, (step, files) in enumerate(listed.items()):
            # A page goes on until it has read a step, however late it is.
            is_late = number > 0 and time.monotonic() > deadline
            if len(history) == limit or is_late:
                return history, step, self._steps_of(wanted, listed)
            rows = wanted.select(self._indexed(files).rows)
            samples = [each for row in rows if (each := self._match(kind, files, row, ""))]
            if samples:
                history.append((step, samples))
        return history, None, self._steps_of(wanted, listed)

    def _steps_of(self, wanted: RolloutFilter, listed: Mapping[int, _StepFiles]) -> int:
        """Return how many of the steps that were read have a rollout that is wanted."""
        return len({row.later for row in self._known(wanted, listed)})

    def steps(self) -> list[int]:
        """Return the steps of training with rollouts, in order."""
        self._list_files()
        return sorted(self._listed["step"])

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
        """Return the values to filter by, the share of the newest steps that was read, and problems with files."""
        self._list_files()
        kind = kind or self.kind()
        listed = self._listed[kind]
        read = [step for files in listed.values() if (step := self._steps.get(files))]
        newest = _newest(listed)
        missing = [files for files in newest if files not in self._steps]
        trained = sorted(self._listed["step"])
        return {
            "kind": kind,
            "steps": [trained[0], trained[-1], len(trained)] if trained else None,
            "validations": sorted(self._listed["validation"]),
            "sources": sorted({row.source for step in read for row in step.rows}),
            "pairs": any(row.margin for step in read for row in step.rows),
            "indexed": 1 - len(missing) / max(1, len(newest)),
            "older": len(listed) - len(newest),
            "problems": [step.problem for step in read if step.problem],
        }

    def kind(self) -> Kind:
        """Return the kind of the rollouts; "step" if there are both."""
        self._list_files()
        return "validation" if self._listed["validation"] and not self._listed["step"] else "step"

    # Files.

    def _list_files(self) -> None:
        """List the files, unless that was just done."""
        with self._lock:
            begun = time.monotonic()
            if begun < self._next_look:
                return
            listing: dict[Kind, dict[int, list[tuple[str, str] | None]]]
            listing = {"step": {}, "validation": {}}
            for kind, step, is_rest, path in named_rollouts(self._directory):
                with suppress(FileNotFoundError):
                    if step <= LAST_STEP:
                        both = listing[kind].setdefault(step, [None, None])
                        both[is_rest] = (path.name, _mark(path))
            self._listed = {
                kind: {
                    step: _StepFiles(step, (chosen, rest))
                    for step, (chosen, rest) in sorted(of_kind.items(), reverse=True)
                }
                for kind, of_kind in listing.items()
            }
            listed = {files for of_kind in self._listed.values() for files in of_kind.values()}
            for files in self._steps.keys() - listed:
                self._steps.pop(files)
            took = time.monotonic() - begun
            self._next_look = begun + max(_LOOK_SECONDS, took / _LOOK_SHARE)
            self._read_soon({})

    def _read_soon(self, steps: Mapping[int, _StepFiles]) -> None:
        """Have the thread read the newest of these steps, and then the newest of all."""
        with self._lock:
            newest = [files for of_kind in self._listed.values() for files in _newest(of_kind)]
            self._wanted = dict.fromkeys([*_newest(steps), *newest])
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_idle and any(files not in self._steps for files in self._wanted):
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while not self._is_closed:
            files = next((each for each in self._wanted if each not in self._steps), None)
            if files is None:
                return
            self._indexed(files)

    def _indexed(self, files: _StepFiles) -> _Step:
        """Return a step. Read it, unless that was done."""
        with self._reading:
            step = self._steps.get(files)
            if step is None:
                step = self._read(files)
                with self._lock:
                    self._steps[files] = step
                    spare = [each for each in self._steps if each not in self._wanted]
                    if len(self._steps) > _STEPS_KEPT and spare:
                        del self._steps[spare[0]]
            return step

    def _read(self, files: _StepFiles) -> _Step:
        rows: list[IndexedRow] = []
        problem = None
        for is_rest, file in enumerate(files.both):
            path = self._directory / file[0] if file else None
            try:
                for start, text in blocks(path) if path else ():
                    for number, line in enumerate(text.splitlines(keepends=True)):
                        place = (-files.step, is_rest, start, number)
                        try:
                            rows.append(_index_row(line, place, f"{path}, at byte {start},"))
                        except CorruptError as error:
                            problem = error.problem
            except CorruptError as error:
                problem = error.problem
            except OSError as error:
                if not isinstance(error, FileNotFoundError):  # a run removes old files
                    problem = f"{path} cannot be read: {error.strerror}"
        rows.sort()
        return _Step(rows, problem)

    def _read_block(self, path: Path, mark: str, start: int) -> list[bytes]:
        with closing(blocks(path, start)) as parts:
            for _, data in parts:
                return data.splitlines(keepends=True)
        raise IndexError(start)

    # Rows.

    def _walk(
        self, wanted: RolloutFilter, steps: Mapping[int, _StepFiles], after: _Position | None
    ) -> _Candidates:
        """Yield rows in the order of places, with their positions, and a position alone between two steps."""
        way = -1 if wanted.descends else 1
        done = None
        for step in sorted(steps, reverse=not wanted.descends):
            if after is not None and way * (step + after[1]) > 0:
                continue  # it was on an earlier page
            if done is not None:
                yield (0.0, -done, way * _BEYOND, 0, 0, 0, 0), None
            rows = wanted.select(self._indexed(steps[step]).rows)
            yield from _in_order(wanted, rows, after)
            done = step

    def _sorted(
        self, wanted: RolloutFilter, steps: Mapping[int, _StepFiles], after: _Position | None
    ) -> _Candidates:
        """Yield rows by a column, of the steps that were read; first read the newest ones while there is time."""
        deadline = time.monotonic() + _PAGE_SECONDS
        for files in _newest(steps):
            if time.monotonic() > deadline:
                break
            self._indexed(files)
        yield from _in_order(wanted, self._known(wanted, steps), after)

    def _known(self, wanted: RolloutFilter, steps: Mapping[int, _StepFiles]) -> list[IndexedRow]:
        """Return the matching rows of the steps that were read, in ascending order."""
        read = tuple(files for files in steps.values() if files in self._steps)
        return self._ordered(wanted.model_copy(update={"text": ""}), read)

    def _order(self, wanted: RolloutFilter, read: tuple[_StepFiles, ...]) -> list[IndexedRow]:
        known = [step for files in read if (step := self._steps.get(files))]
        rows = wanted.select([row for step in known for row in step.rows])
        if wanted.column is not None:
            rows.sort(key=attrgetter(wanted.column))
        return rows

    def _count(self, wanted: RolloutFilter, steps: Mapping[int, _StepFiles]) -> int | None:
        if any(files not in self._steps for files in _newest(steps)):
            return None
        return len(self._known(wanted, steps))

    def _match(
        self, kind: Kind, files: _StepFiles, row: IndexedRow, needle: str
    ) -> tuple[str, Row] | None:
        """Return a rollout and its id, if its text contains `needle`; None also if it is gone."""
        try:
            name, mark = files.both[row.is_rest] or ("", "")
            block = self._block(self._directory / name, mark, row.start)
            rollout = parse_rollout(block[row.line], name)
        except (IndexError, OSError, CorruptError):  # the file has changed
            return None
        texts = (str(rollout["prompt"]), str(rollout["completion"]))
        if needle and not any(needle in text.casefold() for text in texts):
            return None
        rollout["kind"] = kind
        rollout["step"] = files.step
        return f"{name.removesuffix('.jsonl.gz')}:{row.start}:{row.line}", rollout


def _newest(steps: Mapping[int, _StepFiles]) -> list[_StepFiles]:
    return [*steps.values()][:NEWEST_STEPS]


def _in_order(
    wanted: RolloutFilter, rows: list[IndexedRow], after: _Position | None
) -> _Candidates:
    """Yield the sorted rows that come after a position, with theirs."""
    if after is not None and wanted.descends:
        rows = rows[: bisect_left(rows, after, key=wanted.position)]
    elif after is not None:
        rows = rows[bisect_right(rows, after, key=wanted.position) :]
    for row in reversed(rows) if wanted.descends else rows:
        yield wanted.position(row), row


def _mark(path: Path) -> str:
    """Return a text that changes with the file. Raises `FileNotFoundError`, also for a link or a pipe."""
    state = path.lstat()
    if not S_ISREG(state.st_mode):
        raise FileNotFoundError(path)
    return f"{state.st_size}:{state.st_mtime_ns}"


def _parse_cursor(cursor: str | None) -> _Position | None:
    if not cursor:
        return None
    try:
        value, *place = cursor.split(",")
        later, prompt, sample, is_rest, start, line = map(int, place)
        return float(value), later, prompt, sample, is_rest, start, line
    except ValueError as error:
        do = "begin at the first page"
        raise UsageError("cursor: no page ended there", have=cursor[:80], do=do) from error


def reward_part(row: Row, name: str) -> Any:
    """Return a part of a row's reward; None if it has none of this name."""
    parts = row.get("reward_parts")
    return parts.get(name) if isinstance(parts, dict) else None


def _index_row(line: bytes, place: tuple[int, int, int, int], where: str) -> IndexedRow:
    row = parse_rollout(line, where)
    later, is_rest, start, number = place
    try:
        reward = float(row["reward"])
        margin = float(reward_part(row, MARGIN) or 0.0)
        return IndexedRow(
            later,
            int(row["prompt_index"]),
            int(row.get("sample") or 0),
            is_rest,
            start,
            number,
            _NAN if math.isnan(reward) else reward,
            int(row.get("length") or 0),
            sys.intern(plain(str(row.get("source") or ""))),
            _NAN if math.isnan(margin) else margin,
        )
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{where} has a rollout with invalid numbers"
        raise CorruptError(problem, have=error, do="move the file away") from error
