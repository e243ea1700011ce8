"""A run: its directory, step counter, logs, saves, stops and resumes: everything that is not the algorithm.

Trainers ask it for steps and tell it when one is finished. Its state is one frozen `Position`, replaced after each step, so a
signal in the middle of a step saves the state after the step before.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from burnish.checkpoint.layout import MAIN
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints, Destination, Resumed
from burnish.checkpoint.retention import Retention, require_measured
from burnish.checkpoint.save import Contents
from burnish.checkpoint.steps import Committed
from burnish.config.load import dump_yaml
from burnish.config.resume import digest
from burnish.config.schema import RunConfig
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.device import (
    device_name,
    peak_flops,
    peak_memory,
    reset_peak_memory,
    synchronize,
)
from burnish.distributed.layout import Layout
from burnish.engines.base import Part, compute_dtype
from burnish.errors import BurnishError, StoppedError
from burnish.files.durable import naming_failures
from burnish.records import Batch, Rollout
from burnish.tracking.progress import Progress
from burnish.tracking.rundir import TRAINER, RunDirectory, environment
from burnish.tracking.spans import Spans
from burnish.tracking.stats import Stats
from burnish.tracking.trackers import Observers, json_numbers, logged_values, numbers
from burnish.train.fingerprints import Inputs
from burnish.train.intact import Intact
from burnish.train.out_of_memory import OutOfMemory
from burnish.train.ownership import (
    behind,
    bring_back,
    claim,
    mirror_of,
    percent_on,
    step_place,
)
from burnish.train.preflight import require_own_directory
from burnish.train.resuming import state_of, take_up
from burnish.train.setup import Learner
from burnish.train.signals import Stopper, StopRequested, catch_signals, check_stop
from burnish.train.trainer_state import Position, counts

_GRACE_SECONDS = 10.0
# How long a run that was told to stop waits for its mirror: what counts then is the step on its disk.

log = logging.getLogger("burnish")

Validation = Callable[[], dict[str, float]]
"""Validates the current weights: `val/...`, the same numbers on every rank. Collective."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step's updates ran, for its throughput."""

    tokens: int
    """Tokens over all ranks, however often they were learned from."""
    imbalance: float
    """The mean of the batches' (see `Batch.imbalance`)."""

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Work:
        """The work of these batches."""
        tokens = sum(batch.total_tokens for batch in batches)
        imbalance = sum(batch.imbalance for batch in batches) / max(len(batches), 1)
        return cls(tokens, imbalance)


