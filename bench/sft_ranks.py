"""One of our ranks, which does a step of SFT for each question. A peer of `bench.sft` under our own Python.

Settings: `config` (a run's configuration), `rank`, `world`, `port` (of rank 0), `threads`. An answer has
`seconds`, and the number of `tokens` that all ranks trained on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.peers import Turns
from burnish.algorithms.fine_tuning import sft_loss
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.data.loader import Loader
from burnish.distributed.device import synchronize
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Part
from burnish.records import Batch
from burnish.runs.setup import example_dataset, lay_foundation, make_run_engine


class Sft:
    """The parts of `burnish.methods.parts.offline_training`, and one step with them."""

    def __init__(self, config: RunConfig, layout: Layout, device: torch.device) -> None:
        self._config = config
        self._layout = layout
        self._device = device
        foundation = lay_foundation(config, layout, device)
        self._flops = foundation.flops
        self._dataset = example_dataset(foundation, config.data.train, "data.train")
        self._engine = make_run_engine(foundation, config.optim)
        self._engine.load(foundation.source, Part.WEIGHTS)
        self._loader = Loader(len(self._dataset), config.seed, shuffle=False)
        self._next = self._made()

    def step(self) -> tuple[float, list[int]]:
        """Take one step. Return its seconds, and the tokens of each sequence."""
        start, (batch, lengths) = clock(self._device)(), self._next
        stats = self._engine.forward_backward(batch, sft_loss())
        self._next = self._made()
        stats.merge(self._engine.optim_step(self._config.optim.peak_lr)).values_by_name()
        return clock(self._device)() - start, lengths

    def _made(self) -> tuple[Batch, list[int]]:
        batch_config = self._config.batch
        examples = [self._dataset[index] for index in self._loader.take(batch_config.examples)]
        batch = make_batch(examples, self._layout, batch_config.tokens, self._flops)
        return batch, [len(example.token_ids) for example in examples]

    def close(self) -> None:
        """Free the model and the optimizer."""
        self._engine.close()


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of wall-clock seconds, which waits for the device to finish its work."""

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    return now


def place_of_rank(settings: dict[str, Any]) -> None:
    """Set the variables by which torchrun tells a process its rank."""
    os.environ.update(
        RANK=str(settings["rank"]),
        LOCAL_RANK=str(settings["rank"]),
        WORLD_SIZE=str(settings["world"]),
        LOCAL_WORLD_SIZE=str(settings["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings["port"]),
    )


def main() -> None:
    turns = Turns()
    settings: dict[str, Any] = turns.next()
    config = RunConfig.model_validate(settings["config"])
    place_of_rank(settings)

    def run(layout: Layout, device: torch.device) -> None:
        torch.set_num_threads(settings["threads"])
        sft = Sft(config, layout, device)
        turns.answer(ready=True)
        while True:
            turns.next()
            seconds, lengths = sft.step()
            turns.answer(seconds=seconds, tokens=sum(lengths))

    launch(run, config.distributed)


if __name__ == "__main__":
    main()
