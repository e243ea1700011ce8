"""Supervised fine-tuning."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch

from burnish.algorithms.loss import sft_loss
from burnish.algorithms.schedule import learning_rate
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.data.loader import State
from burnish.distributed.collectives import agree
from burnish.distributed.layout import Layout
from burnish.records import Batch
from burnish.runs.run import Run, Validation, counted
from burnish.runs.session import open_run
from burnish.runs.setup import (
    Learner,
    example_dataset,
    lay_foundation,
    make_engine,
    make_loader,
    train_dataset,
)
from burnish.runs.trainer_state import Fingerprints


def train(config: RunConfig, local: RunConfig, layout: Layout, device: torch.device) -> None:
    """Fine-tune as `config` says, from where its run directory left off. Collective.

    `local` comes from `local_inputs`.
    """
    size = config.batch.examples
    with open_run(config, "sft", layout, device) as session:
        with session.progress.phase("setup", 3) as bar:
            cards = import_module("burnish.runs.model_card")
            card = cards.model_card("sft", config.model, config.data, config.model_dump())
            foundation = lay_foundation(local, layout, device, given=config.model, card=card)
            bar.advance()
            examples_of = partial(example_dataset, foundation, progress=session.progress)
            dataset = train_dataset(examples_of, local.data)
            bar.advance()
            by_epoch = config.steps is None
            loader = make_loader(dataset, config.data, config.seed, by_epoch=by_epoch)
            total = config.steps or loader.takes(size, config.epochs)
            engine = make_engine(foundation, config.optim)
            fingerprints = Fingerprints.of(foundation.tokenizer, dataset, local.model.path)
            run = Run(session, {MAIN: Learner(engine, foundation)}, fingerprints, total)
            loader.state = run.state.cursor
            validate: Validation | None = None
            if local.data.validation:
                evaluation = import_module("burnish.methods.parts.validation")
                validate = evaluation.example_validation(
                    foundation, engine, session.stopper.check_all, session.progress
                )
            bar.advance()
        costs, spans, streaming = foundation.costs, session.spans, config.data.streaming

        def make_next() -> tuple[Batch, State]:
            with agree(layout if streaming else Layout()):
                examples = dataset.items(loader.take(size))
                batch = make_batch(examples, engine.layout, config.microbatch_tokens, costs)
            return batch, loader.state

        ahead = None
        with run.training(validate):
            for step in run.steps():
                with spans("data"):
                    batch, cursor = ahead or make_next()
                count = len(batch.microbatches)
                with spans("update"), session.progress.phase("update", count) as bar:
                    stats = engine.forward_backward(batch, counted(sft_loss, bar))
                    # Prepares the next batch while an accelerator computes. A bad row of a stream would end this step too.
                    ahead = None if streaming or step + 1 == total else make_next()
                    stats = stats.merge(engine.optim_step(learning_rate(step, total, config.optim)))
                run.finish(stats.prefixed("train/"), cursor=cursor, batches=[batch])
