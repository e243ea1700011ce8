"""What the server says about the runs below a directory: one method a path of `/api/`."""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, cast, get_args

from burnish.checkpoint.destinations.remote_steps import RemotePath, RemoteSteps
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.files.cache import cache_root
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage, Source
from burnish.files.urls import Url
from burnish.tracking.rollouts import Kind, Row
from burnish.tracking.rundir import STATUS, RunDirectory
from burnish.tracking.trackers import json_number
from burnish.view.curves import Curves
from burnish.view.index import LAST_STEP, RolloutFilter, RolloutIndex, Sort
from burnish.view.runs import (
    VALIDATIONS,
    RunFacts,
    beside,
    describe,
    find_runs,
    list_steps,
    settings_of,
)

Values = Mapping[str, Any]
Answer = dict[str, Any]

_SHOWN = ("reward/mean", "train/loss", *VALIDATIONS)
_TIMING = "timing_s/"
_WALK_SECONDS, _TAIL_BYTES, _CURVES_HELD = 2.0, 1 << 19, 16
# Least time between two searches for runs, how much of its metrics a list reads of each, and how many runs' are held whole.
_PREVIEW, _MOST_ROWS, _MOST_POINTS, _MOST_LINES = 300, 500, 10_000, 10_000
_LOG = re.compile(r"rank-(\d{1,6})\.log(?:\.(\d{1,3}))?")
_LOG_BYTES, _TEXT_BYTES = 1 << 18, 4 << 20
_NETWORKS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "afs"}
# File systems on which SQLite's shared memory does not work between machines.


class Query:
    """The values of a request, each asked for by name. Raises `UsageError` for one that cannot be."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def all(self, name: str) -> list[str]:
        """Return every value."""
        return list(self._values.get(name, ()))

    def text(self, name: str) -> str | None:
        """Return the last value; None for none, or an empty one."""
        return (self.all(name) or [""])[-1] or None

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer of at most 62 bits."""
        value: int | None = self._parsed(name, int)
        if value is not None and abs(value) >= 1 << 62:
            raise _refused(name, value)
        return default if value is None else value

    def count(self, name: str, default: int, most: int) -> int:
        """Return how many are wanted."""
        return max(1, min(self.integer(name) or default, most))

    def number(self, name: str) -> float | None:
        """Return a number; infinities are some."""
        value: float | None = self._parsed(name, float)
        if value is not None and math.isnan(value):
            raise _refused(name, value)
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return one of the choices."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise _refused(name, value, f"one of {', '.join(choices)}")
        return value

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> Any:
        if (text := self.text(name)) is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise _refused(name, text, "a number") from error


def _refused(name: str, value: object, want: str = "a number that can be") -> UsageError:
    return UsageError(f"{name} cannot be {str(value)[:80]!r}", want=want, do="correct the address")


