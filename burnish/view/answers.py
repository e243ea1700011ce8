"""Answer questions about the runs below a directory, with one method for each path of `/api/`."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self, cast

from pydantic import Field, ValidationError

from burnish.checkpoint.destinations.remote_steps import RemotePath, RemoteSteps
from burnish.checkpoint.tools.listing import listed_steps
from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, refusing
from burnish.files.remote import Remote
from burnish.files.storage import LOCAL, open_regular
from burnish.files.urls import Url
from burnish.redaction import redacted
from burnish.runs.ending import ending
from burnish.tracking.attention import find_attention
from burnish.tracking.curves import Curve, Curves
from burnish.tracking.rollouts import LABEL, MARGIN, Kind, rollouts_path
from burnish.tracking.rundir import STEPS, RunDirectory
from burnish.tracking.traces import spans_of
from burnish.tracking.trackers import json_number
from burnish.view.index import LAST_STEP, Integer, RolloutFilter, RolloutIndex, reward_part
from burnish.view.log_entries import Level, error_at_end, is_wanted, last_entries
from burnish.view.runs import (
    best_validation,
    describe,
    find_runs,
    is_run_at,
    main_score,
    parent_of,
    settings_of,
    side_by_side,
)

Answer = dict[str, Any]

_VALIDATIONS = ("val/reward", "val/loss")
_SHOWN = ("reward/mean", "train/loss", *_VALIDATIONS)
_TIMING = "timing_s/"
# Steps whose phases are shown beside each other.
_RECENT = 20
# Least seconds between two searches for runs.
_WALK_SECONDS = 2.0
# Bytes of a run's metrics that a list reads, from their end.
_TAIL_BYTES = 1 << 19
# Runs whose metrics are cached.
_CURVES_KEPT = 64
_FACTS = (
    "kind", "of", "model", "reward", "loss", "validation", "validation_name", "error",
    "reason", "started", "ended", "best", "score", "attention",
)  # fmt: skip
"""What a row of the list has besides, where it is known."""
_LISTED = (
    "step",
    "prompt_index",
    "sample",
    "reward",
    "length",
    "stop_reason",
    "source",
    "end",
    "branch",
)
# Characters of a text in a list.
_PREVIEW = 300
# Most characters of a completion in a prompt's history, and what is shown of each.
_WHOLE = 4000
_OF_SAMPLES = ("sample", "reward", "length", "stop_reason", "advantage")
# Most bytes of a text that is shown, and of another file that is read.
_TEXT_BYTES = 4 << 20
_FILE_BYTES = 64 << 20
_NAMES = ("name", "output_dir")
_SECTIONS = ("model", "data", "method", "reward", "algorithm", "optim", "batch", "rollout", "seed", "steps", "epochs", "engine")  # fmt: skip
"""Settings that say where a run lies, and the sections of which two runs differ most tellingly."""
_PROFILE = re.compile(r"step-\d+\.rank-(\d{1,6})\.json\.gz")
_LOG = re.compile(r"rank-(\d{1,6})\.log(?:\.(\d{1,3}))?")


class Query(RolloutFilter):
    """The parameters of a request."""

    run: Sequence[str] = ("",)
    names: Sequence[str] = ()
    id: str = ""
    cursor: str | None = None
    limit: int = Field(50, ge=1, le=500)
    step: Integer | None = None
    first: Integer = Field(0, alias="from")
    last: Integer = Field(LAST_STEP, alias="to")
    points: int = Field(1000, ge=1, le=10_000)
    rank: Integer = 0
    before: Integer | None = None
    lines: int = Field(500, ge=1, le=10_000)
    level: Level = "debug"

    @classmethod
    def of(cls, values: Mapping[str, Sequence[str]]) -> Self:
        """Return an address's parameters: of most names the last value. Raises `UsageError` for an invalid one."""
        last = {name: each[-1] for name, each in values.items() if each[-1]}
        lists = {name: values[name] for name in ("run", "names") if name in values}
        try:
            return cls.model_validate({**last, **lists})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise UsageError(
                f"{wrong['loc'][0]} cannot be {str(wrong['input'])[:80]!r}",
                want=wrong["msg"],
                do="correct the address",
            ) from error


