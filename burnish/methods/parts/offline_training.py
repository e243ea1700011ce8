"""Train on fixed rows: the loop of every `OfflineMethod`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from burnish.algorithms.schedule import learning_rate
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.data.loader import State
from burnish.distributed.collectives import agree, reduce_stats
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.errors import BurnishError
from burnish.methods.offline import OfflineMethod
from burnish.records import Batch, Example, TokenOutputs
from burnish.runs.download_inputs import local_inputs
from burnish.runs.model_card import model_card
from burnish.runs.run import Run, Validation, counted
from burnish.runs.session import Session, open_run
from burnish.runs.setup import (
    Foundation,
    Learner,
    lay_foundation,
    load_start,
    make_loader,
    make_run_engine,
    train_dataset,
)
from burnish.runs.trainer_state import Fingerprints

if TYPE_CHECKING:
    from burnish.methods.parts.validation import HeldOut
    from burnish.runs.frozen_engines import LoadedModel


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a step on this rank."""

    foundation: Foundation
    policy: Engine
    """The model that is trained."""
    start: Engine | None = None
    """The frozen model that training started from, if the method keeps it; `policy` itself under a fresh adapter."""
    teachers: Any = None
    """A `burnish.methods.parts.distillation.Teachers`; None without distillation."""
    beside: Mapping[str, LoadedModel] = field(default_factory=dict)
    """The frozen models that compute during the run (`Method.frozen`), by setting."""

    def start_logprobs(self, batch: Batch) -> Batch:
        """Add `ref_logprobs`, the log-probs of the start. Collective."""
        return batch.with_logprobs("ref_logprobs", self._start_outputs(batch))

    def _start_outputs(self, batch: Batch) -> list[TokenOutputs]:
        if self.start is None:
            raise BurnishError(
                "this method keeps no start", do="return True in its method keeps_start"
            )
        return self.start.forward(batch, adapter=self.start is not self.policy)


def batch_of(
    rows: Sequence[Example | tuple[Example, ...]], models: Foundation, layout: Layout
) -> Batch:
    """Pack the examples of items. Those of one item share a micro-batch."""
    parts = [row if isinstance(row, tuple) else (row,) for row in rows]
    examples = [*chain.from_iterable(parts)]
    if any(each.weights is not None for each in examples):  # those of other rows count 1
        examples = [
            each
            if each.weights is not None
            else replace(each, weights=np.ones(len(each.token_ids), np.float32))
            for each in examples
        ]
    return make_batch(
        examples,
        layout,
        models.config.microbatch_tokens,
        models.costs,
        together=[len(each) for each in parts],
    )


def _held_out(method: OfflineMethod, foundation: Foundation, session: Session) -> HeldOut:
    """Read the rows of `data.validation`, with what is computed of them before training. Collective."""
    from burnish.methods.parts.validation import held_out_examples

    held_out = held_out_examples(method, foundation, session.progress)
    items = method.before_training(held_out.items, held_out.rows, foundation, session)
    return held_out._replace(items=items)


def _models(
    method: OfflineMethod, foundation: Foundation, policy: Engine, session: Session
) -> Models:
    """Load the frozen models of a step beside the one that is trained. Collective."""
    config = session.config
    start = None
    if method.keeps_start(config):
        start = load_start(foundation, policy, session.intact)
    loaded: Mapping[str, LoadedModel] = {}
    if foundation.beside:
        from burnish.runs.frozen_engines import load_beside

        loaded = load_beside(foundation, policy)
    teachers = None
    if config.distill.teachers and "distill" not in method.unread:
        from burnish.methods.parts.distillation import load_teachers

        teachers = load_teachers(foundation, policy, loaded, session.intact)
    return Models(foundation, policy, start, teachers, loaded)


def train(method: OfflineMethod, config: RunConfig, layout: Layout, device: torch.device) -> None:
    """Train as `config` says, from where its run directory left off. Collective."""
    config, local = local_inputs(config, device, layout, method=method)
    size = method.rows_per_step(config)
    with open_run(config, method, layout, device) as session:
        with session.progress.phase("setup", 3) as bar:
            card = model_card(method, config)
            language = lay_foundation(
                local, layout, device, given=config.model, card=card, beside=method.frozen(local)
            )
            foundation = method.foundation(language)
            bar.advance()
            read = partial(method.dataset, foundation, progress=session.progress)
            dataset = train_dataset(read, local.data)
            bar.advance()
            by_epoch = method.stays_in_epoch(config)
            loader = make_loader(dataset, config.data, config.seed, size, by_epoch=by_epoch)
            total = config.steps or loader.takes(size, config.epochs)
            items = method.before_training(dataset, None, foundation, session)
            held_out = _held_out(method, foundation, session) if local.data.validation else None
            engine = make_run_engine(foundation, config.optim)
            fingerprints = Fingerprints.of(
                foundation.tokenizer,
                dataset,
                local.model.path,
                method=method.source,
                functions=method.functions(config),
            )
            learners = {MAIN: Learner(engine, foundation)}
            run = Run(session, learners, fingerprints, total, loader.epoch_steps(size))
            loader.state = run.state.cursor
            models = _models(method, foundation, engine, session)
            validate: Validation | None = None
            if held_out is not None:
                from burnish.methods.parts.validation import example_validation

                validate = example_validation(method, models, held_out, session.stopper.check_all)
            bar.advance()
        loss = method.loss(config)
        spans = session.spans
        streaming = config.data.streaming

        def make_next() -> tuple[Batch, State]:
            with agree(layout if streaming else Layout()):
                batch = method.batch(items, loader.take(size), foundation, engine.layout)
            return batch, loader.state

        ahead = None
        with run.training(validate):
            for step in run.steps():
                with spans("data"):
                    batch, cursor = ahead or make_next()
                with (
                    spans("update"),
                    session.progress.phase("update", len(batch.microbatches)) as bar,
                ):
                    batch, prepared = method.prepare(models, batch)
                    if prepared:
                        prepared = reduce_stats(prepared, engine.layout, device)
                    seeded = replace(batch, seed=config.seed)
                    stats = engine.forward_backward(seeded, counted(loss, bar))
                    # Prepares the next batch while an accelerator computes. A bad row of a stream would end this step too.
                    ahead = None if streaming or step + 1 == total else make_next()
                    stats = stats.merge(engine.optim_step(learning_rate(step, total, config.optim)))
                stats = prepared.merge(stats)
                run.finish(stats.prefixed("train/"), cursor=cursor, batches=[batch])
