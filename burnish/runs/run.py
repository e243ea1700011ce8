"""The protocol of a training loop, `steps` and `finish`, with its validations, saves, logs, stops and resumes.

A signal in the middle of a step saves the frozen `TrainerState` after the previous step.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.retention import require_measured
from burnish.checkpoint.save import Contents
from burnish.checkpoint.steps import CommittedStep, step_name
from burnish.checkpoint.write_plan import MAIN
from burnish.config.resume import digest
from burnish.data.loader import State
from burnish.distributed.collectives import agree, from_main, same_on_all_ranks
from burnish.distributed.device import peak_flops
from burnish.engines.base import LossFn, Part, compute_dtype
from burnish.errors import BurnishError, StoppedError
from burnish.files.durable import naming_failures
from burnish.records import Batch, Completion, MicroBatch, TokenOutputs
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import Floats
from burnish.rewards.overview import LostRewards
from burnish.runs.drawn_batch import BatchQueue, DrawnBatch
from burnish.runs.rollout_transfer import arrays_on_main, arriving, on_main
from burnish.runs.session import Session
from burnish.runs.setup import Learner, prove_start
from burnish.runs.signals import StopRequested
from burnish.runs.trainer_state import (
    Fingerprints,
    TrainerState,
    Updates,
    counts,
    restore,
    state_json,
)
from burnish.tracking.observers import Observers, wanted_rollouts
from burnish.tracking.progress import Bar
from burnish.tracking.rundir import CHECKPOINTS
from burnish.tracking.stats import Stats
from burnish.tracking.trackers import json_numbers, logged_values, numbers

if TYPE_CHECKING:
    from burnish.checkpoint.load import CheckpointSource
    from burnish.rollout.in_flight import SampleKey

# Seconds that a run waits for its mirror after a signal to stop. The step is on the local disk already.
_GRACE_SECONDS = 10.0
# Seconds between checkpoints with save_every: auto.
_SAVE_SECONDS = 1800.0

log = logging.getLogger("burnish")

Validation = Callable[[], tuple[dict[str, float], RolloutTable | None]]
"""Validates the current weights. Returns `val/...`, the same on every rank, and the rollouts behind them, if any. Collective."""


class Run:
    """One training run on this rank.

    ```python
    with run.training(validate):
        for step in run.steps():
            ...
            run.finish(stats, cursor=loader.state, batches=batches)
    ```
    """

    def __init__(
        self,
        session: Session,
        learners: Mapping[str, Learner],
        fingerprints: Fingerprints,
        total_steps: int,
    ) -> None:
        """Load the models, by role, from the newest committed step, else their initial weights. Collective.

        Raises `CorruptError` if initial weights lie in a damaged step, and `BurnishError` if ranks have different inputs.
        """
        self._session = session
        self._layout = session.layout
        self._config = session.config
        self._learners = learners
        self._fingerprints = fingerprints
        self._total_steps = total_steps
        self._observers: Observers | None = None
        self._validate: Validation | None = None
        self._queue: BatchQueue | None = None
        self._saved_step: int | None = None
        self._compared_step: int | None = None
        self._saved_at = time.monotonic()
        self._finite_loss = True
        given = json.dumps(asdict(fingerprints))
        same_on_all_ranks(given, "what data.train and the tokenizer hold", self._layout)
        self._digest = digest(self._config)
        self._peak_flops = peak_flops(session.device, compute_dtype(self._config.engine))
        main = learners[MAIN]
        session.intact.require(*main.foundation.places(fresh=False))
        self.state = TrainerState(roles=self._other_counts())
        self._kept: Callable[[], Mapping[str, Tensor]] | None = None
        """On rank 0, the tensors that surround a composite's language model."""
        self.pending: Sequence[DrawnBatch] = ()
        """Batches drawn and not trained on in this state."""
        self.partial: Mapping[SampleKey, Completion] = {}
        """Completions begun for later batches, as the step that the run resumed from held them."""
        resumed = session.checkpoints.resume(self._load, main.engine.arena)
        if resumed is None:
            places = main.foundation.places(fresh=True)
            session.intact.require(*places, self._config.critic.path)
            self._keep(None)
        if self._layout.is_main:
            self._log_start()
        for learner in learners.values():
            learner.engine.load(learner.foundation.base, Part.FROZEN)
            if resumed is None:
                learner.engine.load(learner.foundation.source, Part.WEIGHTS)
                prove_start(learner.engine, learner.foundation)
        if resumed is not None and not isinstance(resumed.step.path, Path) and session.mirror:
            with agree(self._layout), self._writing():
                if self._layout.is_main:
                    session.mirror.bring_back(session.directory)

    def _keep(self, step: CheckpointSource | None) -> None:
        """Copy what surrounds a composite's language model, from a step or from model.path. Collective."""
        composite = self._learners[MAIN].foundation.composite
        if composite is None or not composite.rest:
            return
        path = self._session.directory.kept
        with agree(self._layout), self._writing():
            if self._layout.is_main:
                from burnish.checkpoint.kept import keep

                self._kept = keep(path, composite, step)

    def _log_start(self) -> None:
        made = self.state.step
        total = self._total_steps
        if made >= total:
            log.info("step %d of %d is done already: nothing is left to do", made, total)
            return
        parameters = self._learners[MAIN].foundation.flops.parameters
        log.info(
            "steps %d to %d on %d %s, %s parameters in %s",
            made + 1,
            total,
            self._fingerprints.samples,
            "streamed bytes" if self._config.data.streaming else "rows",
            f"{parameters:,}",
            self._config.engine.precision,
        )

    @contextmanager
    def training(
        self, validate: Validation | None, queue: BatchQueue | None = None
    ) -> Iterator[None]:
        """Train inside the block: validate first if configured, and commit at the end. Collective.

        A save stores the batches and completions of `queue`. A signal ends the block with a commit and `StoppedError`, and so does
        `LostRewards`.
        """
        self._validate = validate
        self._queue = queue
        try:
            self._begin()
            yield
            self._complete()
        except StopRequested as request:
            raise self._stopped(request) from None
        except LostRewards:
            if self.state.step:
                self._save()
            self._notify(lambda each: each.report("failed"))
            self._settle_mirror(_GRACE_SECONDS)
            raise
        except Exception:
            if self.state.step < self._total_steps:
                self._report_failure()
            raise
        finally:
            self._close()

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, 0-based. Make late saves between them; end on a signal on any rank. Collective."""
        done = self.state.step
        total = self._total_steps
        patience = _SAVE_SECONDS if self._config.checkpoint.save_every == "auto" else math.inf
        with self._session.progress.phase("steps", total, done=done, lines=False) as bar:
            for step in range(done, total):
                is_late = step > done and time.monotonic() - self._saved_at >= patience
                if self._session.stopper.check_all(is_late):
                    self._save(background=self._config.checkpoint.background)
                    self._after_save()
                self._session.spans.step = step + 1
                yield step
                bar.advance()

    def finish(
        self,
        stats: Stats,
        *,
        cursor: State,
        batches: Sequence[Batch],
        kl_coef: float | None = None,
        rollouts: RolloutTable | None = None,
        advantages: Floats | None = None,
        by_token: Mapping[str, Mapping[int, Floats]] = MappingProxyType({}),
    ) -> None:
        """Count a step as done; validate, save and log it where due. Collective.

        `batches` are its updates' mini-batches, made of `rollouts`.
        """
        self._note_finished_save(wait=False)
        main = self._learners[MAIN].engine
        pending = self._queue.pending() if self._queue else ()
        self.state = TrainerState(
            step=self.state.step + 1,
            cursor=cursor,
            tokens=self.state.tokens + sum(batch.total_tokens for batch in batches),
            optimizer_steps=main.steps,
            skipped_in_a_row=main.skipped_in_a_row,
            measured_later=self.state.measured_later,
            roles=self._other_counts(),
            kl_coef=kl_coef,
            ahead=len(pending),
        )
        self.pending = pending
        if rollouts is not None:
            self._write_rollouts(rollouts, advantages, by_token)
        values = self._throughput(batches, self._session.spans.added(stats.values_by_name()))
        self._finite_loss = all(math.isfinite(v) for n, v in values.items() if n.endswith("/loss"))
        if self._is_due(self._config.distributed.check_replicas_every):
            self._check_replicas()
        due = self._is_due(self._config.evaluation.every)
        save = self._save_is_due(validated=due)
        last = self.state.step == self._total_steps
        self._record(values, validate=due, save=save or last)
        if save:
            self._after_save()

    def _after_save(self) -> None:
        self._notify(lambda each: each.report("running"))
        if self.state.step < self._total_steps:
            self._session.stopper.check_saved()

    def _begin(self) -> None:
        """Open the observers, and finish an interrupted step's validation and log."""
        session = self._session
        state = self.state
        session.spans.step = state.step
        logged: dict[str, float] = {}
        with agree(self._layout), self._writing():
            if self._layout.is_main:
                logged = logged_values(session.directory.metrics, state.step)
                self._observers = Observers(
                    session.directory,
                    self._config.tracking,
                    step=state.step,
                    total_steps=self._total_steps,
                    is_logged=state.unlogged is None,
                    decode=self._learners[MAIN].foundation.tokenizer.decode,
                )
        session.spans.added({})
        left = state.unlogged
        if left is not None and not state.unvalidated:
            self._log(logged or numbers(left))
        elif left is not None:
            self._record(numbers(left), validate=True)
        elif state.step == 0 and self._validate and self._config.evaluation.before:
            self._record({}, validate=True)
        session.spans.added({})

    def _record(self, values: Mapping[str, float], *, validate: bool, save: bool = False) -> None:
        """Validate and save where due, then log.

        Until then the state holds the metrics, so neither a signal nor a kill loses them.
        """
        spans = self._session.spans
        self.state = replace(self.state, unlogged=json_numbers(values))
        if validate and self._validate is not None:
            self.state = replace(self.state, unvalidated=True)
            self._session.stopper.check_all()
            with spans("validate"):
                measured, rollouts = self._validate()
                if rollouts is not None:
                    self._write_rollouts(rollouts)
            require_measured(self._config.checkpoint.keep_best.metric, measured)
            values = spans.added(values) | measured
            kept = json_numbers(measured)
            later = self.state.measured_later
            if self._saved_step == self.state.step:
                later = {**later, str(self.state.step): kept}
            self.state = replace(
                self.state,
                measured=kept,
                measured_later=later,
                unlogged=json_numbers(values),
                unvalidated=False,
            )
        if save:
            self._save(background=self._config.checkpoint.background)
        self._log(spans.added(values))

    def _write_rollouts(
        self,
        table: RolloutTable,
        advantages: Floats | None = None,
        by_token: Mapping[str, Mapping[int, Floats]] = MappingProxyType({}),
    ) -> None:
        """Write rollouts on rank 0 if due. A validation has no `advantages`. Collective."""
        step = self.state.step
        total = self._total_steps
        settings = self._config.tracking
        wanted = wanted_rollouts(settings, step, total, table, advantages is None)
        if wanted is None:
            return
        order, whole = wanted
        if settings.rollout_tokens:
            by_token = arrays_on_main(by_token, whole, self._layout)
        rollouts = arriving(table, order, whole, self._layout)
        with agree(self._layout), self._writing(), rollouts as incoming:
            if self._observers is not None:
                means = None if advantages is None else advantages.tolist()
                told = (step, table, means, by_token, incoming, whole)
                self._observers.rollouts_scored(*told)

    def _log(self, values: Mapping[str, float]) -> None:
        with self._writing():
            if self._observers is not None:
                self._observers.step_finished(self.state.step, values)
        self.state = replace(self.state, unlogged=None, unvalidated=False)

    def _throughput(
        self, batches: Sequence[Batch], values: Mapping[str, float]
    ) -> dict[str, float]:
        """Return `values` with tokens per second over all ranks, the imbalance, and this rank's MFU.

        MFU is flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B).
        """
        imbalance = sum(batch.imbalance for batch in batches) / max(len(batches), 1)
        found = {**values, "perf/imbalance": imbalance}
        flops = sum(learner.take_flops() for learner in self._learners.values())
        seconds = values.get("timing_s/update", 0.0)
        if seconds > 0:
            found["perf/tokens_per_s"] = sum(batch.total_tokens for batch in batches) / seconds
            if self._peak_flops:
                found["perf/mfu"] = flops / (seconds * self._peak_flops)
        return found

    def _save(self, *, background: bool = False) -> None:
        """Commit the state unless it is committed; with `background`, only start. Collective.

        Training goes on if a background save fails.
        """
        self._saved_at = time.monotonic()
        with self._session.spans("save"), self._session.progress.phase("save", lines=False):
            self._note_finished_save(wait=True)
            if self._saved_step == self.state.step:
                return
            self._check_replicas()
            self._notify(Observers.sync)  # then only this step's own line of metrics can be missing
            if not background:
                self._session.checkpoints.save(self.state.step, self._contents())
                self._committed(self.state.step)
                return
            try:
                self._session.checkpoints.begin_save(self.state.step, self._contents())
            except BurnishError as error:
                self._log_failed_save(self.state.step, error)

    def _check_replicas(self) -> None:
        """Compare copies of the weights if configured, once a step. Collective."""
        step = self.state.step
        if self._config.distributed.check_replicas_every and self._compared_step != step:
            engines = {role: learner.engine for role, learner in self._learners.items()}
            from burnish.runs.replicas import check_replicas

            check_replicas(engines, self._config.engine.replicas, step, self._layout)
            self._compared_step = step

    def _note_finished_save(self, *, wait: bool) -> None:
        """Record how the background save ended. Collective."""
        finished = self._session.checkpoints.finished(wait=wait)
        if finished is None:
            return
        if finished.error is not None:
            self._log_failed_save(finished.step, finished.error)
            return
        self._committed(finished.step)
        if finished.warning is not None and self._layout.is_main:
            log.error("step %d is committed, but %s", finished.step, finished.warning)

    def _committed(self, step: int) -> None:
        self._saved_step = step
        if self._observers is not None:
            mirror = self._session.mirror
            root = self._session.directory.root
            place = str(root.absolute()) if mirror is None else mirror.url.rstrip("/")
            self._observers.checkpoint_committed(f"{place}/{CHECKPOINTS}/{step_name(step)}")

    def _log_failed_save(self, step: int, error: BurnishError) -> None:
        if self._layout.is_main:
            log.error("STEP %d IS NOT SAVED; training goes on. %s", step, error)

    def _contents(self) -> Contents:
        main = self._learners[MAIN]
        pending = [
            DrawnBatch(each.step, *(on_main(t, self._layout) for t in (each.groups, each.left_out)))
            for each in self.pending
        ]
        files: dict[str, bytes] = {}
        if self._layout.is_main and self._queue is not None:
            begun = self._queue.partial()
            if pending or begun:
                from burnish.runs.pending_batches import ahead_files

                files = ahead_files(pending, begun)
        models = {role: learner.contents() for role, learner in self._learners.items()}
        if self._kept is not None:
            models[MAIN] = replace(models[MAIN], kept=self._kept)
        return Contents(
            models=models,
            state=state_json(self.state, main, self._fingerprints, self._digest),
            files=files,
            healthy=self._finite_loss,
            check_finite=True,
            split=self._config.checkpoint.model_dtype == "bf16",
            arena=main.engine.arena,
        )

    def _load(self, step: CommittedStep, source: CheckpointSource) -> None:
        """Load models and state from a step, if all of it fits."""
        pending: Sequence[DrawnBatch] = ()
        partial: Mapping[SampleKey, Completion] = {}
        files = source.files(AHEAD)
        with agree(self._layout):
            if self._layout.is_main and files:
                from burnish.runs.pending_batches import read_ahead

                pending, partial = read_ahead(step, files)
        pending = from_main(pending, self._layout)
        self.state = restore(
            step,
            source,
            self._learners,
            self._fingerprints,
            self._digest,
            may_be_fresh=self._config.checkpoint.fresh_optimizer,
        )
        self._keep(source)
        self.pending = pending
        self.partial = partial
        self._saved_step = self.state.step

    def _other_counts(self) -> dict[str, Updates]:
        learners = self._learners.items()
        return {role: counts(learner.engine) for role, learner in learners if role != MAIN}

    def _complete(self) -> None:
        session = self._session
        session.stopper.check_all()
        self._save()
        self._notify(lambda each: each.report("finished"))
        left = self._settle_mirror(self._config.checkpoint.mirror_patience_seconds)
        if self._layout.is_main:
            name = step_name(self.state.step)
            root: PurePath = session.directory.checkpoints
            if session.mirror is not None and not Path(root, name).is_dir():
                root = session.mirror.root
            what = "adapter" if self._learners[MAIN].foundation.adapter else "model"
            log.info("done: the %s is %s", what, root / name / "model")
        if left is not None and session.mirror is not None:
            raise BurnishError(
                f"the run is done, but {session.mirror.url} lacks a part of it",
                have=left,
                do=f"keep {session.directory.root}; the same command again copies the rest",
            )

    def _stopped(self, request: StopRequested) -> StoppedError:
        self._save()
        self._notify(lambda each: each.report("stopped"))
        self._settle_mirror(_GRACE_SECONDS)
        said = f"step {self.state.step} is committed in {self._session.directory.root}"
        return StoppedError(
            f"{request}: {said}; the same command continues from there",
            signal_number=request.signal_number,
        )

    def _report_failure(self) -> None:
        if self._observers is not None:
            try:
                self._observers.report("failed")
            except OSError as error:
                log.warning("report.html is not written: %s", error)

    def _settle_mirror(self, seconds: float) -> BurnishError | None:
        """Wait until the mirror is complete or a signal comes; return why it lacks something. Collective."""
        session = self._session
        if session.mirror is None:
            return None
        self._close()
        shown = 0.0
        with session.progress.phase("mirror", 100) as bar:

            def show(part: float) -> None:
                nonlocal shown  # a sync that starts over does not move the bar back
                bar.advance(max(0.0, 100 * part - shown))
                shown = max(shown, 100 * part)
                session.spans.move()  # tells the stall watch that a wait of hours is no stall

            return session.checkpoints.settle_mirror(seconds, session.stopper.changed(), show)

    def _notify(self, say: Callable[[Observers], None]) -> None:
        """Tell rank 0's observers. Collective."""
        with agree(self._layout), self._writing():
            if self._observers is not None:
                say(self._observers)

    def _writing(self) -> AbstractContextManager[None]:
        return naming_failures(f"{self._session.directory.root} cannot be written")

    def _close(self) -> None:
        if self._observers is not None:
            self._observers.close()

    def _save_is_due(self, *, validated: bool) -> bool:
        settings = self._config.checkpoint
        if settings.save_every != "auto":
            return self._is_due(settings.save_every)
        is_rated = validated and settings.keep_best.metric is not None
        return is_rated or self._is_due(settings.keep_every)

    def _is_due(self, every: int) -> bool:
        step = self.state.step
        return every > 0 and (step % every == 0 or step == self._total_steps)


def counted(loss: LossFn, bar: Bar) -> LossFn:
    """Wrap a loss to advance the bar."""

    def counting(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        bar.advance()
        return loss(outputs, micro)

    return counting