class Answers:
    """Answers about runs at and below `root`, a copy of `url` if given. Threads may share it."""

    def __init__(self, root: Path, url: str | None = None) -> None:
        self.root = root.resolve()
        self._url = url
        self._name = url or str(root)
        self._lock = threading.Lock()
        self._curves = lru_cache(_CURVES_KEPT)(Curves)
        self._tails = lru_cache(None)(partial(Curves, last_bytes=_TAIL_BYTES))
        self._indices: dict[Path, RolloutIndex] = {}
        self._walked: tuple[float, list[Path]] = (-math.inf, [])
        # Of each run, the last step and how much needs attention there.
        self._attention: dict[Path, tuple[int, int]] = {}

    def close(self) -> None:
        """Stop the indices."""
        for index in self._indices.values():
            index.close()

    def runs(self, query: Query) -> Answer:
        """Return the list of runs, newest first."""
        paths = self._paths()
        known = {*paths}
        return {
            "root": self._name,
            "runs": [self._listed(path, parent_of(path, known)) for path in reversed(paths)],
        }

    def _listed(self, path: Path, parent: Path | None) -> Answer:
        name = self._id(path)
        run = RunDirectory(path)
        row: Answer = dict.fromkeys(_FACTS)
        row |= {"run": name, "name": name or path.name, "state": "ended", "step": 0, "updated": 0}
        row["parent"] = None if parent is None else self._id(parent)
        try:
            for file in (run.config, run.environment, run.status, run.metrics):
                self._within(file)
            curves = self._tails(run.metrics).refresh()
            facts = describe(run, curves)
        except BurnishError as error:
            return row | {"error": error.problem}
        except OSError as error:
            return row | {"error": f"{error.filename} cannot be read: {error.strerror}"}
        except Exception as error:  # noqa: BLE001 - one run does not hide the others
            return row | {"error": f"{path} cannot be read: {type(error).__name__}: {error}"}
        last = {n: json_number(v[-1]) for n in _SHOWN if (v := curves.finite(n))}
        validation = next((name for name in _VALIDATIONS if name in last), None)
        score = parent and main_score(curves)
        return {
            **row,
            **facts,
            "reward": last.get("reward/mean"),
            "loss": last.get("train/loss"),
            "validation": validation and last[validation],
            "validation_name": validation,
            "best": best_validation(curves) if curves.is_whole else None,
            "attention": self._attention_count(path, curves, facts["of"]),
            "score": score and {"name": score[0], "value": json_number(score[1])},
        }

    def _attention_count(self, path: Path, curves: Curves, steps: Any) -> int:
        """Return how much needs attention, without the settings of the run, which take long to read."""
        known = self._attention.get(path)
        if not curves.is_whole:
            return 0
        if known is None or known[0] != curves.last_step:
            total = {"steps": steps if isinstance(steps, int) else None}
            known = curves.last_step, len(find_attention(dict(curves.by_name), total))
            self._attention[path] = known
        return known[1]

    def attention(self, query: Query) -> Answer:
        """Return what needs attention in a run, with the settings that help."""
        run = self._one(query)
        curves = self._read(run)
        self._within(run.config)
        settings: Answer = {}
        with suppress(BurnishError, OSError):
            settings = settings_of(run.root)
        with suppress(BurnishError, OSError):
            steps = run.read_status().get(STEPS) or settings.get("steps")
            settings["steps"] = steps if isinstance(steps, int) else None
        items = find_attention(dict(curves.by_name), settings)
        return {"items": [each._asdict() for each in items]}

    def metrics(self, query: Query) -> Answer:
        """Return each run's curves, or without names the names of all."""
        names = [name for text in query.names for name in text.split(",") if name]
        span = query.points, query.first, query.last
        answer: Answer = {}
        for run, directory in self._named(query).items():
            curves = self._read(directory)
            known = curves.by_name
            problem = curves.problem and curves.problem.problem
            about = {"names": list(known), "last_step": curves.last_step, "problem": problem}
            shown = {name: known[name].points(*span) for name in names if name in known}
            answer[run] = shown if names else about
        return answer

    def rollouts(self, query: Query) -> Answer:
        """Return a page of rollouts."""
        index = self._index(self._one(query))
        asked = query.model_dump(include={*RolloutFilter.model_fields})
        if "kind" not in query.model_fields_set:
            asked["kind"] = index.kind()
        if query.step is not None:
            asked |= {"from_step": query.step, "to_step": query.step}
        wanted = RolloutFilter(**asked)
        page = index.page(wanted, query.cursor, query.limit)
        rows = [
            {
                "id": identity,
                **{name: row.get(name) for name in _LISTED},
                "prompt": str(row["prompt"])[:_PREVIEW],
                "completion": str(row["completion"])[:_PREVIEW],
                "error": bool(row.get("reward_error")),
                "turns": _turns(row.get("conversation")),
                **{name: reward_part(row, name) for name in (MARGIN, LABEL)},
            }
            for identity, row in page.rows
        ]
        return page._asdict() | {"rows": rows}

    def rollout(self, query: Query) -> Answer:
        """Return a whole rollout, with the spans of its trace if it has one."""
        run = self._one(query)
        row = self._index(run).row(query.id)
        kind = cast(Kind, query.id.split("-")[0])
        path = self._within(rollouts_path(run.traces, row["step"], kind))
        trace: Answer | None = None
        try:
            if spans := spans_of(path, {"sample": 0, **row}):
                trace = {"spans": spans}
        except FileNotFoundError:
            pass
        except CorruptError as error:
            trace = {"problem": error.problem}
        answer = {"tokens": None, **row, "id": query.id, "kind": kind, "trace": trace}
        if "columns" not in row:  # which only some rows of a step have
            with suppress(TypeError, ValueError, OverflowError):
                step = int(row["step"])
                prompt = int(row["prompt_index"])
                history, _, _ = self._index(run).history(kind, prompt, (step, step), 1)
                others = (other for _, rows in history for _, other in rows)
                answer["columns"] = next((o["columns"] for o in others if "columns" in o), {})
        return answer

    def facets(self, query: Query) -> Answer:
        """Return the values that can filter rollouts, and which steps have none."""
        kind = query.kind if "kind" in query.model_fields_set else None
        run = self._one(query)
        index = self._index(run)
        return index.facets(kind) | {"written": _written(index.steps(), self._read(run).last_step)}

    def prompt(self, query: Query) -> Answer:
        """Return what one prompt's samples were at each step, the newest step first."""
        run = self._one(query)
        index = self._index(run)
        kind = query.kind if "kind" in query.model_fields_set else index.kind()
        # A cursor is the step to go on from.
        cursor = query.cursor or ""
        last = min(query.to_step, int(cursor)) if cursor.isdecimal() else query.to_step
        steps = query.from_step, last
        history, following, total = index.history(kind, query.prompt or 0, steps, query.limit)
        newest = history[0][1][0][1] if history else {}
        history = [
            (step, [(identity, row) for identity, row in rows if not row.get("branch")])
            for step, rows in history
        ]
        return {
            "kind": kind,
            "prompt_index": query.prompt or 0,
            **{name: newest.get(name) for name in ("prompt", "answer", "source")},
            "steps": [
                {
                    "step": step,
                    "mean": _mean([row["reward"] for _, row in rows]),
                    "samples": [
                        {
                            "id": identity,
                            **{name: row.get(name) for name in _OF_SAMPLES},
                            "completion": str(row["completion"])[:_WHOLE],
                            "cut": len(str(row["completion"])) > _WHOLE,
                        }
                        for identity, row in rows
                    ],
                }
                for step, rows in history
            ],
            "next": following,
            "total": total,
        }

    def timeline(self, query: Query) -> Answer:
        """Return a step's phases: each rank's, if it was profiled, else one after another, from the seconds of each."""
        run = self._one(query)
        step = query.step or 0
        curves = dict(self._read(run).by_name)  # another thread may find more meanwhile
        total = curves.pop(f"{_TIMING}step", None)
        ranks = self._profiled(run.profiles, step) or {0: _one_after_another(curves, step)}
        first = min((span["start"] for spans in ranks.values() for span in spans), default=0.0)
        lanes = [
            {"rank": rank, "spans": [span | {"start": span["start"] - first} for span in spans]}
            for rank, spans in sorted(ranks.items())
            if spans
        ]
        steps = list(total.steps) if total else []
        recent = steps[-_RECENT:]
        timed = [name for name in curves if name.startswith(_TIMING)]
        outer = [name for name in timed if "/" not in _phase_of(name)]
        phases = [
            {
                "name": name.removeprefix(_TIMING),
                "seconds": [curves[name].at(each) or 0.0 for each in recent],
            }
            for name in outer
        ]
        recently = {"steps": recent, "phases": phases}
        return {"steps": steps, "ranks": lanes, "recent": recently}

    def _profiled(self, directory: Path, step: int) -> dict[int, list[Answer]]:
        phases_by_rank = {}
        for path in self._within(directory).glob(f"step-{step:08d}.rank-*.json.gz"):
            if match := _PROFILE.fullmatch(path.name):
                with refusing(f"{path} is no profile", CorruptError, do="remove it"):
                    events = json.loads(gzip.decompress(self._bytes(path)))
                    phases_by_rank[int(match[1])] = [
                        _phase(str(event["args"]["path"]), event["ts"] / 1e6, event["dur"] / 1e6)
                        for event in events["traceEvents"]
                        if event["ph"] == "X"
                    ]
        return phases_by_rank

    def checkpoints(self, query: Query) -> Answer:
        """Return a run's steps with their health."""
        run = self._one(query)
        if self._url is None:
            steps, problem = listed_steps(self._within(run.checkpoints), LOCAL)
        elif self._url.startswith("hf://"):
            steps = []
            problem = None
        else:
            url = Url.parse(self._url).below(self._id(run.root)).below(run.checkpoints.name)
            steps, problem = listed_steps(RemotePath.of(url), RemoteSteps(Remote(url)))
        return {"steps": steps, "problem": problem and problem.problem}

    def log(self, query: Query) -> Answer:
        """Return the last entries of a rank's log before an offset, across all its files, and why the run failed."""
        run = self._one(query)
        logs = self._within(run.root / "logs")
        files = [match for path in logs.glob("*") if (match := _LOG.fullmatch(path.name))]
        of_rank = [match for match in files if int(match[1]) == query.rank]
        oldest_first = sorted(of_rank, key=lambda match: -int(match[2] or 0))
        paths = [logs / match[0] for match in oldest_first]
        reason = None
        with suppress(BurnishError, OSError):
            reason = ending(run).reason
        text = b"".join(map(self._bytes, paths))  # five files of 10 MB at most
        end = len(text) if query.before is None else max(0, min(query.before, len(text)))
        wanted = partial(is_wanted, level=query.level, needle=query.text.casefold())
        entries, before = last_entries(text, end, query.lines, wanted)
        failure = error_at_end(text) if reason is not None else None
        return {
            "ranks": sorted({int(match[1]) for match in files}),
            "entries": [entry._asdict() for entry in entries],
            "before": before,
            "reason": reason,
            "failure": failure and failure._asdict(),
        }

    def config(self, query: Query) -> Answer:
        """Return configurations, as texts and setting by setting."""
        runs = self._named(query)
        texts = {run: self._text(directory.config) for run, directory in runs.items()}
        settings = side_by_side([settings_of(directory.root) for directory in runs.values()])
        return {
            "text": texts,
            "settings": [{"setting": n, "values": values} for n, values in settings.items()],
            "different": [n for n, v in settings.items() if any(each != v[0] for each in v)],
            "differences": [
                {"setting": n, "values": settings[n]}
                for n in sorted(settings, key=_weight)
                if n not in _NAMES and any(each != settings[n][0] for each in settings[n])
            ],
        }

    def environment(self, query: Query) -> Answer:
        """Return the environment of a run's last start, and its code's uncommitted changes."""
        run = self._one(query)
        self._within(run.environment)
        diff = self._text(run.diff) if run.diff.exists() else None
        return {"environment": run.read_environment(), "diff": diff}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return size and time of each run's metrics, by id, to see which grow."""
        states = {}
        for path in self._paths():
            with suppress(OSError):
                state = RunDirectory(path).metrics.stat()
                states[self._id(path)] = (state.st_size, state.st_mtime_ns)
        return states

    def _paths(self) -> list[Path]:
        with self._lock:
            if time.monotonic() - self._walked[0] > _WALK_SECONDS:
                self._walked = (time.monotonic(), find_runs(self.root))
            return self._walked[1]

    def _id(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def _one(self, query: Query) -> RunDirectory:
        return next(iter(self._named(query).values()))

    def _named(self, query: Query) -> dict[str, RunDirectory]:
        for run in query.run:
            path = self.root / run
            is_real = "\0" not in run and os.path.realpath(path) == str(path)
            if not (is_real and path.is_relative_to(self.root) and is_run_at(path)):
                raise MissingError(
                    f"there is no run {run[:200]!r} in {self._name}",
                    want="the path of a run's directory below it, without links",
                    do="choose one of the list",
                )
        return {run: RunDirectory(self.root / run) for run in query.run}

    def _within(self, path: Path) -> Path:
        """Return `path`. Raises `UsageError` for a pipe or device, or if a link leads out of `root`."""
        if path.exists() and not (path.is_file() or path.is_dir()):
            have = "a pipe or a device"
            do = "move it out of the run's directory"
            raise UsageError(f"{path} is not a file", have=have, do=do)
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.root):
            problem = f"{path} leads out of {self.root}"
            do = "view a directory that holds both"
            raise UsageError(problem, have=f"a link to {target}", do=do)
        return path

    def _text(self, path: Path) -> str:
        if not path.exists():
            raise MissingError(f"there is no {path}", do="choose another run")
        return redacted(self._bytes(path, _TEXT_BYTES).decode("utf-8", "replace"))

    def _bytes(self, path: Path, most: int = _FILE_BYTES) -> bytes:
        with open_regular(self._within(path)) as file:
            return file.read(most)

    def _read(self, run: RunDirectory) -> Curves:
        return self._curves(self._within(run.metrics)).refresh()

    def _index(self, run: RunDirectory) -> RolloutIndex:
        with self._lock:
            if run.root not in self._indices:
                self._indices[run.root] = RolloutIndex(self._within(run.rollouts))
            return self._indices[run.root]


