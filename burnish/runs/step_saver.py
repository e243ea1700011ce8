"""Save the steps of a run, at once or in the background, and load the newest one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from torch import Tensor

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.save import Contents
from burnish.checkpoint.steps import CommittedStep
from burnish.checkpoint.write_plan import MAIN
from burnish.config.resume import digest
from burnish.distributed.collectives import agree, from_main
from burnish.errors import BurnishError
from burnish.records import Completion
from burnish.runs.drawn_batch import BatchQueue, DrawnBatch
from burnish.runs.rollout_transfer import on_main
from burnish.runs.run_observers import RunObservers
from burnish.runs.session import Session
from burnish.runs.setup import Learner
from burnish.runs.trainer_state import Fingerprints, TrainerState, restore, state_json

if TYPE_CHECKING:
    from burnish.checkpoint.load import CheckpointSource
    from burnish.rollout.in_flight import SampleKey

log = logging.getLogger("burnish")


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """What a step holds besides tensors."""

    state: TrainerState
    pending: Sequence[DrawnBatch] = ()
    """Batches drawn and not trained on."""
    partial: Mapping[SampleKey, Completion] = field(default_factory=dict)
    """Completions begun for later batches."""
    place: PurePath | None = None
    """Where it lies; None for a state that no step holds."""


class StepSaver:
    """Saves the models of a run and its state, and remembers which step is committed. Methods are collective."""

    def __init__(
        self,
        session: Session,
        learners: Mapping[str, Learner],
        fingerprints: Fingerprints,
        observers: RunObservers,
    ) -> None:
        """`learners` are the trained models, by role."""
        self._session = session
        self._layout = session.layout
        self._config = session.config
        self._learners = learners
        self._fingerprints = fingerprints
        self._observers = observers
        self._digest = digest(session.config)
        self._compared_step: int | None = None
        self._surrounding: Callable[[], Mapping[str, Tensor]] | None = None
        """On rank 0, the tensors that surround a composite's language model."""
        self.saved_step: int | None = None
        """The newest step that is known to be committed."""
        self.saved_at = time.monotonic()
        """When the last save began."""

    def resume(self) -> LoadedStep | None:
        """Load the newest usable step; None if nothing was ever committed. Raises as `Checkpoints.resume` does."""
        loaded: LoadedStep | None = None

        def load(step: CommittedStep, source: CheckpointSource) -> None:
            nonlocal loaded
            loaded = self._load(step, source)

        self._session.checkpoints.resume(load, self._learners[MAIN].engine.arena)
        return loaded

    def _load(self, step: CommittedStep, source: CheckpointSource) -> LoadedStep:
        """Load models and state from a step, if all of it fits."""
        pending: Sequence[DrawnBatch] = ()
        partial: Mapping[SampleKey, Completion] = {}
        files = source.files(AHEAD)
        with agree(self._layout):
            if self._layout.is_main and files:
                from burnish.runs.pending_batches import read_ahead

                pending, partial = read_ahead(step, files)
        pending = from_main(pending, self._layout)
        state = restore(
            step,
            source,
            self._learners,
            self._fingerprints,
            self._digest,
            may_be_fresh=self._config.checkpoint.fresh_optimizer,
        )
        self.keep_surrounding(source)
        self.saved_step = state.step
        return LoadedStep(state, pending, partial, step.path)

    def keep_surrounding(self, step: CheckpointSource | None) -> None:
        """Copy what surrounds a composite's language model, from a step or from model.path."""
        composite = self._learners[MAIN].foundation.composite
        if composite is None or not composite.rest:
            return
        path = self._session.directory.kept
        with agree(self._layout), self._observers.writing():
            if self._layout.is_main:
                from burnish.checkpoint.kept import keep

                self._surrounding = keep(path, composite, step)

    def save(
        self, reached: LoadedStep, queue: BatchQueue | None, *, is_healthy: bool, background: bool
    ) -> None:
        """Commit a state unless it is committed; with `background`, only start.

        `queue` has the completions that are begun. Training goes on if a background save fails.
        """
        step = reached.state.step
        self.saved_at = time.monotonic()
        with self._session.spans("save"), self._session.progress.phase("save", lines=False):
            self.note_finished_save(wait=True)
            if self.saved_step == step:
                return
            # Copies that differ must not be saved: nobody could tell which of them is right.
            self.check_replicas(step)
            self._observers.sync()  # then only this step's own line of metrics can be missing
            if not background:
                self._session.checkpoints.save(step, self._contents(reached, queue, is_healthy))
                self._committed(step)
                return
            try:
                contents = self._contents(reached, queue, is_healthy)
                self._session.checkpoints.begin_save(step, contents)
            except BurnishError as error:
                self._log_failed_save(step, error)

    def note_finished_save(self, *, wait: bool) -> None:
        """Record how the background save ended."""
        finished = self._session.checkpoints.finished(wait=wait)
        if finished is None:
            return
        if finished.error is not None:
            self._log_failed_save(finished.step, finished.error)
            return
        self._committed(finished.step)
        if finished.warning is not None and self._layout.is_main:
            log.error("step %d is committed, but %s", finished.step, finished.warning)

    def check_replicas(self, step: int) -> None:
        """Compare copies of the weights if configured, once a step."""
        if self._config.distributed.check_replicas_every and self._compared_step != step:
            engines = {role: learner.engine for role, learner in self._learners.items()}
            from burnish.runs.replicas import check_replicas

            check_replicas(engines, self._config.engine.replicas, step, self._layout)
            self._compared_step = step

    def _committed(self, step: int) -> None:
        self.saved_step = step
        self._observers.committed(step)

    def _log_failed_save(self, step: int, error: BurnishError) -> None:
        if self._layout.is_main:
            log.error("STEP %d IS NOT SAVED; training goes on. %s", step, error)

    def _contents(
        self, reached: LoadedStep, queue: BatchQueue | None, is_healthy: bool
    ) -> Contents:
        main = self._learners[MAIN]
        pending = [
            DrawnBatch(
                batch.step,
                on_main(batch.groups, self._layout),
                on_main(batch.left_out, self._layout),
            )
            for batch in reached.pending
        ]
        files: dict[str, bytes] = {}
        if self._layout.is_main and queue is not None:
            begun = queue.partial()
            if pending or begun:
                from burnish.runs.pending_batches import ahead_files

                files = ahead_files(pending, begun)
        models = {role: learner.contents() for role, learner in self._learners.items()}
        if self._surrounding is not None:
            models[MAIN] = replace(models[MAIN], untrained=self._surrounding)
        return Contents(
            models=models,
            state=state_json(reached.state, self._learners, self._fingerprints, self._digest),
            files=files,
            healthy=is_healthy,
            check_finite=True,
            split=self._config.checkpoint.model_dtype == "bf16",
            arena=main.engine.arena,
        )
