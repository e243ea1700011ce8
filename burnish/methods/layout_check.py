"""`burnish check`: compare one step of a shrunken model at the user's layout with plain PyTorch in one process.

The user's data, loss and optimizer settings run on a small model of the same family (fp32, fresh weights). AdamW replaces
Muon. The generator and speed are not checked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from burnish.algorithms.critic import value_loss_fn
from burnish.algorithms.loss import policy_loss_fn, sft_loss
from burnish.check.comparison import LONGEST, Material, compared, report, require_equal
from burnish.check.small_model import shrunk
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.factory import make_engine, settings_beside
from burnish.methods.parts.critic import critic_foundation
from burnish.records import Example
from burnish.records.seeds import derive_seed
from burnish.runs.download_inputs import local_inputs
from burnish.runs.setup import (
    Foundation,
    example_dataset,
    lay_foundation,
    prompt_dataset,
    train_dataset,
)

_SEQUENCES = 12


def check_layout(config: RunConfig) -> None:
    """Compare and print the distances. Raises `BurnishError` naming the first tensor that differs."""

    def run(layout: Layout, device: torch.device) -> None:
        foundation = lay_foundation(local_inputs(config, device, layout)[1])
        _check_model(material(foundation), layout, device)
        if config.reward.given and config.algorithm.advantage == "gae":
            if layout.is_main:
                print("the critic:")
            _check_model(critic_material(foundation), layout, device)
        if layout.is_main:
            print(f"{layout.world} processes compute what one plain process does")

    launch(run, config.distributed)


def _check_model(given: Material, layout: Layout, device: torch.device) -> None:
    engine = make_engine(
        given.hf_config, given.engine, given.optim, layout=layout, device=device, lora=given.lora
    )
    differences = compared(engine, given)
    engine.close()
    if layout.is_main:
        for line in report(differences, given):
            print(line)
    require_equal(differences, layout)


def material(foundation: Foundation) -> Material:
    """Return the first sequences, shortened, with the run's loss and a small model.

    With rewards, prompts get random completions and advantages.
    """
    config = foundation.config
    given = Material(
        shrunk(foundation.hf_config, config.engine),
        [],
        sft_loss,
        config.engine.model_copy(update={"precision": "fp32"}),
        config.optim.model_copy(update={"kind": "adamw"}),
        config.model.adapter,
        config.seed,
        temperature=1.0,
    )
    if not config.reward.given:
        rows = train_dataset(partial(example_dataset, foundation), config.data)
        return replace(given, examples=[_cut(rows[i]) for i in range(min(_SEQUENCES, len(rows)))])
    return replace(
        given,
        examples=_random_examples(foundation, given.hf_config),
        loss=policy_loss_fn(config.algorithm, LONGEST),
        temperature=config.rollout.temperature,
    )


def critic_material(foundation: Foundation) -> Material:
    """Return the critic's material, without an adapter."""
    config, given = foundation.config, material(foundation)
    hf_config = shrunk(critic_foundation(foundation).hf_config, config.engine)
    return replace(
        given,
        hf_config=hf_config,
        examples=_random_examples(foundation, hf_config),
        loss=value_loss_fn(config.algorithm.aggregation, config.critic.clip, LONGEST),
        engine=settings_beside(hf_config, given.engine),
        lora=None,
    )


def _random_examples(foundation: Foundation, hf_config: PretrainedConfig) -> list[Example]:
    config = foundation.config
    prompts = train_dataset(partial(prompt_dataset, foundation), config.data)
    samples = min(config.rollout.n, 4)
    numbers = range(min(_SEQUENCES // samples, len(prompts)))
    vocabulary = hf_config.get_text_config().vocab_size
    return [
        _random_example(prompts[i].token_ids, vocabulary, derive_seed(config.seed, "check", i, s))
        for i in numbers
        for s in range(samples)
    ]


def _cut(example: Example) -> Example:
    """Return at most `LONGEST` tokens, around the first trained one."""
    start = max(0, int(example.loss_mask.argmax()) - LONGEST // 2)
    window = slice(start, start + LONGEST)
    mask = example.loss_mask[window].copy()
    mask[0] = False
    return Example(example.token_ids[window], mask)


def _random_example(prompt: Any, vocabulary: int, seed: int) -> Example:
    rng = np.random.default_rng(seed)
    prompt = prompt[-LONGEST // 2 :]
    completion = rng.integers(0, vocabulary, int(rng.integers(4, LONGEST // 2)))
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    values = rng.normal(size=(5, len(mask))).astype(np.float32) * mask
    return Example(
        np.concatenate([prompt, completion]),
        mask,
        advantages=values[0],
        ref_logprobs=values[1] - 3,
        returns=values[2],
        old_values=values[3],
        sampled_logprobs=values[4] - 3,
    )
