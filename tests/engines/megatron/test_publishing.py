"""Trained by Megatron, published to the built-in generator: its log-probs and experts are those that the engine finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contracts.engine import LR, cut, loss, make_examples
from support.models.engines import make_engine
from support.models.generators import make_generator, scored
from support.models.tiny import VOCAB, save_tiny
from support.ranks.processes import run_ranks
from transformers import AutoConfig

from burnish.distributed.layout import Layout
from burnish.rollout.base import Sampling

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"expert_parallel": 2},
]


def test_the_generator_has_the_weights_that_were_trained(tmp_path: Path) -> None:
    """A mixture with tied embeddings, at layouts that cut it in each way."""
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)
    run_ranks(published_rank, 2, path, LAYOUTS)


def published_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    hf_config = AutoConfig.from_pretrained(path)
    for settings in layouts:
        engine = make_engine(layout, path, kind="megatron", **settings)
        engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
        engine.optim_step(LR)
        generator = make_generator(hf_config, layout)
        generator.load_weights(engine.published(), version=1)
        for each in scored(engine, generator, hf_config, Sampling(12, experts=True), experts=True):
            drawn = each.completion
            np.testing.assert_allclose(
                each.logprobs, drawn.logprobs, atol=1e-5, err_msg=str(settings)
            )
            np.testing.assert_array_equal(np.sort(each.experts), np.sort(drawn.experts))
        engine.close()
