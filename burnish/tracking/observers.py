"""Tell trackers, the rollout files and the report what the main rank's run does."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from burnish.config.schema import TrackingConfig
from burnish.tracking.attention import find_attention, is_due, sentence
from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory, discard_leftovers
from burnish.tracking.trackers import (
    END_SECONDS,
    BackgroundTracker,
    JsonlTracker,
    State,
    Tracker,
    load_tracker,
)

if TYPE_CHECKING:
    from burnish.records.rollout_table import RolloutTable
    from burnish.tracking.rollouts import Kind

# least time between reports, largest share of time
_REPORT_SECONDS = 60.0
_REPORT_SHARE = 0.02
# Steps between files of rollouts, except in runs of fewer steps than _SHORT_RUN.
_ROLLOUTS_EVERY = 10
_SHORT_RUN = 50
# To send the rest of a stopped run.
_STOP_SECONDS = 10.0

log = logging.getLogger("burnish")


def rollouts_interval(settings: TrackingConfig, total: int) -> int:
    """Return after how many of `total` steps rollouts are written; 0: never."""
    every = settings.rollouts_every
    return every if every != "auto" else 1 if total < _SHORT_RUN else _ROLLOUTS_EVERY


def _writes_rollouts(settings: TrackingConfig, step: int, total: int, validation: bool) -> bool:
    """Return whether the rollouts of a step of `total`, or of a validation after it, are written."""
    every = rollouts_interval(settings, total)
    return every > 0 and (validation or step % every == 0 or step in (1, total))


def wanted_rollouts(
    settings: TrackingConfig, step: int, total: int, table: RolloutTable, validation: bool
) -> tuple[Sequence[int], Collection[int]] | None:
    """Return the indices of rollouts that rank 0 needs, in order, and of those that it needs whole; None for nothing."""
    traced = bool(settings.traces.local or settings.traces.endpoint)
    written = _writes_rollouts(settings, step, total, validation)
    if not (written or (traced and settings.traces.sample_rate)):
        return None
    from burnish.tracking import rollouts

    order = table.order if written else ()
    whole = rollouts.chosen(step, table) if written else set()
    if traced:
        kind: Kind = "validation" if validation else "step"
        rate = settings.traces.sample_rate
        from burnish.tracking.traces import sampled

        whole |= sampled(kind, step, rate, len(table.owners))
    return order or sorted(whole), whole


class Observers:
    """A run's trackers, rollout files and report, imported as its settings ask for them."""

    def __init__(
        self,
        directory: RunDirectory,
        settings: TrackingConfig,
        *,
        step: int,
        total_steps: int,
        is_logged: bool,
        decode: Callable[[list[int]], str] | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Open them for a run that goes on after `step` (0: new); remove later steps' data. `given`: all settings, by dotted names."""
        self._directory = directory
        self._settings = settings
        self._total_steps = total_steps
        directory.write_status(total_steps, "running")
        discard_leftovers(directory.root)
        discard_leftovers(directory.rollouts)
        from burnish.tracking import rollouts

        self._rollouts = rollouts
        self._rollouts.discard_rollouts_after(directory.rollouts, step)
        self._token_texts = decode and partial(self._rollouts.texts_of_tokens, decode=decode)
        resumed = (step if is_logged else step - 1) if step else None
        classes = {name: load_tracker(name) for name in settings.trackers}
        self._trackers: list[Tracker] = [
            self._console(),
            JsonlTracker(directory.metrics, resume_step=resumed),
        ]
        self._others = [
            BackgroundTracker(name, make, directory.root, resume_step=resumed)
            for name, make in classes.items()
        ]
        keep = int(settings.rollouts_keep_gb * 1e9)
        self._thinning = self._rollouts.Thinning(directory.rollouts, keep)
        self._traces: Any = None
        if settings.traces.local or settings.traces.endpoint:
            from burnish.tracking.traces import Traces

            self._traces = Traces(directory, settings.traces, keep, step)
            self._others += filter(None, [self._traces.exporter])
        self._trackers += self._others
        self._given = {**given, "steps": total_steps}
        self._curves = Curves(directory.metrics)
        self._met = set[str]()
        """Rules of what needs attention that the console has had."""
        self._state: State = "running"
        self._is_settled = False
        self._next_report = time.monotonic() + _REPORT_SECONDS

    def _console(self) -> Tracker:
        """Return what shows the steps: lines, or in a notebook a picture."""
        ipython = sys.modules.get("IPython")
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            from burnish.tracking.notebook import NotebookTracker

            return NotebookTracker(self._directory.root, self._directory.metrics, self._total_steps)
        from burnish.tracking.console import ConsoleTracker

        return ConsoleTracker(total_steps=self._total_steps, every=self._settings.console_every)

    def rollouts_scored(
        self,
        step: int,
        table: RolloutTable,
        advantages: Sequence[float] | None,
        by_token: Mapping[str, Mapping[int, Any]],
        arriving: Iterable[tuple[int, Any]],
        whole: Container[int],
    ) -> None:
        """Write a step's rollouts if due; without `advantages`, a validation's. `arriving` yields them by index."""
        known: list[Any] = [None] * len(table.owners)

        def passing() -> Iterator[tuple[int, Any]]:
            for i, rollout in arriving:
                known[i] = rollout if i in whole else known[i]
                yield i, rollout

        chosen_rows: Mapping[int, Mapping[str, Any]] = {}
        if _writes_rollouts(self._settings, step, self._total_steps, advantages is None):
            chosen_rows = self._rollouts.write_rollouts(
                self._directory.rollouts,
                step,
                table,
                advantages,
                self._token_texts,
                by_token,
                passing(),
            )
            kind: Kind = "validation" if advantages is None else "step"
            self._thinning.wrote(step, kind)
            # Only the rollouts that are kept longest: a table of thousands would cost more than the step.
            for tracker in self._others:
                alone = [row for row in chosen_rows.values() if not row.get("branch")]
                tracker.tell("log_rollouts", step, kind, alone)
        if self._traces is not None:
            for _ in passing():
                pass
            self._traces.take(step, known, advantages, chosen_rows)

    def step_finished(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's line, in order to every tracker; write the report once a minute."""
        for tracker in self._trackers:
            tracker.log(step, values)
        if not self._is_settled and all(other.is_made for other in self._others):
            # Trackers' libraries load some hundred thousand objects, which would add a third of a second to each full collection.
            self._is_settled = True
            gc.collect()
            gc.freeze()
        if is_due(step):
            for item in find_attention(self._curves.refresh().by_name, self._given):
                if item.key not in self._met:
                    self._met.add(item.key)
                    log.warning("needs attention at step %d: %s", step, sentence(item))
        if time.monotonic() >= self._next_report:
            self.report("running")

    def checkpoint_committed(self, place: str) -> None:
        """Tell trackers where a step is committed."""
        for tracker in self._others:
            tracker.tell("log_file", place, "checkpoint")

    def report(self, state: State, reason: Mapping[str, Any] | None = None) -> None:
        """Write the report, and the state of the run with the reason of a failure."""
        self._state = state
        if state != "running":
            self._directory.write_status(self._total_steps, state, reason)
            last = find_attention(self._curves.refresh().by_name, self._given)
            if last:
                lines = "".join(f"\n  {sentence(item)}" for item in last)
                log.warning("what needs attention:%s", lines)
        if self._settings.report:
            begun = time.monotonic()
            from burnish.tracking.report import write_report

            write_report(self._directory.root)
            took = time.monotonic() - begun
            self._next_report = begun + max(_REPORT_SECONDS, took / _REPORT_SHARE)

    def sync(self) -> None:
        """Make each tracker's record survive a power loss."""
        for tracker in self._trackers:
            tracker.sync()

    def close(self) -> None:
        """Close every tracker, even if one raises. Background trackers share a minute, or 10 s of a stopped run."""
        if self._is_settled:
            gc.unfreeze()
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
            seconds = _STOP_SECONDS if self._state == "stopped" else END_SECONDS
            for other in self._others:
                if self._settings.report and self._directory.report.exists():
                    other.tell("log_file", str(self._directory.report), "report")
                other.finish(self._state, time.monotonic() + seconds)
