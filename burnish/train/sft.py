"""Supervised fine-tuning: make the examples' tokens likelier. Every process runs the same function."""

from __future__ import annotations

import torch

from burnish.algorithms.loss import sft_loss
from burnish.algorithms.schedule import learning_rate
from burnish.checkpoint.layout import MAIN
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.data.loader import Loader
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Part
from burnish.train.evaluate import example_validation
from burnish.train.fingerprints import Inputs
from burnish.train.localize import with_local_inputs
from burnish.train.run import Work, open_run
from burnish.train.setup import Learner, example_dataset, lay_foundation, make_engine


def train(config: RunConfig) -> None:
    """Fine-tune as `config` says; resumes where its run directory left off."""
    local = with_local_inputs(config)
    launch(lambda layout, device: _train(config, local, layout, device), config.distributed)


def _train(config: RunConfig, local: RunConfig, layout: Layout, device: torch.device) -> None:
    size = config.batch.examples
    with open_run(config, "sft", layout, device) as run:
        with run.progress.phase("setup", 3) as bar:
            foundation = lay_foundation(local, config)
            bar.advance()
            dataset = example_dataset(foundation, local.data.train, "data.train")
            bar.advance()
            by_epoch = config.steps is None
            loader = Loader(len(dataset), config.seed, config.data.shuffle, by_epoch=by_epoch)
            total = config.steps or loader.takes(size, config.epochs)
            engine = make_engine(foundation, config.optim, layout, device)
            inputs = Inputs.of(foundation.tokenizer, dataset, local.model.path)
            if run.begin({MAIN: Learner(engine, foundation)}, inputs, total) is None:
                engine.load(foundation.source, Part.WEIGHTS)
            loader.cursor = run.position.cursor
            run.validate = example_validation(foundation, engine, device, run.check_stop)
            bar.advance()
        costs = foundation.costs
        run.start()
        for step in run.steps():
            with run.spans("data"):
                examples = [dataset[index] for index in loader.take(size)]
                batch = make_batch(examples, engine.layout, config.microbatch_tokens, costs)
            with run.spans("update"), run.progress.phase("update"):
                stats = engine.forward_backward(batch, sft_loss)
                stats = stats.merge(engine.optim_step(learning_rate(step, total, config.optim)))
            run.finish(stats.prefixed("train/"), cursor=loader.cursor, work=Work.of([batch]))
        run.complete()