class Answers:
    """The runs at and below `root`, of which indices and curves are kept. Threads may share it.

    `mirror` is the URL that `root` is a copy of.
    """

    def __init__(self, root: Path, mirror: str | None = None) -> None:
        self.root, self._mirror = root.resolve(), mirror
        self.name = mirror or str(root)
        self._lock = threading.Lock()
        self._curves: dict[Path, Curves] = {}
        self._tails: dict[Path, Curves] = {}
        self._indices: dict[Path, RolloutIndex] = {}
        self._found: tuple[float, list[Path]] = (-math.inf, [])

    def close(self) -> None:
        """Close the indices."""
        for index in self._indices.values():
            index.close()

    def found(self) -> list[Path]:
        """Return the directories of runs, as of at most two seconds ago."""
        with self._lock:
            if time.monotonic() - self._found[0] > _WALK_SECONDS:
                self._found = (time.monotonic(), find_runs(self.root))
            return self._found[1]

    def id_of(self, path: Path) -> str:
        """Return a run's id."""
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def runs(self, query: Query) -> Answer:
        """Return the list of runs, newest first."""
        rows = []
        for path in reversed(self.found()):
            facts = self._facts(path)
            last = {
                name: json_number(values[-1]) for name, values in facts.values.items() if values
            }
            validation = next((name for name in VALIDATIONS if name in last), None)
            rows.append(
                {
                    "run": self.id_of(path),
                    "name": self.id_of(path) or path.name,
                    **{n: getattr(facts, n) for n in ("kind", "state", "step", "of", "started")},
                    "updated": facts.updated,
                    "reward": last.get("reward/mean"),
                    "loss": last.get("train/loss"),
                    "validation": last.get(validation or ""),
                    "validation_name": validation,
                    "model": facts.model,
                    "error": facts.error and facts.error.problem,
                }
            )
        return {"root": self.name, "runs": rows}

    def _facts(self, path: Path) -> RunFacts:
        run = RunDirectory(path)
        try:
            for each in (run.config, run.environment, path / STATUS, run.metrics):
                self._within(each)
        except BurnishError as error:
            return RunFacts(error=error)
        curves = self._tails.setdefault(path, Curves(run.metrics, _TAIL_BYTES))
        curves.refresh()
        return describe(run, curves, _SHOWN, is_copy=self._mirror is not None)

    def metrics(self, query: Query) -> Answer:
        """Return curves, or the names of all, of each run."""
        names = [name for text in query.all("names") for name in text.split(",") if name]
        most = query.count("points", 1000, _MOST_POINTS)
        first, last = query.integer("from", 0) or 0, query.integer("to", 1 << 62) or 0
        found: Answer = {}
        for run, directory in self._named(query).items():
            curves = self._read(directory)
            if not names:
                found[run] = {
                    "names": list(curves.by_name),
                    "last_step": curves.last_step,
                    "problem": curves.problem and curves.problem.problem,
                }
            else:
                there = [name for name in names if name in curves.by_name]
                found[run] = {n: curves.by_name[n].points(most, first, last) for n in there}
        return found

    def rollouts(self, query: Query) -> Answer:
        """Return a page of rollouts."""
        index = self._index(self._one(query))
        step = query.integer("step")
        first, last = query.integer("from_step", step), query.integer("to_step", step)
        wanted = RolloutFilter(
            cast(Kind, query.choice("kind", get_args(Kind))) or index.kind(),
            first or 0,
            LAST_STEP if last is None else last,
            prompt=query.integer("prompt"),
            source=query.text("source"),
            text=query.text("text") or "",
            min_reward=query.number("min_reward"),
            max_reward=query.number("max_reward"),
            min_length=query.integer("min_length"),
            max_length=query.integer("max_length"),
            sort=cast(Sort, query.choice("sort", get_args(Sort)) or "place"),
        )
        limit = query.count("limit", 50, _MOST_ROWS)
        page = index.page(wanted, query.text("cursor"), limit)
        rows = [_previewed(identity, row) for identity, row in page.rows]
        return {"rows": rows, "next": page.next, "total": page.total, "scanned": page.scanned}

    def rollout(self, query: Query) -> Answer:
        """Return a whole rollout."""
        identity = query.text("id") or ""
        row = self._index(self._one(query)).row(identity)
        kind = identity.partition("-")[0]
        return {"tokens": None, "trace": None, **row, "id": identity, "kind": kind}

    def facets(self, query: Query) -> Answer:
        """Return what rollouts can be filtered by."""
        kind = cast("Kind | None", query.choice("kind", get_args(Kind)))
        return self._index(self._one(query)).facets(kind)

    def timeline(self, query: Query) -> Answer:
        """Return the phases of a step, one after another, from the seconds that each took."""
        curves = self._read(self._one(query)).by_name
        step = query.integer("step", 0)
        timed = {
            name.removeprefix(_TIMING): c for name, c in curves.items() if name.startswith(_TIMING)
        }
        total = timed.pop("step", None)
        seconds = {name: each.at(step or 0) for name, each in timed.items()}
        spans = _laid({name: value for name, value in seconds.items() if value is not None})
        ranks = [{"rank": 0, "spans": spans}] if spans else []
        return {"steps": list(total.steps) if total else [], "ranks": ranks}

    def checkpoints(self, query: Query) -> Answer:
        """Return a run's steps with their health."""
        run = self._one(query)
        root: PurePath = run.checkpoints
        source: Source = LocalStorage()
        if self._mirror is not None:
            if self._mirror.startswith("hf:"):
                return {"steps": [], "latest": None, "problem": None}
            url = Url.parse(self._mirror).below(self.id_of(run.root)).below(run.checkpoints.name)
            root, source = RemotePath.of(url), RemoteSteps(Remote(url))
        else:
            self._within(run.checkpoints)
        return list_steps(root, source)

    def log(self, query: Query) -> Answer:
        """Return the last lines of a rank's log before an offset, in all of its files."""
        logs = self._one(query).root / "logs"
        names = [path.name for path in logs.iterdir()] if self._within(logs).is_dir() else []
        files = [match for name in names if (match := _LOG.fullmatch(name))]
        ranks = sorted({int(match[1]) for match in files})
        rank = query.integer("rank", 0)
        of_rank = sorted((-int(m[2] or 0), m[0]) for m in files if int(m[1]) == rank)
        paths = [self._within(logs / name) for _, name in of_rank]  # oldest first
        end = sum(path.stat().st_size for path in paths)
        end = max(0, min(end, query.integer("before", end) or 0))
        begin = max(0, end - _LOG_BYTES)
        data = _between(paths, begin, end)
        if begin:  # a line that begins before
            cut = data.find(b"\n") + 1
            begin, data = begin + cut, data[cut:]
        lines = data.splitlines(keepends=True)
        shown = lines[-query.count("lines", 500, _MOST_LINES) :]
        begin = end - sum(map(len, shown))
        texts = [line.decode("utf-8", "replace").rstrip("\r\n") for line in shown]
        return {"ranks": ranks, "lines": texts, "before": begin or None}

    def config(self, query: Query) -> Answer:
        """Return configurations, as texts and setting by setting."""
        runs = self._named(query)
        paths = {run: self._within(directory.config) for run, directory in runs.items()}
        settings = beside([settings_of(directory.root) for directory in runs.values()])
        return {
            "text": {run: _text(path) for run, path in paths.items()},
            "settings": [{"setting": n, "values": values} for n, values in settings.items()],
            "different": [n for n, v in settings.items() if any(each != v[0] for each in v)],
        }

    def environment(self, query: Query) -> Answer:
        """Return where a run's last start ran, how it is, and what its code had beyond the commit."""
        run = self._one(query)
        for path in (run.environment, run.root / STATUS, run.diff):
            self._within(path)
        diff = _text(run.diff) if run.diff.exists() else None
        return {"environment": run.read_environment(), "status": run.read_status(), "diff": diff}

    def steps(self) -> dict[str, tuple[int, int]]:
        """Return size and time of each run's metrics, by id, to see which grow."""
        found = {}
        for path in self.found():
            metrics = RunDirectory(path).metrics
            if metrics.exists():
                state = metrics.stat()
                found[self.id_of(path)] = (state.st_size, state.st_mtime_ns)
        return found

    def last_step(self, run: str) -> int:
        """Return the last step of a run that `steps` knows."""
        return self._facts(self.root / run).step

    def _one(self, query: Query) -> RunDirectory:
        return next(iter(self._named(query).values()))

    def _named(self, query: Query) -> dict[str, RunDirectory]:
        """Return the runs that a request names, by id. Raises `MissingError`."""
        return {run: self._run(run) for run in query.all("run") or [""]}

    def _run(self, run: str) -> RunDirectory:
        parts = PurePath(run).parts
        path = self.root / run
        is_below = "\0" not in run and ".." not in parts and path.is_relative_to(self.root)
        if is_below and path.resolve() == path and (path / "environment.json").is_file():
            return RunDirectory(path)
        raise MissingError(
            f"there is no run {run[:200]!r} in {self.name}",
            want="the path of a run's directory below it, without links",
            do="choose one of the list",
        )

    def _within(self, path: Path) -> Path:
        """Return the path of a file or directory, if it is one and no link leads out. Raises `UsageError`."""
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is no file", have="a pipe or a device")
        if not path.resolve().is_relative_to(self.root):
            raise UsageError(
                f"{path} leads out of {self.root}",
                have=f"a link to {path.resolve()}",
                do="view a directory that holds both",
            )
        return path

    def _read(self, run: RunDirectory) -> Curves:
        with self._lock:
            curves = self._curves.pop(run.root, None) or Curves(self._within(run.metrics))
            self._curves[run.root] = curves
            if len(self._curves) > _CURVES_HELD:  # the one that was asked for longest ago
                del self._curves[next(iter(self._curves))]
        curves.refresh()
        return curves

    def _index(self, run: RunDirectory) -> RolloutIndex:
        with self._lock:
            if run.root not in self._indices:
                self._indices[run.root] = open_index(self._within(run.rollouts), run.root)
            return self._indices[run.root]