def _turns(conversation: Any) -> int:
    """Count the turns of the model in a conversation's record; 0 without one."""
    messages = conversation if isinstance(conversation, list) else ()
    return sum(isinstance(each, dict) and each.get("role") == "assistant" for each in messages)


def _weight(setting: str) -> int:
    """Return how late a setting stands among those that differ."""
    section = setting.partition(".")[0]
    return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)


def _written(steps: Sequence[int], last: int) -> Answer | None:
    """Return which steps of a run have rollouts, and a sentence if others have none."""
    if not steps:
        return None
    missing = last - len([step for step in steps if 1 <= step <= last])
    shown = ", ".join(map(str, steps if len(steps) <= 6 else [*steps[:3], "…", *steps[-2:]]))
    text = f"Rollouts of {len(steps)} of {last} steps are here: steps {shown}. tracking.rollouts_every=1 writes all."
    return {"steps": len(steps), "of": last, "text": text if missing > 0 else None}


def _mean(rewards: Sequence[Any]) -> float | None:
    values = [value for each in rewards if math.isfinite(value := _number(each))]
    return math.fsum(values) / len(values) if values else None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _phase(name: str, start: float, seconds: float) -> Answer:
    return {"name": name, "depth": name.count("/"), "start": start, "seconds": seconds}


def _phase_of(metric: str) -> str:
    """Return the path of a metric's phase: rollout/generate for timing_s/rollout.generate."""
    return metric.removeprefix(_TIMING).replace(".", "/")


def _one_after_another(curves: Mapping[str, Curve], step: int) -> list[Answer]:
    """Return a step's phases one after another, by their seconds; inner phases begin with the outer one."""
    phases = []
    ends = dict[str, float]()
    timed = {_phase_of(name): curve for name, curve in curves.items() if name.startswith(_TIMING)}
    for phase in sorted(timed, key=lambda phase: phase.count("/")):
        seconds = timed[phase].at(step)
        if seconds is not None:
            parent = phase.rpartition("/")[0]
            start = ends.get(parent, 0.0)
            phases.append(_phase(phase, start, seconds))
            ends[parent] = start + seconds
            ends[phase] = start
    return phases
