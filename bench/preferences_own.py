"""Our side of `bench.preferences`: a step of `burnish dpo` for each question, under our own Python.

Settings: `config` (a run's configuration), `threads`. The first answer has `reference`, the seconds that the reference's log-probs took
for each pair. Others have `seconds`, `tokens` (the number of pairs) and `peak`, bytes of memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from bench.peers import Turns
from bench.sft_ranks import clock
from bench.turns import peak_bytes
from burnish.config.schema import RunConfig
from burnish.data.loader import Loader
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Part
from burnish.methods.dpo import DPO
from burnish.methods.parts.offline_training import Models
from burnish.records import Batch
from burnish.runs.setup import lay_foundation, make_run_engine
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress


def main() -> None:
    turns = Turns()
    settings: dict[str, Any] = turns.next()
    config = RunConfig.model_validate(settings["config"])

    def run(layout: Layout, device: torch.device) -> None:
        torch.set_num_threads(settings["threads"])
        now = clock(device)
        method = DPO()
        foundation = lay_foundation(config, layout, device)
        dataset = method.dataset(foundation, config.data.train, "data.train")
        silent = Progress(enabled=False)
        stopper = SimpleNamespace(check_all=lambda: None)
        session: Any = SimpleNamespace(
            intact=Intact(layout, silent), progress=silent, stopper=stopper
        )
        start = now()
        items = method.before_training(dataset, None, foundation, session)
        turns.answer(reference=(now() - start) / len(dataset))
        engine = make_run_engine(foundation, config.optim)
        engine.load(foundation.source, Part.WEIGHTS)
        models = Models(foundation, engine)
        loss = method.loss(config)
        loader = Loader(len(dataset), config.seed, shuffle=False)
        size = config.batch.examples

        def next_batch() -> Batch:
            return method.batch(items, loader.take(size), foundation, engine.layout)

        ahead = next_batch()
        while True:
            turns.next()
            start = now()
            batch, _ = method.prepare(models, ahead)
            stats = engine.forward_backward(batch, loss)
            ahead = next_batch()
            stats.merge(engine.optim_step(config.optim.peak_lr)).values_by_name()
            turns.answer(seconds=now() - start, tokens=size, peak=peak_bytes())

    launch(run, config.distributed)


if __name__ == "__main__":
    main()