def open_index(rollouts: Path, run: Path) -> RolloutIndex:
    """Return the index beside a run's files, or in the cache where it cannot be. Raises `BurnishError`."""
    cached = cache_root() / "view" / f"{sha256(str(run).encode()).hexdigest()[:24]}.sqlite"
    error: Exception | None = None
    for path in (*([] if _is_on_network(run) else [run / ".index.sqlite"]), cached):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return RolloutIndex(rollouts, path)
        except (OSError, sqlite3.OperationalError) as refused:
            error = refused
    raise BurnishError(
        f"there is no place for the index of {run}",
        have=f"{cached}: {error}",
        do="let BURNISH_CACHE name a directory that can be written",
    ) from error


def _is_on_network(path: Path) -> bool:
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:  # not Linux
        return False
    holding = [(len(place), kind) for _, place, kind, *_ in mounts if path.is_relative_to(place)]
    return max(holding, default=(0, ""))[1].removeprefix("fuse.") in _NETWORKS


def _previewed(identity: str, row: Row) -> Answer:
    names = ("kind", "step", "prompt_index", "sample", "reward", "length", "stop_reason", "source")
    return {
        "id": identity,
        **{name: row.get(name) for name in (*names, "advantage")},
        "prompt": str(row["prompt"])[:_PREVIEW],
        "completion": str(row["completion"])[:_PREVIEW],
        "has_tokens": bool(row.get("tokens")),
        "error": bool(row.get("reward_error")),
    }


def _laid(seconds: Mapping[str, float]) -> list[Answer]:
    """Return spans whose parts stand inside them, one after another."""
    spans, ends = [], dict[str, float]()
    for name in sorted(seconds, key=lambda name: name.count("/")):
        parent, took = name.rpartition("/")[0], seconds[name]
        start = ends.get(parent, 0.0)
        spans.append({"name": name, "start": start, "seconds": took, "depth": name.count("/")})
        ends[parent], ends[name] = start + took, start
    return spans


def _between(paths: Sequence[Path], begin: int, end: int) -> bytes:
    """Return bytes of files that follow each other."""
    parts, place = [], 0
    for path in paths:
        size = path.stat().st_size
        first, last = max(begin - place, 0), min(end - place, size)
        if first < last:
            with path.open("rb") as file:
                file.seek(first)
                parts.append(file.read(last - first))
        place += size
    return b"".join(parts)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_TEXT_BYTES).decode("utf-8", "replace")
