"""One rank of `bench.busy`: a step of GRPO for each question, or a fixed piece of work. A peer under our own Python.

Settings: `config` (a run's configuration), `rank`, `world`, `port` (of rank 0), `threads`. Without `config` each question is a fixed
number of matrix products on one thread. An answer has `seconds`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench.grpo import FIXED, ByFirstToken, Ours
from bench.peers import CLOCKS, Turns
from bench.sft_ranks import place_of_rank
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.rewards.pool import RewardPool

PRODUCTS = 400
EDGE = 256


def main() -> None:
    turns = Turns()
    settings: dict[str, Any] = turns.next()
    if "config" not in settings:
        alone(turns)
    config = RunConfig.model_validate(settings["config"])
    place_of_rank(settings)

    def run(layout: Layout, device: torch.device) -> None:
        with RewardPool(config.reward) as pool:
            rule = ByFirstToken(FIXED, FIXED)
            ours = Ours(config, rule, layout, device, pool, CLOCKS["wall"])
            turns.answer(ready=True)
            while True:
                turns.next()
                turns.answer(seconds=ours.step()[0])

    launch(run, config.distributed)


def alone(turns: Turns) -> None:
    """Multiply matrices, without waiting for any other thread."""
    factor = np.ones((EDGE, EDGE), np.float32)
    turns.answer(ready=True)
    while True:
        turns.next()
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            factor @ factor
        turns.answer(seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