class Run:
    """One training run on this rank. `open_run` makes it; a trainer calls `begin`, `start`, `steps`, `finish`, `complete`."""

    def __init__(
        self, config: RunConfig, layout: Layout, device: torch.device, stopper: Stopper
    ) -> None:
        self.config = config
        self.layout = layout
        self.device = device
        self.stopper = stopper
        self.directory = RunDirectory(config.directory)
        settings, patience = config.checkpoint, config.distributed.timeout_seconds
        self.checkpoints = Checkpoints(
            self.directory.checkpoints,
            layout,
            retention=Retention.of(settings, config.mirror_url),
            reserve_bytes=int(settings.reserve_gb * 1e9),
            background_timeout=patience if settings.background else None,
        )
        self.position = Position()
        self._config_digest = digest(config)
        self.spans = Spans(
            settle=partial(synchronize, device),
            reset_peak=partial(reset_peak_memory, device),
            peak=partial(peak_memory, device),
        )
        self.progress = Progress(config.tracking.progress and layout.is_main)
        self.validate: Validation | None = None
        """Validates the current weights; set by the trainer where there are held-out data."""
        self.mirror: Destination | None = None
        """Where the run's directory is copied to."""
        self.intact = Intact(layout, self.progress)
        """Models in steps that were read against their hashes, as all have to be before they are loaded."""
        self._observers: Observers | None = None
        self._saved_step: int | None = None
        self._finite_loss = True

    def begin(
        self, learners: Mapping[str, Learner], inputs: Inputs, total_steps: int
    ) -> Resumed | None:
        """Take the trained models, by role (`MAIN` among them), and resume them from a committed step if there is one. Collective.

        Returns the step it resumed from. Raises `CorruptError` if a model to begin from lies in a damaged step, and `BurnishError` if
        ranks have different data or tokenizers.
        """
        given = json.dumps(inputs.as_state())
        same_on_all_ranks(given, "what data.train and the tokenizer hold", self.layout)
        self._learners, self._total_steps = learners, total_steps
        self._inputs = inputs
        self._peak = peak_flops(self.device, compute_dtype(self.config.engine))
        main = learners[MAIN].foundation
        self.intact.require(*main.judges, *main.frozen)
        self.position = replace(self.position, roles=self._counts_beside_main())
        resumed = self.checkpoints.resume(self._load, learners[MAIN].engine.arena)
        if resumed is None:
            self.intact.require(*main.beginnings, main.config.critic.path)
        if self.position.step >= total_steps and self.layout.is_main:
            made = self.position.step
            log.info("step %d of %d is made already: nothing is left to do", made, total_steps)
        for learner in learners.values():
            learner.engine.load(learner.foundation.base, Part.FROZEN)
        bring_back(self.mirror, self.directory, resumed, self.layout)
        return resumed

    def start(self) -> None:
        """Open the trackers, and validate before the first step if configured. Collective.

        After a kill between a save and its log line, log that line.
        """
        logged: dict[str, float] = {}
        with agree(self.layout), self._writing():
            if self.layout.is_main:
                logged = logged_values(self.directory.metrics, self.position.step)
                self._observers = Observers(
                    self.directory,
                    self.config.tracking,
                    step=self.position.step,
                    total_steps=self._total_steps,
                    is_logged=self.position.unlogged is None,
                )
        self.spans.added({})
        left = self.position.unlogged
        if left is not None and not self.position.unvalidated:
            self._log(logged or numbers(left))
        elif left is not None:
            self._record(numbers(left), validate=True)
        elif self.position.step == 0 and self.validate and self.config.evaluation.before:
            self._record({}, validate=True)
        self.spans.added({})

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, 0-based. A signal on any rank ends them. Collective."""
        for step in range(self.position.step, self._total_steps):
            self.check_stop()
            yield step

    def finish(
        self, stats: Stats, *, cursor: int, work: Work, kl_coef: float | None = None
    ) -> None:
        """Validate, log and save after a step, where it is time. Collective."""
        self._hear_of_saving(wait=False)
        main = self._learners[MAIN].engine
        self.position = Position(
            step=self.position.step + 1,
            cursor=cursor,
            tokens=self.position.tokens + work.tokens,
            optimizer_steps=main.steps,
            skipped_in_a_row=main.skipped_in_a_row,
            measured_later=self.position.measured_later,
            roles=self._counts_beside_main(),
            kl_coef=kl_coef,
        )
        values = self._throughput(work, self.spans.added(stats.values_by_name()))
        self._finite_loss = all(math.isfinite(v) for n, v in values.items() if n.endswith("/loss"))
        save = self._is_due(self.config.checkpoint.save_every)
        last = self.position.step == self._total_steps
        due = self._is_due(self.config.evaluation.every)
        self._record(values, validate=due, save=save or last)
        if save:
            self._report("running")

    def _counts_beside_main(self) -> dict[str, dict[str, int]]:
        """Return the update counts of the models beside the run's own."""
        learners = self._learners.items()
        return {role: counts(learner.engine) for role, learner in learners if role != MAIN}

    def complete(self) -> None:
        """All steps are done: save, and say where everything is. Collective."""
        self.check_stop()
        self.save()
        self._report("finished")
        left = self._settle_mirror(self.config.checkpoint.mirror_patience_seconds)
        if self.layout.is_main:
            path = step_place(self.position.step, self.directory, self.mirror)
            what = "adapter" if self._learners[MAIN].foundation.adapter else "model"
            log.info("done: the %s is %s", what, path / "model")
        if left is not None:
            meets = self.checkpoints.meets_on_mirror
            raise behind(self.mirror, self.directory, left, meets=meets)

    def write_rollouts(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> None:
        """Hand over the current step's rollouts, which are written if they are due. Collective."""
        self._tell(lambda each: each.rollouts_scored(self.position.step + 1, rollouts, advantages))

    def write_validation(self, rollouts: Sequence[Rollout]) -> None:
        """Hand over the rollouts of a validation. Collective."""
        self._tell(lambda each: each.rollouts_scored(self.position.step, rollouts, None))

    def _tell(self, say: Callable[[Observers], None]) -> None:
        """Tell the observers, which the main rank has. Collective."""
        with agree(self.layout), self._writing():
            if self._observers is not None:
                say(self._observers)

    def save(self, *, background: bool = False) -> None:
        """Commit the current position unless it is committed; with `background`, only begin to. Collective.

        A save in the background that fails warns loudly and stops nothing.
        """
        with self.spans("save"):
            self._hear_of_saving(wait=True)
            if self._saved_step == self.position.step:
                return
            self._tell(Observers.sync)  # a committed step's line may be missing, but none before it
            if not background:
                self.checkpoints.save(self.position.step, self._contents())
                self._saved_step = self.position.step
                return
            try:
                self.checkpoints.begin_save(self.position.step, self._contents())
            except BurnishError as error:
                self._say_unsaved(self.position.step, error)

    def _hear_of_saving(self, *, wait: bool) -> None:
        """Note how the save in the background went. Collective."""
        finished = self.checkpoints.finished(wait=wait)
        if finished is None:
            return
        if finished.error is not None:
            self._say_unsaved(finished.step, finished.error)
            return
        self._saved_step = finished.step
        if finished.warning is not None and self.layout.is_main:
            log.error("step %d is committed, but %s", finished.step, finished.warning)

    def _say_unsaved(self, step: int, error: BurnishError) -> None:
        if self.layout.is_main:
            log.error("STEP %d IS NOT SAVED; training goes on. %s", step, error)

    def _contents(self) -> Contents:
        return Contents(
            models={role: learner.contents() for role, learner in self._learners.items()},
            state=state_of(self.position, self._learners[MAIN], self._inputs, digest(self.config)),
            healthy=self._finite_loss,
            check_finite=True,
            split=self.config.checkpoint.model_dtype == "bf16",
            arena=self._learners[MAIN].engine.arena,
        )

    def stopped(self, request: StopRequested) -> StoppedError:
        """Commit the current position and return the error to raise. Collective."""
        self.save()
        self._report("stopped")
        meets = self.checkpoints.meets_on_mirror
        place = self.mirror.url if meets and self.mirror is not None else self.directory.root
        patience = self.config.checkpoint.mirror_patience_seconds if meets else _GRACE_SECONDS
        if meets and self.layout.is_main:
            log.warning(
                "waiting at most %.0f seconds for %s, where alone step %d is committed; a second signal ends the run without it",
                patience,
                place,
                self.position.step,
            )
        left = self._settle_mirror(patience)
        said = f"step {self.position.step} is committed in {place}; the same command continues from there"
        if meets and left is not None:
            said = f"STEP {self.position.step} IS NOT COMMITTED; the same command continues from an older one. {left}"
        return StoppedError(f"{request}: {said}", signal_number=request.signal_number)

    def _settle_mirror(self, seconds: float) -> BurnishError | None:
        """Wait this long for the mirror, or until a signal; return why it lacks some of the run. Collective."""
        if self.mirror is None:
            return None
        self.close()
        with self.progress.phase("mirror", 100) as bar:
            return self.checkpoints.settle_mirror(seconds, self.stopper.changed(), percent_on(bar))

    def _writing(self) -> AbstractContextManager[None]:
        return naming_failures(f"{self.directory.root} cannot be written")

    def close(self) -> None:
        """Close the trackers."""
        if self._observers is not None:
            self._observers.close()

    def _load(self, step: Committed, source: CheckpointSource) -> None:
        """Fill models and position from a committed step, once all of it fits."""
        self.position = take_up(
            step,
            source,
            self._learners,
            self._inputs,
            self._config_digest,
            may_be_fresh=self.config.checkpoint.fresh_optimizer,
        )
        self._saved_step = self.position.step

    def check_stop(self) -> None:
        """Raise `StopRequested` on every rank when a signal has reached any. Collective."""
        check_stop(self.stopper, self.layout)

    def _report(self, state: str) -> None:
        self._tell(lambda each: each.step_committed(state))

    def _is_due(self, every: int) -> bool:
        step = self.position.step
        return every > 0 and (step % every == 0 or step == self._total_steps)

    def _record(self, values: Mapping[str, float], *, validate: bool, save: bool = False) -> None:
        """Validate and save where due, then log the step.

        Until it is logged, the line is in the position, so neither a signal nor a kill loses it.
        """
        validation = self.validate if validate else None
        self._leave(values)
        if validation is not None:
            self.position = replace(self.position, unvalidated=True)
            self.check_stop()
            with self.spans("validate"):
                measured = validation()
            require_measured(self.config.checkpoint.keep_best.metric, measured)
            values = self.spans.added(values) | measured
            self._leave(values)
            self._keep_measured(json_numbers(measured))
        if save:
            self.save(background=self.config.checkpoint.background)
        self._log(self.spans.added(values))

    def _keep_measured(self, measured: Mapping[str, float | str]) -> None:
        """Keep the validation's numbers in the position; if its step is committed already, for later steps."""
        if self._saved_step == self.position.step:
            later = {**self.position.measured_later, str(self.position.step): measured}
            self.position = replace(self.position, measured_later=later)
        self.position = replace(self.position, measured=measured, unvalidated=False)

    def _leave(self, values: Mapping[str, float]) -> None:
        """Keep the line in the position."""
        self.position = replace(self.position, unlogged=json_numbers(values))

    def _log(self, values: Mapping[str, float]) -> None:
        with self._writing():
            if self._observers is not None:
                self._observers.step_finished(self.position.step, values)
        self.position = replace(self.position, unlogged=None, unvalidated=False)

    def _throughput(self, work: Work, values: Mapping[str, float]) -> dict[str, float]:
        """Return `values` with tokens per second of the update over all ranks, the imbalance, and this rank's MFU.

        MFU is flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B).
        """
        found = {**values, "perf/imbalance": work.imbalance}
        flops = sum(learner.take_flops() for learner in self._learners.values())
        seconds = values.get("timing_s/update", 0.0)
        if seconds > 0:
            found["perf/tokens_per_s"] = work.tokens / seconds
            if self._peak:
                found["perf/mfu"] = flops / (seconds * self._peak)
        return found


@contextmanager
def open_run(
    config: RunConfig, trainer: Literal["sft", "rl"], layout: Layout, device: torch.device
) -> Iterator[Run]:
    """Open the run that `config` names. A signal in the block commits a checkpoint and raises `StoppedError`.

    Explains an out-of-memory error. Before anything is loaded, refuses a run directory that is in use, belongs to another
    configuration or `trainer`, or holds steps if `resume` is never, and ranks with different configurations.
    """
    with catch_signals(silent=not layout.is_main) as stopper:
        run = Run(config, layout, device, stopper)
        same_on_all_ranks(dump_yaml(config), "the configuration", layout)
        with run.checkpoints, closing(run):
            url = config.mirror_url
            run.mirror = mirror_of(url, config.checkpoint, run.directory.root, layout)
            run.checkpoints.mirror_to(run.mirror)
            with agree(layout):
                require_own_directory(run.directory, config, trainer)
                if layout.is_main:
                    found = environment(device_name(device), layout.world)
                    claim(run.directory, run.mirror, config, {TRAINER: trainer, **found})
            memory = OutOfMemory(config, trainer, layout, device, run.spans)
            try:
                with memory.explained(run.directory.root):
                    yield run
            except StopRequested as request:
                raise run.stopped(request) from None
