"""The protocol of a training loop, `steps` and `finish`, with its validations, saves, logs, stops and resumes.

A signal in the middle of a step saves the frozen `TrainerState` after the previous step.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path, PurePath
from types import MappingProxyType

from torch import Tensor

from burnish.algorithms.base import SparseLoss
from burnish.checkpoint.retention import require_measured
from burnish.checkpoint.steps import step_name
from burnish.checkpoint.write_plan import MAIN
from burnish.config.shares import steps_between
from burnish.data.loader import State
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.device import peak_flops
from burnish.engines.base import LossFn, Part, compute_dtype
from burnish.errors import BurnishError, StoppedError
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import Floats
from burnish.rewards.overview import LostRewards
from burnish.runs.drawn_batch import BatchQueue
from burnish.runs.run_observers import RunObservers
from burnish.runs.session import Session
from burnish.runs.setup import Learner, prove_start
from burnish.runs.signals import StopRequested
from burnish.runs.step_saver import LoadedStep, StepSaver
from burnish.runs.trainer_state import Fingerprints, TrainerState, Updates, counts
from burnish.tracking.progress import Bar
from burnish.tracking.rundir import ADAPTED, PARAMETERS, parameters_text
from burnish.tracking.stats import Stats
from burnish.tracking.trackers import json_numbers, numbers

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
        epoch_steps: Fraction,
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
        self._epoch_steps = epoch_steps
        self._validate: Validation | None = None
        self._queue: BatchQueue | None = None
        self._finite_loss = True
        given = json.dumps(asdict(fingerprints))
        same_on_all_ranks(given, "what data.train and the tokenizer hold", self._layout)
        self._peak_flops = peak_flops(session.device, compute_dtype(self._config.engine))
        self._observers = RunObservers(session, total_steps)
        self._saver = StepSaver(session, learners, fingerprints, self._observers)
        main = learners[MAIN].foundation
        for learner in learners.values():
            session.intact.require(*learner.foundation.places(fresh=False))
        # The newest step comes first: a run that resumes does not read the weights that it began with.
        loaded = self._saver.resume()
        if loaded is None:
            session.intact.require(*main.places(fresh=True))
            self._saver.keep_surrounding(None)
            loaded = LoadedStep(TrainerState(roles=self._other_counts()))
        self.state = loaded.state
        self.pending = loaded.pending
        """Batches drawn and not trained on in this state."""
        self.partial = loaded.partial
        """Completions begun for later batches, as the step that the run resumed from held them."""
        with agree(self._layout), self._observers.writing():
            if self._layout.is_main:
                self._tell_start()
        for learner in learners.values():
            learner.engine.load(learner.foundation.base, Part.FROZEN)
            if loaded.place is None:
                learner.engine.load(learner.foundation.source, Part.WEIGHTS)
                prove_start(learner.engine, learner.foundation)
        if loaded.place is not None and not isinstance(loaded.place, Path) and session.mirror:
            with agree(self._layout), self._observers.writing():
                if self._layout.is_main:
                    session.mirror.bring_back(session.directory)

    def _tell_start(self) -> None:
        main = self._learners[MAIN].foundation
        sizes = {PARAMETERS: main.flops.parameters, ADAPTED: main.adapted}
        directory = self._session.directory
        directory.write_environment(directory.read_environment() | sizes)
        done = self.state.step
        total = self._total_steps
        if done >= total:
            log.info("step %d of %d is done already: nothing is left to do", done, total)
            return
        log.info(
            "steps %d to %d on %d %s, %s in %s",
            done + 1,
            total,
            self._fingerprints.samples,
            "streamed bytes" if self._config.data.streaming else "rows",
            parameters_text(main.flops.parameters, main.adapted),
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
        except LostRewards as error:
            if self.state.step:
                self._save()
            self._observers.report_failure(error)
            self._settle_mirror(_GRACE_SECONDS)
            raise
        except Exception as error:
            if self.state.step < self._total_steps:
                self._observers.report_failure(error)
            raise
        finally:
            self._observers.close()

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, 0-based. Make late saves between them; end on a signal on any rank. Collective."""
        done = self.state.step
        total = self._total_steps
        patience = _SAVE_SECONDS if self._config.checkpoint.save_every == "auto" else math.inf
        with self._session.progress.phase("steps", total, done=done, lines=False) as bar:
            for step in range(done, total):
                is_late = step > done and time.monotonic() - self._saver.saved_at >= patience
                # One collective asks all ranks both whether a signal came and whether a save is late: their clocks differ.
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
        self._saver.note_finished_save(wait=False)
        main = self._learners[MAIN].engine
        pending = self._queue.pending() if self._queue else ()
        # One frozen record, replaced at once: whenever a signal comes, a save finds a state in which everything is of the same step.
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
            self._observers.write_rollouts(self.state.step, rollouts, advantages, by_token)
        values = self._throughput(batches, self._session.spans.added(stats.values_by_name()))
        self._finite_loss = all(math.isfinite(v) for n, v in values.items() if n.endswith("/loss"))
        if self._is_due(self._config.distributed.check_replicas_every):
            self._saver.check_replicas(self.state.step)
        is_last = self.state.step == self._total_steps
        validates = is_last or self._is_due(self._config.evaluation.every)
        saves = self._save_is_due(validated=validates)
        self._record(values, validate=validates, save=saves or is_last)
        if saves:
            self._after_save()

    def _after_save(self) -> None:
        self._observers.report("running")
        if self.state.step < self._total_steps:
            self._session.stopper.check_saved()

    def _begin(self) -> None:
        """Open the observers, and finish an interrupted step's validation and log."""
        session = self._session
        state = self.state
        session.spans.step = state.step
        decode = self._learners[MAIN].foundation.tokenizer.decode
        logged = self._observers.open(state.step, is_logged=state.unlogged is None, decode=decode)
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
                    self._observers.write_rollouts(self.state.step, rollouts)
            require_measured(self._config.checkpoint.keep_best.metric, measured)
            values = spans.added(values) | measured
            rating = json_numbers(measured)
            later = self.state.measured_later
            # A signal in the validation has saved the step without its rating. The next step's state will have it.
            if self._saver.saved_step == self.state.step:
                later = {**later, str(self.state.step): rating}
            self.state = replace(
                self.state,
                measured=rating,
                measured_later=later,
                unlogged=json_numbers(values),
                unvalidated=False,
            )
        if save:
            self._save(background=self._config.checkpoint.background)
        self._log(spans.added(values))

    def _log(self, values: Mapping[str, float]) -> None:
        self._observers.log(self.state.step, values)
        self.state = replace(self.state, unlogged=None, unvalidated=False)

    def _save(self, *, background: bool = False) -> None:
        """Commit the state unless it is committed; with `background`, only start. Collective."""
        self._saver.save(
            LoadedStep(self.state, self.pending),
            self._queue,
            is_healthy=self._finite_loss,
            background=background,
        )

    def _throughput(
        self, batches: Sequence[Batch], values: Mapping[str, float]
    ) -> dict[str, float]:
        """Return `values` with tokens per second over all ranks, the imbalance, and this rank's MFU.

        MFU is flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B).
        """
        imbalance = sum(batch.imbalance for batch in batches) / max(len(batches), 1)
        measured = {**values, "perf/imbalance": imbalance}
        flops = sum(learner.take_flops() for learner in self._learners.values())
        seconds = values.get("timing_s/update", 0.0)
        if seconds > 0:
            measured["perf/tokens_per_s"] = sum(batch.total_tokens for batch in batches) / seconds
            if self._peak_flops:
                measured["perf/mfu"] = flops / (seconds * self._peak_flops)
        return measured

    def _other_counts(self) -> dict[str, Updates]:
        learners = self._learners.items()
        return {role: counts(learner.engine) for role, learner in learners if role != MAIN}

    def _complete(self) -> None:
        session = self._session
        session.stopper.check_all()
        self._save()
        self._observers.report("finished")
        left = self._settle_mirror(self._config.checkpoint.mirror_patience_seconds)
        if self._layout.is_main:
            name = step_name(self.state.step)
            root: PurePath = session.directory.checkpoints
            if session.mirror is not None and not Path(root, name).is_dir():
                root = session.mirror.root
            what = "adapter" if self._learners[MAIN].foundation.adapter else "model"
            of_fp32 = ", in bf16; val/ numbers are of the fp32 weights"
            kinds = self._config.engine.precision, self._config.checkpoint.model_dtype
            remark = of_fp32 if self._validate and kinds == ("fp32", "bf16") else ""
            log.info("done: the %s is %s%s", what, root / name / "model", remark)
        if left is not None and session.mirror is not None:
            raise BurnishError(
                f"the run is done, but {session.mirror.url} lacks a part of it",
                have=left,
                do=f"keep {session.directory.root}; the same command again copies the rest",
            )
        self._observers.settle_hub(self.state.step)

    def _stopped(self, request: StopRequested) -> StoppedError:
        self._save()
        self._observers.report("stopped")
        self._settle_mirror(_GRACE_SECONDS)
        said = f"step {self.state.step} is committed in {self._session.directory.root}"
        return StoppedError(
            f"{request}: {said}; the same command continues from there",
            signal_number=request.signal_number,
        )

    def _settle_mirror(self, seconds: float) -> BurnishError | None:
        """Wait until the mirror is complete or a signal comes; return why it lacks something. Collective."""
        session = self._session
        if session.mirror is None:
            return None
        self._observers.close()
        shown = 0.0
        with session.progress.phase("mirror", 100) as bar:

            def show(part: float) -> None:
                nonlocal shown  # a sync that starts over does not move the bar back
                bar.advance(max(0.0, 100 * part - shown))
                shown = max(shown, 100 * part)
                session.spans.move()  # tells the stall watch that a wait of hours is no stall

            return session.checkpoints.settle_mirror(seconds, session.stopper.changed(), show)

    def _save_is_due(self, *, validated: bool) -> bool:
        settings = self._config.checkpoint
        if settings.save_every != "auto":
            return self._is_due(settings.save_every)
        is_rated = validated and settings.keep_best.metric is not None
        return is_rated or self._is_due(settings.keep_every)

    def _is_due(self, every: int | str) -> bool:
        """Return whether an interval ended in this step, or the run."""
        step = self.state.step
        steps = steps_between(every, self._epoch_steps)
        return steps > 0 and (step // steps > (step - 1) // steps or step == self._total_steps)


def counted(loss: LossFn, bar: Bar) -> LossFn:
    """Wrap a loss to advance the bar."""

    def counting(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        bar.advance()
        return loss(outputs, micro)

    return replace(loss, function=counting) if isinstance(loss, SparseLoss) else counting
